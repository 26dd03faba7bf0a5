"""What this machine offers to vLLM, and what will bite: probes that never fail, each with what to do.

finding   one thing that was found
machine   system, processor, memory
gpus      NVIDIA's driver and cards
engines   which vLLM can be started, and the traps of its version
places    disk, ports, variables
"""

from autotune.doctor.engines import Candidate, candidates, engine_findings, usable
from autotune.doctor.finding import Finding, Severity, guarded
from autotune.doctor.gpus import gpu_findings
from autotune.doctor.machine import machine_findings
from autotune.doctor.places import place_findings

__all__ = [
    "Candidate",
    "Finding",
    "Severity",
    "candidates",
    "engine_findings",
    "gpu_findings",
    "guarded",
    "machine_findings",
    "place_findings",
    "usable",
]
