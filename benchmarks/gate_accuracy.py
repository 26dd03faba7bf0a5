"""How right the gates are, and how decisive: verdicts on launches that happened.

    python benchmarks/gate_accuracy.py [--markdown] [--cases]

Three sets: the scan of a 4 GB card (vLLM 0.28, launches on a polluted device set apart), the H200 rows
(0.26), and public cases whose model, card and options are all known. Each launch is judged before any
launch is known, and after one: another launch of the same model, compile mode and ranks (the first of
its set that had a clean device and said something of its memory).

  wrong refusals      started, and the verdict is "refused"
  admitted refusals   stopped at a memory gate, and the verdict is "starts"
  uncertain           of both kinds
  pool                predicted against measured, in percent of the measured pool; width of the interval
                      in percent of the budget, eager rows
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autotune.core.calibration import Calibration  # noqa: E402
from autotune.core.device import Device, DeviceKind  # noqa: E402
from autotune.core.facts import Facts  # noqa: E402
from autotune.core.gates import Verdict  # noqa: E402
from autotune.core.interval import Interval  # noqa: E402
from autotune.core.launch import OPTION_NAMES, LaunchConfig  # noqa: E402
from autotune.core.model import ModelSpec  # noqa: E402
from autotune.core.outcome import GATES, Outcome  # noqa: E402
from autotune.errors import AutotuneError  # noqa: E402
from autotune.recordings import load_recording  # noqa: E402
from autotune.units import GIB, MIB  # noqa: E402
from autotune.vllm.predict import Predictor  # noqa: E402

DATA = ROOT / "tests" / "data"
#: A refusal that misses this share of its budget or more must be refused before any launch.
DECISIVE_SHARE = 0.10
#: Public launches whose sources say that an earlier process was still resident (803 MiB in use, 134 idle).
_POLLUTED = {
    "sgvlm-3b-off1-len2048-mnbt1024-polluted", "sgvlm-3b-off1-len2048-polluted",
    "sgvlm-3b-off1-seqs4-polluted", "sgvlm-3b-off2-gmu070", "sgvlm-3b-off2-gmu070-run1",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One launch that happened.

    Attributes:
        group: launches with one key teach each other.
        pool: bounds of the measured pool in bytes, None when it was not said.
        missing_share: of its budget, how much a refused launch was short by; None when not known.
    """

    source: str
    name: str
    group: str
    predictor: Predictor
    config: LaunchConfig
    device: Device
    outcome: Outcome
    facts: Facts
    pool: Interval | None = None
    missing_share: float | None = None

    @property
    def started(self) -> bool:
        return self.outcome is Outcome.STARTED

    @property
    def clean(self) -> bool:
        return self.device.polluted_by_bytes < 64 * MIB and self.name not in _POLLUTED


@dataclass(frozen=True)
class Judged:
    case: Case
    verdict: Verdict

    @property
    def error(self) -> float | None:
        """Relative error of the best guess against the nearest pool that fits what was said."""
        pool = self.case.pool
        if pool is None or pool.best <= 0:
            return None
        best = self.verdict.ledger.kv_pool.best
        nearest = min(max(best, pool.low), pool.high)
        return float(abs(best - nearest) / pool.best)

    @property
    def width(self) -> float:
        return float(self.verdict.ledger.kv_pool.width / self.verdict.ledger.budget.best)

    @property
    def holds(self) -> bool:
        pool, said = self.case.pool, self.verdict.ledger.kv_pool
        return pool is None or bool(said.low <= pool.high and pool.low <= said.high)


# -- the sets -------------------------------------------------------------------------------------


@lru_cache
def spec(folder: str) -> ModelSpec:
    path = DATA / "models" / folder / "config.json"
    return ModelSpec.from_config(json.loads(path.read_text(encoding="utf-8")), name=folder)


def scan() -> Iterator[Case]:
    recording = load_recording(DATA / "recordings" / "rtx3050ti-qwen25-vl-3b-awq.yaml")
    predictor = Predictor(spec("qwen25-vl-3b-awq"), "0.28.0", usage="llm")
    for launch in recording.launches:
        pool = launch.facts.kv_pool_bytes
        # As the file says of all runs.
        config = launch.config.with_options(
            limit_mm_per_prompt='{"image": 1}', mm_processor_kwargs='{"max_pixels": 50176}'
        )
        yield Case(
            "4 GB scan", launch.name, "scan", predictor, config, launch.device, launch.outcome, launch.facts,
            _around(pool) if pool is not None else None,
            _missing(predictor, config, launch.device, launch.outcome, launch.facts),
        )  # fmt: skip


def h200() -> Iterator[Case]:
    recording = load_recording(DATA / "recordings" / "h200-vllm-0.26-launches.yaml")
    for launch in recording.launches:
        predictor = Predictor(spec(launch.model), "0.26.0", usage="llm")
        pool = None
        if launch.facts.num_gpu_blocks:
            block = predictor.verdict(launch.config, launch.device).ledger.bytes_per_block
            blocks = launch.facts.num_gpu_blocks
            pool = Interval(blocks * block, (blocks + 0.5) * block, (blocks + 1) * block)
        yield Case(
            "H200, 0.26", launch.name, f"{launch.model} {launch.config.enforce_eager}", predictor,
            launch.config, launch.device, launch.outcome, launch.facts, pool,
            _missing(predictor, launch.config, launch.device, launch.outcome, launch.facts),
        )  # fmt: skip


#: Folders of tests/data/models for names of public cases; the first match is taken.
_FOLDERS = (
    (r"Qwen2\.5-VL-3B", "awq", "qwen25-vl-3b-awq"), (r"Qwen2\.5-VL-7B", "", "qwen25-vl-7b"),
    (r"Qwen2-VL-2B", "", "qwen2-vl-2b"), (r"Qwen3-VL-4B", "", "qwen3-vl-4b"),
    (r"Qwen3-VL-30B-A3B", "", "qwen3-vl-30b-a3b"), (r"Qwen2-7B", "", "qwen2-7b"),
    (r"Qwen2\.5-0\.5B", "", "qwen25-0.5b"), (r"Qwen3-0\.6B", "", "qwen3-0.6b"), (r"Qwen3-8B", "", "qwen3-8b"),
    (r"Llama-3\.1-8B", "", "llama31-8b"), (r"Llama-3\.[13]-70B", "", "llama33-70b"),
    (r"gpt-oss-120b", "mxfp4", "gpt-oss-120b"), (r"gpt-oss-20b", "mxfp4", "gpt-oss-20b"),
    (r"Qwen3-30B-A3B", "fp8", "qwen3-30b-a3b-fp8"), (r"gemma-3-1b", "", "gemma3-1b"),
    (r"Qwen3\.5-35B", "", "qwen35-35b-a3b"), (r"Qwen3\.5-9B", "", "qwen35-9b"),
    (r"DeepSeek-V2-Lite", "", "deepseek-v2-lite"), (r"DeepSeek-R1$", "fp8", "deepseek-v3"),
    (r"TinyLlama", "", "tinyllama-1.1b"),
)  # fmt: skip
#: CUDA totals in MiB of cards that sources name without their memory (cudaMemGetInfo, other cases of the
#: same card); an interval where cards differ.
_CARDS = (
    (r"A100.*80|A800", 81_050, 81_230), (r"A100.*40", 40_330, 40_550), (r"H100", 81_000, 81_120),
    (r"RTX 3090", 24_100, 24_270), (r"RTX 4090", 24_080, 24_220), (r"\bL4\b", 22_480, 22_700),
    (r"L40S", 45_400, 45_600), (r"RTX 5090 32|RTX 5090$", 32_060, 32_130), (r"H200", 143_100, 143_200),
    (r"RTX 5080", 15_800, 16_000),
)  # fmt: skip
#: What an idle card's context takes, in MiB, where free memory is not said.
_CONTEXT_MIB = Interval(100, 500, 1300)


def public() -> Iterator[Case]:
    cases = yaml.safe_load((DATA / "public-launch-cases.yaml").read_text(encoding="utf-8"))
    facts = yaml.safe_load((DATA / "model-configs.yaml").read_text(encoding="utf-8"))
    by_name = {fact["model"]: fact for fact in facts}
    for case in cases:
        if case["outcome"] == "started" or case["outcome"] in {gate.value for gate in GATES}:
            made = _public_case(case, by_name)
            if made is not None:
                yield made


def _public_case(case: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> Case | None:
    """The case, or None when model, card or options are not all known."""
    gpu, args = case.get("gpu") or {}, dict(case.get("args") or {})
    if gpu.get("platform") in ("rocm", "xpu", "uma", "gke", "native Windows build"):
        return None
    if re.search(r"Intel|AMD|MI50|GB10|GH200|Spark|unified", gpu.get("name", "")):
        return None
    device = _device(gpu, case)
    outcome = Outcome(case["outcome"])
    name = (case.get("derived") or {}).get("config_key") or case.get("model")
    model = _model(name, case, by_name)
    if model is None and outcome is Outcome.GATE1_BUDGET and gpu.get("free_gib"):
        model, args = spec("llama31-8b"), {"gpu_memory_utilization": args.get("gpu_memory_utilization")}
    if device is None or model is None:
        return None
    count = gpu.get("count") or 1
    ranks = (args.get("tensor_parallel_size") or 1) * (args.get("pipeline_parallel_size") or 1)
    if count > 1 and ranks == 1 and outcome is not Outcome.GATE1_BUDGET:
        return None
    args.pop("swap_space", None)
    args.pop("attention_backend", None)
    if set(args) - set(OPTION_NAMES) - {"enable_expert_parallel"}:
        return None
    try:
        config = LaunchConfig.from_params(
            {key: value for key, value in args.items() if key in OPTION_NAMES and value is not None}
        )
    except AutotuneError:
        return None
    observed = case.get("observed") or {}
    pool = observed.get("available_kv_gib")
    version = str(case.get("vllm_version") or "unknown").removesuffix(" (from log line numbers)")
    predictor = Predictor(model, version, usage="serve")
    launched = Facts(
        kv_pool_bytes=round(pool * GIB) if pool is not None else None,
        weights_bytes=round(observed["weights_gib"] * GIB) if "weights_gib" in observed else None,
        offloaded_bytes=round(observed["cpu_offloaded_gib"] * GIB)
        if "cpu_offloaded_gib" in observed
        else None,
    )
    source = case["source"].get("repo", "") + str(case["source"].get("issue", ""))
    missing = _missing(predictor, config, device, outcome, launched)
    if "total_gib" not in gpu:
        # Of no use to others: where its budget began is not known to 0.1 GiB.
        launched = replace(launched, kv_pool_bytes=None)
    return Case(
        "public", case["id"], f"{source} {model.name} {bool(config.enforce_eager)} {ranks}", predictor,
        config, device, outcome, launched, _around(round(pool * GIB)) if pool is not None else None, missing,
    )  # fmt: skip


def _device(gpu: Mapping[str, Any], case: Mapping[str, Any]) -> Device | None:
    name = str(gpu.get("name", "card"))
    if "total_gib" in gpu:
        # Printed with two decimals.
        total = Interval(*((gpu["total_gib"] + off) * GIB for off in (-0.005, 0.0, 0.005)))
        if float(gpu["total_gib"]).is_integer() and "free_gib" not in gpu:
            total = Interval(total.best * 0.96, total.best * 0.98, total.best)  # a round, marketed size
    else:
        found = next((row for row in _CARDS if re.search(row[0], name)), None)
        if found is None:
            return None
        total = Interval(found[1] * MIB, (found[1] + found[2]) / 2 * MIB, found[2] * MIB)
    if "free_gib" in gpu:
        free = Interval(*(min(total.high, (gpu["free_gib"] + off) * GIB) for off in (-0.005, 0.0, 0.005)))
    else:
        used = Interval(*(bound * MIB for bound in (_CONTEXT_MIB.low, _CONTEXT_MIB.best, _CONTEXT_MIB.high)))
        used = used + float(gpu.get("used_mib_before", 0) * MIB)
        free = total - used
        if case["outcome"] != "started":
            free = Interval(0.0, free.best, total.high)  # someone else may have had some of it
    return Device(name, DeviceKind.CUDA, total, free, platform=str(gpu.get("platform", "linux")))


def _model(
    name: str | None, case: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]
) -> ModelSpec | None:
    if not name:
        return None
    quantization = str(case.get("quantization") or "").split(" ")[0].lower()
    for pattern, wanted, folder in _FOLDERS:
        if re.search(pattern, name) and quantization == wanted:
            return spec(folder)
    fact = by_name.get(name)
    family = next((kind for pattern, kind in _FAMILIES if re.search(pattern, name)), None)
    if fact is None or family is None or fact.get("layer_pattern") or fact.get("mla"):
        return None
    config = {key: value for key, value in fact.items() if key in _CONFIG_KEYS}
    config |= {"model_type": family[0], "architectures": [family[1]]}
    if quantization:
        known = _QUANTISED.get(quantization)
        if known is None:
            return None
        config["quantization_config"] = known
    try:
        return ModelSpec.from_config(config, name=name)
    except AutotuneError:
        return None


_FAMILIES = (
    (r"Qwen2\.5-(14|32|72|7)B", ("qwen2", "Qwen2ForCausalLM")),
    (r"Qwen3-(1\.7|4|14|32)B", ("qwen3", "Qwen3ForCausalLM")),
    (r"Qwen3-(235B|30B)", ("qwen3_moe", "Qwen3MoeForCausalLM")),
    (r"Llama-3|orpheus|CodeLlama", ("llama", "LlamaForCausalLM")),
    (r"Mistral-7B", ("mistral", "MistralForCausalLM")),
)
_CONFIG_KEYS = {
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "dtype",
    "num_experts", "moe_intermediate_size", "num_experts_per_tok",
}  # fmt: skip
_QUANTISED: Mapping[str, Mapping[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "fp8"},
}


def _around(pool: int) -> Interval:
    return Interval(pool - 0.005 * GIB, float(pool), pool + 0.005 * GIB)


def _missing(
    predictor: Predictor, config: LaunchConfig, device: Device, outcome: Outcome, facts: Facts
) -> float | None:
    """By what share of its budget a refused launch was short, by its own figures."""
    if outcome is Outcome.STARTED:
        return None
    ledger = predictor.verdict(config, device).ledger
    if outcome is Outcome.GATE1_BUDGET:
        return float((ledger.budget.best - ledger.free.best) / ledger.budget.best)
    pool = facts.kv_pool_bytes
    return None if pool is None else float((ledger.needed_bytes.best - pool) / ledger.budget.best)


# -- judging --------------------------------------------------------------------------------------


def judge_all(cases: list[Case]) -> tuple[list[Judged], list[Judged]]:
    """Every clean case before any launch, and those that another one of their group can teach."""
    before = [Judged(case, case.predictor.verdict(case.config, case.device)) for case in cases if case.clean]
    after = []
    for case in cases:
        if not case.clean:
            continue
        known = _taught(case, cases)
        if known is not None:
            after.append(Judged(case, case.predictor.verdict(case.config, case.device, known)))
    return before, after


def _taught(case: Case, cases: list[Case]) -> Calibration | None:
    for other in cases:
        if other is case or other.group != case.group or not other.clean or not other.started:
            continue
        known = other.predictor.learn(Calibration(), other.config, other.device, other.facts)
        if any(o.non_kv is not None for o in known.observations):
            return known
    return None


def row(name: str, when: str, judged: list[Judged]) -> list[str]:
    started = [j for j in judged if j.case.started]
    refused = [j for j in judged if not j.case.started]
    unsure = [j for j in judged if j.verdict.verdict == "uncertain"]
    short = [j for j in refused if (j.case.missing_share or 0) >= DECISIVE_SHARE]
    errors = [j.error for j in judged if j.error is not None]
    eager = [j.width for j in judged if j.case.config.enforce_eager and j.case.pool is not None]
    widths = eager or [j.width for j in judged if j.case.pool is not None]
    said = [j for j in judged if j.case.pool is not None]
    return [
        name,
        when,
        f"{len(started)} + {len(refused)}",
        str(sum(j.verdict.refused for j in started)),
        str(sum(j.verdict.verdict == "starts" for j in refused)),
        f"{sum(j.case.started for j in unsure)} + {sum(not j.case.started for j in unsure)}",
        f"{sum(j.verdict.refused for j in short)} of {len(short)}",
        f"{100 * statistics.median(errors):.2f} / {100 * max(errors):.2f}" if errors else "-",
        f"{100 * max(widths):.1f}" if widths else "-",
        f"{sum(j.holds for j in said)} of {len(said)}",
    ]


HEADER = [
    "launches", "known", "started + refused", "wrong refusals", "admitted refusals", "uncertain",
    "short by 10 %: refused", "pool error %, median / worst", "widest interval, % of budget", "pool inside",
]  # fmt: skip


def table(rows: list[list[str]], *, markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, ["---"] * len(HEADER), *rows)]
        return "\n".join(lines)
    widths = [max(len(cells[n]) for cells in (HEADER, *rows)) for n in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (HEADER, *rows)
    )


def detail(judged: list[Judged], when: str) -> Iterator[str]:
    for j in judged:
        error = "" if j.error is None else f"{100 * j.error:6.2f} %"
        pool = j.verdict.ledger.kv_pool
        yield (
            f"{when:6} {j.case.source:10} {j.case.name:44} {j.case.outcome.value:18} {j.verdict.verdict:9} "
            f"{j.verdict.outcome.value:18} {error:9} {pool.low / GIB:7.2f} {pool.best / GIB:7.2f} "
            f"{pool.high / GIB:7.2f} measured {j.case.pool.best / GIB if j.case.pool else float('nan'):7.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="the table as the README has it")
    parser.add_argument("--cases", action="store_true", help="one line per launch as well")
    options = parser.parse_args()
    rows, lines, compiled = [], [], 0
    totals: tuple[list[Judged], list[Judged]] = ([], [])
    for name, cases in (
        ("4 GB scan, 0.28", list(scan())), ("H200, 0.26", list(h200())), ("public", list(public())),
    ):  # fmt: skip
        before, after = judge_all(cases)
        compiled += sum(
            1 for j in before if not j.case.config.enforce_eager and j.case.source == "H200, 0.26"
        )
        for when, judged, total in (("none", before, totals[0]), ("one", after, totals[1])):
            rows.append(row(name, when, judged))
            total.extend(judged)
            lines.extend(detail(judged, when))
    rows.append(row("all", "none", totals[0]))
    rows.append(row("all", "one", totals[1]))
    if options.cases:
        print("\n".join(lines), end="\n\n")
    print(table(rows, markdown=options.markdown))
    print(
        f"\nH200 rows: {compiled} compiled, each the only one of its model, so none is judged after one "
        "launch; launches on a polluted device are left out."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
