"""What arithmetic on the model makes of a log's remedies: one list that does not contradict itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autotune.core.device import Device, DeviceKind
from autotune.core.gates import Verdict
from autotune.core.interval import Interval
from autotune.core.launch import OPTION_NAMES, LaunchConfig, check_option
from autotune.core.model import ModelSpec
from autotune.core.outcome import GATES, Outcome
from autotune.errors import BadInput
from autotune.units import GIB, gib_text
from autotune.vllm.advice import advise
from autotune.vllm.advice_text import flags_text
from autotune.vllm.diagnosis import Diagnosis
from autotune.vllm.predict import Predictor
from autotune.vllm.remedies import TOO_EARLY, Remedy
from autotune.vllm.versions import rules_for

#: The device ran out after the gates had been passed, by what lies outside the budget.
_AFTER_THE_GATES = (Outcome.OOM_CUDAGRAPH, Outcome.OOM_SAMPLER, Outcome.OOM_RUNTIME)
#: Outcomes that the arithmetic of memory explains.
_OF_MEMORY = (*GATES, Outcome.OOM_LOAD, Outcome.OOM_PROFILE, *_AFTER_THE_GATES)
_ROUNDING_BYTES = 0.005 * GIB
#: Changes in a list: more than these nobody tries.
_MOST = 6
#: The best first.
_RANKS = {"starts": 0, "uncertain": 1, "passes gate1_budget": 2, None: 3}
_GMU, _LENGTH, _TOKENS = "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens"
#: Options whose numbers can be turned two ways.
_TURNED = (_GMU, _LENGTH, "max_num_seqs", _TOKENS, "cpu_offload_gb")
#: What lowers the bytes that loading puts on one card.
_LOADED_LESS = {"cpu_offload_gb", "tensor_parallel_size", "quantization"}
#: What takes less of the memory outside the budget, or of a step's activations.
_OUTSIDE_LESS = {
    _GMU, "max_num_seqs", _TOKENS, "enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    "limit_mm_per_prompt", "language_model_only",
}  # fmt: skip
#: One sequence's KV by the log and by arithmetic may differ by blocks and vLLM's two decimals.
_SAME_MODEL = 0.1
#: What the words of `explain` say of gmu after an OOM behind the gates ("by 0.02 to 0.05").
_SHARE_STEP = 0.05


def with_arithmetic(diagnosis: Diagnosis, model: ModelSpec, device: Device, version: str | None) -> Diagnosis:
    """`diagnosis` with remedies that the gates for this model and device let pass, none against another.

    The log's own come first. Each is put through the gates of the launch that the log is of, as far as
    it prints its options; what they refuse is left out, and so is advice in words alone once there is a
    change to make.

    Args:
        version: vLLM's, for a log that does not name it.
    """
    if diagnosis.outcome not in _OF_MEMORY:
        return diagnosis
    joined = _Joined(diagnosis, model, device, version)
    return replace(diagnosis, remedies=joined.remedies(), doubts=(*diagnosis.doubts, *joined.disagreement))


def launch_of(diagnosis: Diagnosis) -> LaunchConfig:
    """The options of the launch, from what the log prints of them."""
    reading, facts = diagnosis.reading, diagnosis.reading.facts
    given: dict[str, Any] = {}
    for name, value in reading.args.items():
        if name in OPTION_NAMES:
            try:
                given[name] = check_option(name, value)
            except BadInput:
                continue  # a value that vLLM takes and the arithmetic does not know
    if diagnosis.ledger.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = diagnosis.ledger.gpu_memory_utilization
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(facts, name) is not None:
            given[name] = getattr(facts, name)
    return LaunchConfig(**given)


class _Joined:
    def __init__(self, diagnosis: Diagnosis, model: ModelSpec, device: Device, version: str | None) -> None:
        facts = diagnosis.reading.facts
        self._diagnosis = diagnosis
        self._predictor = Predictor(model, facts.vllm_version or version or rules_for("unknown").column)
        self._config = launch_of(diagnosis)
        self._device = _as_seen(diagnosis, device)
        self._now = self._judge({})
        #: Where the arithmetic says another thing of this launch than its log does.
        self.disagreement = tuple(self._disagreement())

    def _disagreement(self) -> Iterator[str]:
        now, outcome = self._now, self._diagnosis.outcome
        ends = "--model or --device is not the log's, or the log does not print all options"
        needed, here = self._diagnosis.ledger.kv_needed_bytes, now.ledger.needed_bytes
        if self._diagnosis.ledger.cpu and self._device.kind is not DeviceKind.CPU:
            yield "the log is of the CPU backend, and --device is a card"
        if needed and now.headroom and not self._same_model():
            yield (
                f"one sequence takes {gib_text(needed)} of KV cache by the log and {gib_text(here.best)} by "
                f"arithmetic: {ends}"
            )
        elif not now.headroom:
            yield f"by arithmetic vLLM would not take these options at all ({now.reason}): {ends}"
        elif now.verdict == "starts" and outcome in GATES:
            yield f"by arithmetic this launch would start: {ends}"
        elif now.refused and outcome in _AFTER_THE_GATES:
            yield f"by arithmetic this launch would not have come so far ({now.reason}): {ends}"

    def remedies(self) -> tuple[Remedy, ...]:
        """Changes, the log's first, then remarks that none of them contradicts."""
        own = [*self._diagnosis.remedies, *self._in_numbers()]
        passed = [judged for remedy in own if _concrete(remedy) for judged in self._passed(remedy)]
        predicted, nothing = self._predicted(passed, own)
        chosen = self._without_contradictions(passed, predicted)[:_MOST]
        if not chosen and nothing is None:
            words = tuple(remedy for remedy in own if not _concrete(remedy))
            return words or (Remedy("By the model's arithmetic none of what the log suggests starts here."),)
        changed = {name for remedy in chosen for name in remedy.changes}
        remarks = [
            remedy
            for remedy in own
            if not _concrete(remedy) and remedy.against and not changed & remedy.against
        ]
        # "Nothing helps" is said only where nothing was found.
        return (*chosen, *remarks) if chosen or nothing is None else (nothing, *remarks)

    # -- the log's own ------------------------------------------------------------------------------

    def _in_numbers(self) -> Iterator[Remedy]:
        """What the log's remedies say in words where the launch's own value is not printed."""
        outcome, resolved = self._diagnosis.outcome, self._now.resolved
        said = {name for remedy in self._diagnosis.remedies for name in remedy.changes}
        if outcome in _AFTER_THE_GATES and _GMU not in said:
            share = math.floor((resolved.gpu_memory_utilization - _SHARE_STEP) * 100 + 1e-6) / 100
            if share > 0:
                more = gib_text((resolved.gpu_memory_utilization - share) * self._device.total.best)
                yield Remedy(
                    f"Set --gpu-memory-utilization {share:g} (it is {resolved.gpu_memory_utilization:g}): "
                    f"leaves {more} more outside the budget.",
                    {_GMU: share},
                )
        tokens = resolved.max_num_batched_tokens // 2
        if outcome is Outcome.OOM_PROFILE and _TOKENS not in said and tokens >= 256:
            yield Remedy(
                f"Set --max-num-batched-tokens {tokens} (it is {2 * tokens}): the peak of the profile run "
                "goes with it.",
                {_TOKENS: tokens},
            )

    def _passed(self, remedy: Remedy) -> Iterator[Remedy]:
        """The remedy as the arithmetic judges it; nothing when that refuses it."""
        verdict = self._judge(remedy.changes, remedy.frees_bytes)
        if remedy.checked == "starts" and verdict.headroom and self._same_model():
            yield remedy  # the launch's own figures know better than arithmetic
        elif verdict.headroom and not verdict.refused:
            # Arithmetic that would have let the refused launch start proves nothing of another.
            if not self.disagreement:
                remedy = replace(remedy, text=remedy.text.replace(TOO_EARLY, "."), checked=verdict.verdict)
            yield remedy

    def _same_model(self) -> bool:
        """Whether the log's KV figures can be those of this model with these options."""
        ledger, here = self._diagnosis.ledger, self._now
        if ledger.kv_needed_bytes is None or not here.headroom:
            return False
        needed = here.ledger.needed_bytes
        return bool(
            needed.low * (1 - _SAME_MODEL) <= ledger.kv_needed_bytes <= needed.high * (1 + _SAME_MODEL)
        )

    # -- the arithmetic's ---------------------------------------------------------------------------

    def _predicted(self, passed: list[Remedy], own: Iterable[Remedy]) -> tuple[list[Remedy], Remedy | None]:
        """Changes that the arithmetic finds, and its word when it finds that none helps."""
        first: Mapping[str, Any] = {}
        outcome = self._diagnosis.outcome
        if outcome in (*_AFTER_THE_GATES, Outcome.OOM_PROFILE) and not passed:
            # The gates want less, too; what the log proves to be missing must come with it.
            first = next((remedy.changes for remedy in own if remedy.changes), {})
        config = self._config.with_options(**first)
        found: list[Remedy] = []
        advised = advise(self._predictor, config, self._device, most=2 * _MOST)
        nothing = None
        if self._now.refused and all(advice.checked is None for advice in advised):
            # The last remark is the one that sums up.
            nothing = next((Remedy(f"By the model's arithmetic: {one.text}") for one in advised[-1:]), None)
        for advice in advised:
            if advice.checked is None or (advice.frees_bytes and first):
                continue  # a remark, or memory without the change that the log proves to be needed
            if self._helps({**first, **advice.changes}):
                text = advice.text if not first else f"{flags_text(first)}, and {advice.text}"
                changes = {**first, **advice.changes}
                text = f"By the model's arithmetic: {text.removeprefix('or ')}"
                found.append(Remedy(text, changes, advice.frees_bytes, advice.checked))
        return found, nothing

    def _helps(self, changes: Mapping[str, Any]) -> bool:
        """False for a change that the log itself shows to be none."""
        outcome, ledger = self._diagnosis.outcome, self._diagnosis.ledger
        if outcome is Outcome.OOM_LOAD:
            return not changes or bool(_LOADED_LESS & set(changes))
        share = changes.get(_GMU)
        if outcome not in GATES:
            # More budget is less for what lies outside it.
            more = share is not None and share > self._now.resolved.gpu_memory_utilization
            return not more and bool(_OUTSIDE_LESS & set(changes))
        if changes and set(changes) <= {_GMU, _LENGTH} and None not in changes.values():
            return ledger.outcome_with(share=share, length=changes.get(_LENGTH)) not in GATES
        return True

    # -- one list ---------------------------------------------------------------------------------

    def _without_contradictions(self, passed: list[Remedy], predicted: list[Remedy]) -> list[Remedy]:
        """One value for each set of options, the surest; no option both raised and lowered."""
        best: dict[tuple[str, ...], Remedy] = {}
        # What was looked for stands before what was only judged, but not before the log's own figures.
        by_figures = [remedy for remedy in passed if self._by_figures(remedy)]
        rest = [remedy for remedy in passed if remedy not in by_figures]
        frees = [remedy for remedy in rest if remedy.frees_bytes]
        for remedy in (*by_figures, *frees, *predicted, *rest):
            key = tuple(sorted(remedy.changes))
            if key not in best or _RANKS[remedy.checked] < _RANKS[best[key].checked]:
                best[key] = remedy
        ways: dict[str, bool] = {}
        chosen = []
        for remedy in sorted(best.values(), key=lambda remedy: _RANKS[remedy.checked]):
            turned = dict(self._turned(remedy.changes))
            if all(ways.get(name, way) == way for name, way in turned.items()):
                ways |= turned
                chosen.append(remedy)
        return chosen

    def _by_figures(self, remedy: Remedy) -> bool:
        """Whether the log's own figures say that it starts."""
        own = (one for one in self._diagnosis.remedies if one.checked == "starts")
        return any(dict(one.changes) == dict(remedy.changes) for one in own)

    def _turned(self, changes: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        """Numbers that are changed, and whether upwards."""
        for name, value in changes.items():
            now = getattr(self._now.resolved, name) if name in _TURNED else None
            if now is not None and value is not None and value != now:
                yield name, value > now

    def _judge(self, changes: Mapping[str, Any], frees_bytes: int = 0) -> Verdict:
        device = self._device
        if frees_bytes:
            free, most = device.free, device.total.high
            more = (min(value + frees_bytes, most) for value in (free.low, free.best, free.high))
            device = replace(device, free=Interval(*more))
        return self._predictor.verdict(self._config.with_options(**changes), device)


def _concrete(remedy: Remedy) -> bool:
    return bool(remedy.changes or remedy.frees_bytes)


def _as_seen(diagnosis: Diagnosis, device: Device) -> Device:
    """`device` with the total and the free memory that the log states; with a total alone, as idle as it
    was.
    """
    facts = diagnosis.reading.facts
    if facts.total_bytes is not None:
        total = _around(facts.total_bytes)
        free = device.free + Interval.exact(total.best - device.total.best)
        device = replace(device, total=total, free=free)
    if facts.free_bytes is not None and not diagnosis.ledger.free_at_pool:
        device = replace(device, free=_around(facts.free_bytes))
    return device


def _around(value: int) -> Interval:
    return Interval(value - _ROUNDING_BYTES, float(value), value + _ROUNDING_BYTES)
