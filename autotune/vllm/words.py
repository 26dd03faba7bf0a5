"""Cause and advice in words for the failures that no gate explains: which stage, which option, which port."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from autotune.core.outcome import Outcome
from autotune.units import gib_text
from autotune.vllm.details import tried_text
from autotune.vllm.logs import LogReading
from autotune.vllm.remedies import Remedy

Details = Mapping[str, Any]
Words = Callable[[LogReading, Details], tuple[str, Iterator[Remedy]]]

#: More than this of a device that is reserved and not used is fragmentation worth naming.
_FRAGMENTS_BYTES = 256 << 20


def _remedies(*texts: str | Remedy) -> Iterator[Remedy]:
    return iter([text if isinstance(text, Remedy) else Remedy(text) for text in texts])


def _oom_load(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    total, tried = details.get("oom_total_bytes"), details.get("oom_tried_bytes")
    held = ""
    if total and details.get("oom_in_use_bytes") and tried:
        others = total - details["oom_in_use_bytes"] - (details.get("oom_free_bytes") or 0)
        if others > 1 << 30:
            held = f"; other processes hold about {gib_text(others)}"
    return (
        f"the device ran out of memory while the weights were loaded{tried_text(details)}{held}: the model "
        "does not fit it",
        _remedies(
            "Take a smaller or quantized checkpoint (AWQ, GPTQ, FP8), or several cards: "
            "--tensor-parallel-size 2 halves what each must hold.",
            "--cpu-offload-gb N keeps N GiB of decoder weights in pinned host memory; it costs speed.",
            Remedy(
                "--gpu-memory-utilization and --max-model-len do not matter here: they do not bound loading.",
                against=frozenset({"gpu_memory_utilization", "max_model_len"}),
            ),
            "See that nothing else holds memory on the device (`nvidia-smi`).",
        ),
    )


def _oom_profile(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    tokens, seqs = reading.facts.max_num_batched_tokens, reading.facts.max_num_seqs
    is_tokens = f" (it is {tokens}; try {tokens // 2})" if tokens and tokens >= 512 else ""
    is_seqs = f" (it is {seqs})" if seqs else ""
    return (
        "the device ran out of memory between loading and serving, in the profile run of "
        f"max_num_batched_tokens tokens or when the KV pool was made{tried_text(details)}",
        _remedies(
            Remedy(
                f"Lower --max-num-batched-tokens{is_tokens}: the peak of the profile run goes with it.",
                {"max_num_batched_tokens": tokens // 2} if is_tokens and tokens else {},
            ),
            f"Lower --max-num-seqs{is_seqs}: logits and sampler take vocabulary x sequences.",
            "For a multimodal model lower --limit-mm-per-prompt or the image size "
            "(--mm-processor-kwargs): the encoder is profiled with the largest items allowed.",
            "Lower --gpu-memory-utilization if another process shares the device: the pool promises what "
            "is not there.",
        ),
    )


def _oom_cudagraph(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    return (
        "the device ran out of memory while CUDA graphs were captured: they lie outside the budget, in "
        f"what gpu_memory_utilization leaves{tried_text(details)}",
        _remedies(
            _lower_share(reading, details),
            "Capture fewer sizes: a lower --max-num-seqs, or --cudagraph-capture-sizes / "
            "--max-cudagraph-capture-size.",
            Remedy("--enforce-eager does without graphs; decoding gets slower.", {"enforce_eager": True}),
        ),
    )


def _oom_sampler(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    requests = details.get("sampler_requests") or reading.facts.max_num_seqs
    many = f" with {requests} sequences" if requests else ""
    halved = requests // 2 if requests and requests > 1 else None
    return (
        f"the device ran out of memory when the sampler was warmed up{many}: vocabulary-wide buffers for "
        f"each sequence, outside the budget{tried_text(details)}",
        _remedies(
            Remedy(
                f"Set --max-num-seqs {halved}: these buffers go with it."
                if halved
                else "Lower --max-num-seqs: these buffers go with it.",
                {"max_num_seqs": halved} if halved else {},
            ),
            _lower_share(reading, details),
        ),
    )


def _oom_runtime(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    slack, tried = details.get("oom_reserved_unallocated_bytes"), details.get("oom_tried_bytes")
    texts: list[str | Remedy] = [
        _lower_share(reading, details),
        "Lower --max-num-batched-tokens (and --limit-mm-per-prompt for images): a step's activations go "
        "with it.",
        "Lower --max-num-seqs: logits and sampler take vocabulary x sequences.",
    ]
    if slack and tried and slack > max(tried, _FRAGMENTS_BYTES):
        texts.append(
            f"{gib_text(slack)} are reserved by torch and not used: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids such fragments."
        )
    return (
        f"the device ran out of memory under load, after the start{tried_text(details)}: the pool takes "
        "what the budget leaves, and a step needed more than the profile run had shown",
        _remedies(*texts),
    )


def _lower_share(reading: LogReading, details: Details) -> Remedy:
    share = reading.figures.get("gpu_memory_utilization", reading.args.get("gpu_memory_utilization"))
    tried, total = details.get("oom_tried_bytes"), details.get("oom_total_bytes") or reading.facts.total_bytes
    if isinstance(share, int | float) and tried and total:
        # Twice what was missing: the next allocation wants room, too.
        lower = int((share - 2 * tried / total) * 100) / 100
        if lower > 0.1:
            return Remedy(
                f"Set --gpu-memory-utilization {lower:g} (it is {share:g}): leaves "
                f"{gib_text((share - lower) * total)} more outside the budget.",
                {"gpu_memory_utilization": lower},
            )
    return Remedy("Lower --gpu-memory-utilization by 0.02 to 0.05: it leaves more outside the budget.")


_SHM = re.compile(r"[Bb]us error|SIGBUS|\bshm\b|shared memory|No space left")
_PINNED = re.compile(r"pin_memory|cudaHost|out of memory$")


def _host_ram(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    said = " ".join(quote.text for quote in reading.evidence)
    if _SHM.search(reading.reason):
        return (
            "shared memory (/dev/shm) ran out: vLLM's processes and NCCL exchange data in it, and a "
            "container has 64 MiB of it unless told otherwise",
            _remedies(
                "Docker: --ipc=host or --shm-size 16g. Kubernetes: mount an emptyDir with `medium: "
                "Memory` on /dev/shm. Then see `df -h /dev/shm`."
            ),
        )
    rss = [details[k] for k in ("killed_anon_rss_bytes", "killed_shmem_rss_bytes") if k in details]
    size = f", which held {gib_text(sum(rss))}" if rss else ""
    offload = reading.facts.offloaded_bytes
    texts: list[str | Remedy] = []
    if offload or "offload" in said:
        moved = f" ({gib_text(offload)} were moved)" if offload else ""
        texts.append(
            f"Lower --cpu-offload-gb{moved}: it is pinned host memory for each rank, and pinning may round "
            "each tensor up to a power of two."
        )
    texts += [
        "See `dmesg -T | grep -i kill` and `free -g`; give the container or cgroup a higher memory limit, "
        "or the machine swap.",
        "Lower what the host holds: --swap-space 0 (v0 engine), --mm-processor-cache-gb 0, fewer API "
        "servers, --max-parallel-loading-workers 1, safetensors instead of .bin files.",
    ]
    if _PINNED.search(reading.reason) and "Killed" not in said:
        cause = "pinned host memory could not be had: host memory, not the device's, ran out"
    else:
        cause = f"the system ended a process{size} for want of host memory (RAM), not of GPU memory"
    return cause, _remedies(*texts)


def _unsupported(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    version = f" (vLLM {reading.facts.vllm_version})" if reading.facts.vllm_version else ""
    needed, has = details.get("capability_needed"), details.get("capability")
    texts: tuple[str, ...]
    if details.get("quantization") and needed:
        cause = f"the quantization method {details['quantization']} needs "
        cause += f"compute capability {_capability(needed)}"
        cause += f", the device has {_capability(has)}" if has else ""
        texts = (
            "Take a checkpoint in another format that this device can compute (GPTQ or AWQ from 7.5 on, "
            "FP8 from 8.9 on, unquantized anywhere), or a newer device.",
        )
    elif needed or "capability" in reading.reason:
        cause = "the device's compute capability is too low for what was asked"
        cause += f": {_capability(needed)} is needed" if needed else ""
        cause += f", it has {_capability(has)}" if has else ""
        texts = ("Take --dtype half instead of bfloat16 where that is what it says, or a newer device.",)
    elif details.get("architecture"):
        cause = f"this vLLM{version} does not know the model architecture {details['architecture']}"
        texts = (
            "Update vLLM and transformers: new models need the release that added them (see the list of "
            "supported models of your version).",
            "See that the checkpoint is the original one: a wrong `architectures` in config.json looks "
            "the same.",
        )
    elif re.search(
        r"no kernel image|kernel image is invalid|sm_\d|no binary|invalid device function", reading.reason
    ):
        cause = "this build of vLLM, torch or Triton has no code for this GPU"
        cause += f" ({has})" if has else ""
        texts = (
            "Install a build for its architecture (for new cards the wheels for the newest CUDA, e.g. "
            "cu128 or later for Blackwell), or build from source with TORCH_CUDA_ARCH_LIST set to it.",
            "If ptxas does not know it: TRITON_PTXAS_PATH can name the ptxas of a newer CUDA toolkit.",
        )
    elif re.search(r"[Ii]llegal instruction|SIGILL|illegal hardware", reading.reason):
        cause = "the processor lacks an instruction that this build of vLLM uses (AVX-512 or AMX, perhaps)"
        texts = ("Build vLLM's CPU backend on this machine, or take a processor that has AVX-512.",)
    elif "resource" in reading.reason:
        cause = "a Triton kernel needs more shared memory than this GPU has"
        texts = (
            "Choose another attention backend (--attention-backend, before 0.12 VLLM_ATTENTION_BACKEND), "
            "or --enforce-eager if it is a compiled kernel; older GPUs (T4, V100) have 64 to 96 KiB.",
        )
    else:
        cause = (
            f"this device, kernel or vLLM{version} does not support what was asked: {_short(reading.reason)}"
        )
        texts = (
            "Choose another attention or MoE backend, another --kv-cache-dtype or --quantization, as the "
            "quoted line says, or a newer vLLM.",
        )
    return cause, _remedies(*texts)


def _capability(text: str) -> str:
    """7.5 for "75" """
    return f"{text[:-1]}.{text[-1]}" if text.isdigit() and len(text) > 1 else text


def _bad_arg(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    option, said = details.get("option"), reading.reason
    for quote in reading.evidence:  # pydantic's header does not say what is wrong
        if "validation error" in said and "validation error" not in quote.text:
            said = quote.text
    named = f" ({option})" if option and str(option) not in said else ""
    cause = f"the options were refused before any memory was touched{named}: {_short(said)}"
    texts = []
    if "unrecognized arguments" in said:
        version = reading.facts.vllm_version
        here = f"vLLM {version}" if version else "this vLLM"
        texts.append(
            f"{here} does not know {option or 'the option'}: see `vllm serve --help=all`; options come and "
            "go between versions."
        )
    elif "attention heads" in said or "divisible" in said:
        texts.append(
            "Choose a --tensor-parallel-size that divides the number of attention heads (of the vision "
            "encoder, too, or set --mm-encoder-tp-mode data)."
        )
    elif "max_model_len" in said and "derived" in said:
        texts.append(
            "Lower --max-model-len to what the model's config allows (the quoted line has it), or set "
            "--hf-overrides with a rope_scaling that the model was made for."
        )
    elif "Mamba cache blocks" in said:
        limit = re.search(r"blocks \((\d+)\)", said)
        most = int(limit[1]) if limit else None
        if most:
            return cause, _remedies(
                Remedy(f"Set --max-num-seqs {most}: one block for each sequence.", {"max_num_seqs": most}),
                "Or raise --gpu-memory-utilization, which makes more blocks.",
            )
    elif "trust_remote_code" in said or "custom code" in said:
        texts.append("Read the model's code, then add --trust-remote-code if you trust it.")
    elif re.search(r"identifier|repository|Repo id|RepositoryNotFound", said):
        texts.append(
            "See that the model's name or path is right, and that a private or gated one has its token "
            "(HF_TOKEN)."
        )
    elif re.search(r"GPUs|ordinal|placement group", said):
        texts.append(
            "Ask for no more cards than are visible (--tensor-parallel-size x --pipeline-parallel-size; "
            "`nvidia-smi -L`, CUDA_VISIBLE_DEVICES)."
        )
    elif "bootstrapping" in said:
        texts.append("Put the code that makes the LLM under `if __name__ == '__main__':`.")
    texts.append(
        "Change or leave out the option that the quoted line names; `autotune check` tries it unlaunched."
    )
    return cause, _remedies(*texts)


def _port(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    port = details.get("port")
    if re.search(r"zmq|DistNetworkError|server socket has failed|29500|TCPStore|DistStore", reading.reason):
        what = (
            f"an internal port ({port})"
            if port
            else "one of the ports that vLLM's processes use among themselves"
        )
        change = "Set --master-port, or VLLM_PORT, to a free one (each server of a machine its own)."
    else:
        what = f"port {port}" if port else "the port"
        change = f"Start on another one: --port {port + 1 if port else 8001}."
    look = f"`ss -ltnp 'sport = :{port}'`" if port else "`ss -ltnp`"
    return (
        f"{what} is held by another process, so the server could not listen",
        _remedies(
            f"{look} shows who holds it (root sees all): an earlier vLLM, mostly; end it.",
            change,
            "A port just given back may stay in TIME_WAIT for a minute.",
        ),
    )


def _hung(reading: LogReading, details: Details) -> tuple[str, Iterator[Remedy]]:
    waited = f" for {details['waited_s']} s and more" if details.get("waited_s") else ""
    where = f" while {reading.stage}" if reading.stage and reading.stage != "serving" else ""
    return (
        f"one of its processes no longer answered{where}: the others waited{waited} and nothing followed",
        _remedies(
            "See where it hangs: `py-spy dump --pid PID` of each worker (with several GPUs also "
            "NCCL_DEBUG=INFO).",
            "Several GPUs: try NCCL_P2P_DISABLE=1 and --disable-custom-all-reduce; if one of them helps, "
            "it is the link between the cards (IOMMU/ACS, drivers).",
            "Compiling or loading from a slow disk may take that long, too: --enforce-eager tells them "
            "apart, VLLM_ENGINE_READY_TIMEOUT_S gives more time.",
        ),
    )


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199].rstrip() + "…"


WORDS: Mapping[Outcome, Words] = {
    Outcome.OOM_LOAD: _oom_load,
    Outcome.OOM_PROFILE: _oom_profile,
    Outcome.OOM_CUDAGRAPH: _oom_cudagraph,
    Outcome.OOM_SAMPLER: _oom_sampler,
    Outcome.OOM_RUNTIME: _oom_runtime,
    Outcome.HOST_RAM: _host_ram,
    Outcome.UNSUPPORTED_ARCH: _unsupported,
    Outcome.BAD_ARG: _bad_arg,
    Outcome.PORT: _port,
    Outcome.HUNG: _hung,
}
