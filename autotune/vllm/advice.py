"""What to change so that a launch starts: every piece is put through the gates before it is said."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.gates import EDGE_BYTES, Verdict
from autotune.core.interval import Interval
from autotune.core.launch import LaunchConfig
from autotune.core.outcome import Outcome
from autotune.units import GIB, mib_text
from autotune.vllm.advice_text import ends_text, flags_text, freed_text, left_bytes, may_start, price_text
from autotune.vllm.knobs import GMU, Knob, knobs, more_cards, repairs
from autotune.vllm.predict import Predictor

_GATE1, _GATE3 = Outcome.GATE1_BUDGET.value, Outcome.GATE3_SEQ_TOO_LONG.value


@dataclass(frozen=True)
class Advice:
    """One thing to do, or one thing to know.

    Attributes:
        text: one line for a person, with figures.
        changes: options to set (None takes an option away); empty for a remark and for what is done
            outside vLLM.
        checked: the verdict with the change made, "starts" or "uncertain"; None for a remark.
        frees_bytes: memory that others must give back before the start.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    checked: str | None = None
    frees_bytes: int = 0


def advise(
    predictor: Predictor,
    config: LaunchConfig,
    device: Device,
    calibration: Calibration | None = None,
    *,
    most: int = 6,
) -> tuple[Advice, ...]:
    """Remarks, then the changes that let `config` start, the smallest first.

    Single options when one is enough, else pairs, else the smallest set that is. Changes that surely
    start are looked for first; those that probably do are marked so.

    Args:
        most: at most so many pieces.
    """
    return tuple(itertools.islice(_Adviser(predictor, config, device, calibration).all(), most))


@dataclass(frozen=True)
class _Found:
    changes: Mapping[str, Any]
    verdict: Verdict
    cost: float


class _Adviser:
    def __init__(
        self, predictor: Predictor, config: LaunchConfig, device: Device, calibration: Calibration | None
    ) -> None:
        self._predictor = predictor
        self._config = config
        self._device = device
        self._calibration = calibration
        self._now = self._judge({})
        #: How certain a change must be: "starts", or also "uncertain" with a start as the best guess.
        self._sure = True
        #: Whether a change must also keep clear of the edge of every gate.
        self._roomy = False

    def all(self) -> Iterator[Advice]:
        now = self._now
        if not now.headroom:  # gate 0; gate 3b is a bad argument too, with bytes that are missing
            yield from self._repairs()
            return
        yield from self._remarks()
        if now.verdict == "starts":
            yield from self._room_after_the_gates()
            return
        found = self._changes()
        for item in found:
            yield Advice(self._text(item), item.changes, item.verdict.verdict)
        yield from self._free_memory()
        if not found:
            yield from self._nothing_helps()

    # -- what to know ----------------------------------------------------------------------------

    def _remarks(self) -> Iterator[Advice]:
        now = self._now
        first = now.headroom[_GATE1]
        if -EDGE_BYTES < first.best < 0 and now.ledger.start_checked:
            yield Advice(
                f"{mib_text(-first.best)} under {_GATE1}: on the edge, as much as a browser tab takes"
            )
        cuda = self._device.kind is DeviceKind.CUDA
        if cuda and now.outcome is Outcome.GATE1_BUDGET and not now.resolved.kv_cache_memory_bytes:
            offload = "more offload" if now.resolved.cpu_offload_gb else "offload (--cpu-offload-gb)"
            yield Advice(
                f"{offload} does not lower the budget, nor does a shorter length or a smaller batch: gate 1 "
                "compares total x gmu with what is free"
            )

    def _room_after_the_gates(self) -> Iterator[Advice]:
        """A lower gmu, when what vLLM allocates after its checks is likely not to fit."""
        likely = [risk for risk in self._now.risks if risk.likely]
        if not likely:
            return
        gmu = self._now.resolved.gpu_memory_utilization
        missing = sum(risk.size.best for risk in likely) - min(risk.left.best for risk in likely)
        share = math.floor((gmu - missing / self._device.total.low) * 100) / 100
        if share <= 0:
            return
        verdict = self._judge({GMU: share})
        if verdict.verdict == "starts" and not any(risk.likely for risk in verdict.risks):
            yield Advice(
                f"{flags_text({GMU: share})}: leaves {mib_text(missing)} more for what comes after the "
                f"gates, then {ends_text(verdict)}",
                {GMU: share},
                verdict.verdict,
            )

    # -- what to change ---------------------------------------------------------------------------

    def _changes(self) -> list[_Found]:
        model, rules = self._predictor.model, self._predictor.rules
        turned = knobs(self._config, self._now, model, self._device, rules, self._predictor.usage)
        # The best guess of a launch that probably starts cannot be made better by a probable start.
        levels = (True,) if self._now.outcome is Outcome.STARTED else (True, False)
        self._sure = True
        singles = self._singles(turned)
        if any(not _drastic(item) for item in singles):
            return singles
        # Nothing gentle is certain: what probably does, and pairs that surely do.
        found = list(singles)
        if False in levels:
            self._sure = False
            found = _ranked([*found, *self._singles(turned)])
            self._sure = True
        found = _ranked([*found, *(pair for pair in self._pairs(turned) if not _drastic(pair))])
        if found:
            return found
        for self._sure in levels:
            least = self._least_set(turned)
            if least:
                return least
            for changes in more_cards(self._now, model, self._device):
                enough = self._enough(changes, gmu=False) or self._enough(changes, gmu=True)
                if enough:
                    return [enough]
        return []

    def _singles(self, turned: list[Knob]) -> list[_Found]:
        found = [self._enough({}, gmu=True)]
        found += [self._turn(knob, {}, gmu=False) for knob in turned]
        return _ranked(item for item in found if item)

    def _pairs(self, turned: list[Knob]) -> list[_Found]:
        found = [self._turn(knob, {}, gmu=True) for knob in turned]
        for one, other in itertools.combinations(turned, 2):
            if one.name != other.name:
                found.append(self._turn_both(one, other))
        return _ranked(item for item in found if item)

    def _turn_both(self, one: Knob, other: Knob) -> _Found | None:
        second = self._turn(other, one.steps[-1], gmu=False)
        if second is None:
            return None
        kept = {name: value for name, value in second.changes.items() if name in other.options}
        return self._turn(one, kept, gmu=False)

    def _least_set(self, turned: list[Knob]) -> list[_Found]:
        """All knobs at their end, then one after the other given back, the dearest first."""
        chosen = {knob.name: dict(knob.steps[-1]) for knob in turned}

        def enough(names: Iterable[str]) -> _Found | None:
            merged: dict[str, Any] = {}
            for name in names:
                merged |= chosen[name]
            return self._enough(merged, gmu=True)

        if enough(chosen) is None:
            return []
        for knob in sorted(turned, key=lambda k: -k.cost):
            rest = [name for name in chosen if name != knob.name]
            if enough(rest):
                del chosen[knob.name]
        for knob in turned:
            if knob.name in chosen:
                others: dict[str, Any] = {}
                for name, changes in chosen.items():
                    others |= changes if name != knob.name else {}
                turned_back = self._turn(knob, others, gmu=True)
                if turned_back:
                    chosen[knob.name] = {k: v for k, v in turned_back.changes.items() if k in knob.options}
        final = enough(chosen)
        return [final] if final else []

    def _turn(self, knob: Knob, others: Mapping[str, Any], *, gmu: bool) -> _Found | None:
        """The least step of `knob` that is enough together with `others`, by halving; one that is not on
        the edge where there is any.
        """
        last = len(knob.steps) - 1
        for self._roomy in (True, False):
            best = self._enough({**others, **knob.steps[last]}, gmu=gmu)
            if best is not None:
                break
        else:
            return None
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            tried = self._enough({**others, **knob.steps[middle]}, gmu=gmu)
            if tried:
                best, high = tried, middle
            else:
                low = middle + 1
        self._roomy = False
        spent = knob.cost * (1.0 + high / max(1, last)) if last else knob.cost
        cost = spent + sum(1.0 for name in others if name not in knob.options) * 2.0 + (0.5 if gmu else 0.0)
        return replace(best, cost=cost)

    def _enough(self, changes: Mapping[str, Any], *, gmu: bool) -> _Found | None:
        """The changed launch when it starts; `gmu` allows another gmu, chosen from the gates."""
        verdict = self._judge(changes)
        if gmu:
            share = self._share(verdict)
            if share is None:
                return None
            changes = {**changes, GMU: share}
            verdict = self._judge(changes)
        if not self._starts(verdict):
            return None
        return _Found(changes, verdict, 0.5)

    def _starts(self, verdict: Verdict) -> bool:
        if self._roomy and (not verdict.headroom or left_bytes(verdict) < EDGE_BYTES):
            return False
        if verdict.verdict == "starts":
            return True
        return not self._sure and verdict.verdict == "uncertain" and verdict.outcome is Outcome.STARTED

    def _share(self, at: Verdict) -> float | None:
        """A gmu inside the window of gates 1 and 3, away from both ends where it is wide enough.

        gmu moves the budget alone, by the total: each gate's headroom tells how far it may go.
        """
        if not at.headroom:
            return None
        total, gmu = self._device.total, at.resolved.gpu_memory_utilization
        most: float
        least: float
        first, third = at.headroom[_GATE1], at.headroom[_GATE3]
        if not at.ledger.start_checked:
            first = Interval.exact(total.high)
        if self._sure:
            most, least = gmu + first.low / total.high, gmu - third.low / total.low
        else:
            most, least = gmu + first.best / total.best, gmu - third.best / total.best
        if at.resolved.kv_cache_memory_bytes is not None:
            least = 0.01
        most, least = min(1.0, most), max(0.0, least)
        if least >= most:
            return None
        margin = EDGE_BYTES / total.low
        if gmu < least:
            roomy: float = math.ceil((least + margin) * 100) / 100
            if roomy <= most - margin:
                return roomy
        elif gmu > most:
            roomy = math.floor((most - margin) * 100) / 100
            if roomy >= least + margin:
                return roomy
        middle = round((least + most) / 2, 4)
        return middle if least < middle < most and middle != gmu else None

    def _free_memory(self) -> Iterator[Advice]:
        """What other processes would have to give back, when the budget is all that is too large."""
        first, device = self._now.headroom[_GATE1], self._device
        if first.low >= 0 or not self._now.ledger.start_checked or self._now.headroom[_GATE3].high < 0:
            return
        missing = math.ceil(-first.low)
        more = Interval(*(min(b + missing, device.total.high) for b in _bounds(device.free)))
        verdict = self._predictor.verdict(self._config, replace(device, free=more), self._calibration)
        held = device.total.best - device.free.best
        if not may_start(verdict):
            return
        cpu = device.kind is DeviceKind.CPU
        holders = "other programs" if cpu else "other processes, the display, the driver's context"
        if missing <= held:
            yield Advice(
                f"or free {mib_text(missing)} of memory: {mib_text(held)} are taken before vLLM starts, by "
                f"{holders}",
                {},
                verdict.verdict,
                missing,
            )

    def _nothing_helps(self) -> Iterator[Advice]:
        now, device = self._now, self._device
        if now.verdict != "refused":
            yield Advice(
                "no change found that makes it certain: one launch that starts would (see --observations)"
            )
            return
        short = f"short by {mib_text(now.shortfall_bytes)}" if now.shortfall_bytes else "refused"
        text = f"nothing of these helps ({short}): gmu, batch, length, eager mode, KV dtype, offload"
        weights = now.ledger.weights.best + now.ledger.offloaded.best
        if weights > device.free.best:
            text += f"; the weights alone are {weights / GIB:.2f} GiB: a smaller checkpoint is needed"
        else:
            text += "; a smaller or quantised checkpoint or a larger card is needed"
        yield Advice(text)

    # -- gate 0 -----------------------------------------------------------------------------------

    def _repairs(self) -> Iterator[Advice]:
        fixes = repairs(self._config, self._now, self._predictor.model)
        tried = [(changes, self._judge(changes)) for changes in fixes]
        passed = [(changes, verdict) for changes, verdict in tried if verdict.headroom]
        good = [item for item in passed if may_start(item[1])]
        for changes, verdict in good:
            yield Advice(f"{flags_text(changes)}: then {ends_text(verdict)}", changes, verdict.verdict)
        if not passed or good:
            return
        # The options would be taken, and then memory is missing: what helps beside the nearest repair.
        changes, verdict = max(passed, key=lambda item: item[1].headroom[_GATE3].best)
        yield Advice(f"{flags_text(changes)}: vLLM would take the options, but {verdict.reason}")
        inner = _Adviser(
            self._predictor, self._config.with_options(**changes), self._device, self._calibration
        )
        for advice in inner.all():
            if not advice.changes:
                yield advice
                continue
            # What the advice sets again need not be set first.
            kept = {name: value for name, value in changes.items() if name not in advice.changes}
            first = f"{flags_text(kept)}, and " if kept else ""
            yield Advice(first + advice.text, {**changes, **advice.changes}, advice.checked)

    def _judge(self, changes: Mapping[str, Any]) -> Verdict:
        config = self._config.with_options(**changes) if changes else self._config
        return self._predictor.verdict(config, self._device, self._calibration)

    # -- texts ------------------------------------------------------------------------------------

    def _text(self, item: _Found) -> str:
        before, after = self._now, item.verdict
        text = f"{flags_text(item.changes)}: "
        if set(item.changes) == {GMU}:
            low = after.resolved.gpu_memory_utilization < before.resolved.gpu_memory_utilization
            text += f"budget {mib_text(after.ledger.budget.best)}, "
            text += "which is free, " if low else ""
        else:
            text += self._freed(item)
        return text + f"then {ends_text(after)}{price_text(item.changes, after)}"

    def _freed(self, item: _Found) -> str:
        alone = {name: value for name, value in item.changes.items() if name != GMU}
        return freed_text(self._now, self._judge(alone), alone)


def _drastic(item: _Found) -> bool:
    """True when the model loses a faculty: nobody who serves images is helped by serving none."""
    return "language_model_only" in item.changes


def _ranked(found: Iterable[_Found]) -> list[_Found]:
    """The smallest changes first; each set of options once."""
    seen: dict[tuple[str, ...], _Found] = {}
    for item in sorted(found, key=lambda item: item.cost):
        seen.setdefault(tuple(sorted(item.changes)), item)
    return list(seen.values())


def _bounds(value: Interval) -> tuple[float, float, float]:
    return value.low, value.best, value.high
