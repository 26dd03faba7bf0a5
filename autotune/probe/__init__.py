"""What this machine has: memory of the device a launch will see, and the parts of its fingerprint.

machine   processor, NUMA node, control group, operating system
nvml      what the NVIDIA driver says of its GPUs
gpu       one GPU's memory as a launch will find it

Nothing here imports torch: its figures come from a child process in the engine's own interpreter.
"""

from autotune.probe.gpu import GpuReader, cuda_device, gpu_environment
from autotune.probe.machine import (
    CPU_OWN_BYTES,
    allowed_cpus,
    cpu_device,
    cpu_flags,
    cpu_name,
    emulates_bfloat16,
    machine_facts,
    oom_kills,
    own_node,
    platform_name,
    processor_ticks,
)
from autotune.probe.nvml import (
    Condition,
    Holder,
    condition,
    driver_facts,
    gpu_facts,
    holders,
    nvml_memory,
    nvml_session,
    visible_gpu,
    visible_uuids,
)

__all__ = [
    "CPU_OWN_BYTES",
    "Condition",
    "GpuReader",
    "Holder",
    "allowed_cpus",
    "condition",
    "cpu_device",
    "cpu_flags",
    "cpu_name",
    "cuda_device",
    "driver_facts",
    "emulates_bfloat16",
    "fingerprint",
    "gpu_environment",
    "gpu_facts",
    "holders",
    "machine_facts",
    "nvml_memory",
    "nvml_session",
    "oom_kills",
    "own_node",
    "platform_name",
    "processor_ticks",
    "visible_gpu",
    "visible_uuids",
]


def fingerprint() -> dict[str, object]:
    """What a result depends on besides the configuration, as far as it can be read: machine and driver."""
    found = {**machine_facts(), **driver_facts()}
    return {key: value for key, value in found.items() if value is not None}
