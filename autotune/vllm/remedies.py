"""What to change after a refused start, with numbers that were put through the gates.

Only the log's own figures are used: another budget moves the pool one to one, another length moves what
one sequence needs, memory given back moves what is free. All numbers are rounded to the safe side, and
vLLM's own rounding is counted against them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.outcome import Outcome
from autotune.units import GIB, gib_text
from autotune.vllm.logledger import LogLedger, highest_share, least_share, longest_length
from autotune.vllm.logs import LogReading
from autotune.vllm.versions import rules_for

#: Below this share no model worth serving fits, whatever it is: advice to go there helps nobody.
_LEAST_SHARE = 0.1
#: What a card holds that nothing uses: driver and a display, at most (the widest seen is 1.25 GiB).
_DESKTOP_BYTES = 1.5 * GIB
_OFFLOAD = frozenset({"cpu_offload_gb"})
#: The end of a remedy that is known to pass gate 1 alone.
TOO_EARLY = "; whether the model fits it, this log came too early to say (give --model to autotune)."


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Attributes:
        text: one line for a person, with figures and vLLM's own option names.
        changes: options to set; empty for what is done outside vLLM.
        frees_bytes: memory that others must give back before the next start.
        checked: the gates were put through again with the log's figures: "starts", or "passes
            gate1_budget" where the log came too early for more; None where it does not say enough. With
            arithmetic on the model also its verdict, "starts" or "uncertain".
        against: of a remark, the options of which it says that they do not help.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    frees_bytes: int = 0
    checked: str | None = None
    against: frozenset[str] = frozenset()


def gate_remedies(reading: LogReading, ledger: LogLedger) -> tuple[Remedy, ...]:
    """The changes that help after a refusal by a memory gate, those that surely start first."""
    remedies = {
        Outcome.GATE1_BUDGET: _gate1,
        Outcome.GATE2_NO_KV: _gate2,
        Outcome.GATE3_SEQ_TOO_LONG: _gate3,
    }
    if reading.outcome not in remedies:
        return ()
    found = list(remedies[reading.outcome](reading, ledger))
    return tuple(sorted(found, key=lambda remedy: remedy.checked is None))


# -- gate 1: the budget is more than what is free --------------------------------------------------


def _gate1(reading: LogReading, ledger: LogLedger) -> Iterator[Remedy]:
    free, total, budget = ledger.free_at_start, ledger.total, ledger.budget_bytes
    memory = "memory" if ledger.cpu else "GPU memory"
    if free is None or total is None or budget is None:
        yield Remedy(
            f"Lower --gpu-memory-utilization, or end what else holds {memory}: the log does not say how "
            "much is free."
        )
        return
    yield from _free_up(reading, ledger)
    share = highest_share(ledger)
    if share is not None and share >= _LEAST_SHARE:
        outcome = ledger.outcome_with(share=share)
        if outcome not in (Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG):
            rest = _what_is_unknown(ledger, share)
            yield Remedy(
                f"Set --gpu-memory-utilization {share:g}: the budget is then "
                f"{gib_text(total.best * share)} of the {gib_text(free.best)} that were free{rest}",
                {"gpu_memory_utilization": share},
                checked=_checked(outcome, first_gate=True),
            )
    yield Remedy(
        "--cpu-offload-gb, a shorter --max-model-len or smaller batches do not help here: this check "
        "compares only total x gpu_memory_utilization with what is free.",
        against=frozenset({"cpu_offload_gb", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}),
    )


def _free_up(reading: LogReading, ledger: LogLedger) -> Iterator[Remedy]:
    free, total, share = ledger.free_at_start, ledger.total, ledger.gpu_memory_utilization
    budget = ledger.budget_bytes
    if free is None or total is None or budget is None:
        return
    asked = total.high * share if share is not None else budget + 0.005 * GIB
    short = math.ceil(math.ceil((asked - free.low + 1) / (0.01 * GIB)) * 0.01 * GIB)
    held = total.best - free.best
    if short <= 0:
        return
    enough = held - short > 0.01 * GIB
    if not enough:
        return
    tool = "xpu-smi" if "xpu:" in reading.reason else "nvidia-smi"
    if ledger.cpu:
        who = "other processes on this machine (`ps aux --sort=-rss | head` shows the largest)"
    elif held < _DESKTOP_BYTES:
        who = f"the desktop and other programs (`{tool}` shows them)"
    else:
        who = (
            f"other processes, an earlier server that has not ended perhaps (`{tool}` shows them; `ps aux "
            "| grep -i vllm` finds one whose parent is gone)"
        )
    outcome = ledger.outcome_with(freed_bytes=short)
    yield Remedy(
        f"Free at least {_gib_up(short)} on the device before the start: {gib_text(held)} of "
        f"{gib_text(total.best)} are held by {who}.",
        frees_bytes=short,
        checked=_checked(outcome, first_gate=True),
    )


# -- gate 2: nothing is left for the KV pool -------------------------------------------------------


def _gate2(reading: LogReading, ledger: LogLedger) -> Iterator[Remedy]:
    pool = ledger.kv_pool_bytes
    if pool is not None and ledger.budget_bytes is not None:
        yield from _raise_share_for_pool(ledger)
    elif pool is not None:
        yield Remedy(
            f"The budget must grow by more than {_gib_up(-pool)}, and by one sequence's KV cache: raise "
            f"--gpu-memory-utilization by that much of {_total_text(ledger)}."
        )
    else:
        yield Remedy(
            "Raise --gpu-memory-utilization, if more is free at the start: the log does not say by how much."
        )
    short = -pool if pool is not None else None
    yield from _lower_the_rest(reading, ledger, short)


def _raise_share_for_pool(ledger: LogLedger) -> Iterator[Remedy]:
    pool, needed = ledger.kv_pool_bytes or 0, ledger.kv_needed_bytes
    top = highest_share(ledger)
    least = least_share(ledger, needed + 0.005 * GIB if needed else 1.0)
    wanted = f"a KV pool of one sequence ({gib_text(needed)})" if needed else "any KV pool"
    if least is None or (top is not None and top < least):
        most = f"at the most that is free ({top:g})" if top is not None else "even at 1.0"
        yield Remedy(
            f"No --gpu-memory-utilization leaves {wanted}: {most} everything else still takes "
            f"{gib_text(ledger.non_kv_bytes or 0)}; less must be loaded.",
            against=frozenset({"gpu_memory_utilization"}),
        )
        return
    if needed:
        yield _share_remedy(ledger, least, top)
        return
    at_least = f"Any KV pool needs --gpu-memory-utilization of {least:g} or more"
    share = top if top is not None else min(1.0, max(least, 0.95))
    # One sequence's need is not known: the most that is free, but no more than vLLM's own default, and on
    # the CPU backend, where it is the whole machine's memory, half.
    share = min(share, max(least, 0.5 if ledger.cpu else 0.92))
    at = ledger.pool_at(share)
    free = (
        f"{gib_text(ledger.free_at_start.best)} were free"
        if ledger.free_at_start is not None
        else f"{gib_text(math.ceil((ledger.total_bytes or 0) * share))} must be free at the start"
    )
    yield Remedy(
        f"Set --gpu-memory-utilization {share:g}: the pool is then {gib_text(at.low if at else 0)} instead "
        f"of {gib_text(pool)} ({free}). {at_least}; what one sequence takes of it the log does not say.",
        {"gpu_memory_utilization": share},
        checked=_checked(ledger.outcome_with(share=share)) if top is not None else None,
    )


def _lower_the_rest(reading: LogReading, ledger: LogLedger, short: float | None) -> Iterator[Remedy]:
    """What takes the budget beside the pool, the largest that can be lowered first."""
    facts = reading.facts
    tokens = facts.max_num_batched_tokens
    peak = ledger.activation_bytes
    if peak is not None and peak > 0.1 * GIB:
        half = f" to {tokens // 2}" if tokens and tokens >= 512 else ""
        yield Remedy(
            f"Lower --max-num-batched-tokens{half} (and --max-num-seqs, --limit-mm-per-prompt): the peak "
            f"of {gib_text(peak)} goes about with them.",
            {"max_num_batched_tokens": tokens // 2} if half and tokens else {},
        )
    elif tokens and tokens > 1024:
        yield Remedy(
            f"Lower --max-num-batched-tokens (it is {tokens}) or --max-num-seqs: the activation peak goes "
            "with them. vLLM also raises the first by itself when length or sequences grow, unless it is "
            "given."
        )
    if ledger.cudagraph_bytes and not facts.enforce_eager:
        yield Remedy(
            f"--enforce-eager gives up CUDA graphs, {gib_text(ledger.cudagraph_bytes)} here; decoding gets "
            "slower.",
            {"enforce_eager": True},
        )
    yield _offload(reading, ledger, short)
    weights = ledger.weights_bytes
    if weights and ledger.budget_bytes and weights > 0.9 * ledger.budget_bytes:
        yield Remedy(
            f"The weights alone take {gib_text(weights)} of the budget of {gib_text(ledger.budget_bytes)}: "
            "a quantized checkpoint, or --tensor-parallel-size 2 on two cards, halves them."
        )


def _offload(reading: LogReading, ledger: LogLedger, short: float | None) -> Remedy:
    version = reading.facts.vllm_version
    rules = rules_for(version) if version else None
    if ledger.cpu:
        return Remedy("--cpu-offload-gb moves nothing on the CPU backend.", against=_OFFLOAD)
    if rules and rules.certain and reading.facts.model_runner == "V2" and rules.offload_v2 == "ignored":
        return Remedy(
            f"--cpu-offload-gb has no effect in vLLM {version} with the V2 model runner.", against=_OFFLOAD
        )
    if short is None or ledger.weights_bytes is None or short > ledger.weights_bytes:
        return Remedy(
            "--cpu-offload-gb N moves up to N GiB of decoder weights to pinned host memory; every step "
            "reads them back over PCIe, so it costs speed."
        )
    already = (ledger.offloaded_bytes or 0) / GIB
    gigabytes = math.ceil((short / GIB + 0.25 + already) * 2) / 2
    return Remedy(
        f"--cpu-offload-gb {gigabytes:g} moves that much of the decoder's weights to pinned host memory "
        "(so much must be free there); every step reads them back over PCIe, so it costs speed.",
        {"cpu_offload_gb": gigabytes},
    )


# -- gate 3: the pool holds less than one sequence -------------------------------------------------


def _gate3(reading: LogReading, ledger: LogLedger) -> Iterator[Remedy]:
    length = longest_length(ledger)
    if length is not None:
        source = (
            "vLLM's own estimate, in whole blocks"
            if ledger.estimated_max_len
            else "by the tokens that the pool holds"
            if ledger.pool_tokens
            else "by length; a model with sliding windows may take less"
        )
        yield Remedy(
            f"Set --max-model-len {length}: that many tokens fit the pool ({source}).",
            {"max_model_len": length},
            checked=_checked(ledger.outcome_with(length=length)),
        )
    elif ledger.estimated_max_len or ledger.kv_pool_bytes is None:
        yield Remedy(
            "Shorten --max-model-len to what you need: the log does not say what would fit "
            "(--max-model-len auto takes the longest, from vLLM 0.20 on)."
        )
    needed, pool = ledger.kv_needed_bytes, ledger.kv_pool_bytes
    if needed is not None and pool is not None:
        yield from _raise_share(ledger, needed, pool)
        yield from _smaller_cache(reading, needed, pool)
    yield Remedy(
        "Lower --max-num-seqs or --max-num-batched-tokens: their buffers and activations leave the pool "
        "more; how much the log does not say."
    )


def _raise_share(ledger: LogLedger, needed: float, pool: float) -> Iterator[Remedy]:
    short = needed - pool
    least = least_share(ledger, needed + 0.005 * GIB)
    top = highest_share(ledger)
    if least is not None and (top is None or least <= top):
        yield _share_remedy(ledger, least, top)
    elif least is None and (ledger.total_bytes is None or ledger.gpu_memory_utilization is None):
        yield Remedy(
            f"The pool is {_gib_up(short)} short: raise --gpu-memory-utilization by so much of "
            f"{_total_text(ledger)}."
        )
    elif top is not None:
        yield Remedy(
            f"--gpu-memory-utilization cannot help alone: {gib_text(short)} are missing, and {top:g} is "
            "the most that the free memory allows.",
            against=frozenset({"gpu_memory_utilization"}),
        )


def _share_remedy(ledger: LogLedger, share: float, top: float | None) -> Remedy:
    at, needed = ledger.pool_at(share), ledger.kv_needed_bytes
    if top is None:
        asked = gib_text(math.ceil((ledger.total_bytes or 0) * share))
        known = f"if {asked} are free at the start, which the log does not say"
    else:
        known = f"{top:g} is the most that the free memory allows"
    return Remedy(
        f"Set --gpu-memory-utilization {share:g}: the pool is then {gib_text(at.low if at else 0)}, and "
        f"one sequence needs {gib_text(needed or 0)} ({known}).",
        {"gpu_memory_utilization": share},
        checked=_checked(ledger.outcome_with(share=share)) if top is not None else None,
    )


def _smaller_cache(reading: LogReading, needed: float, pool: float) -> Iterator[Remedy]:
    kind = str(reading.args.get("kv_cache_dtype", "auto"))
    if kind in ("auto", "bfloat16", "float16", "half") and needed / 2 < pool:
        yield Remedy(
            f"--kv-cache-dtype fp8 halves what attention keeps: {gib_text(needed / 2)} would fit "
            f"{gib_text(pool)}, where the card and the model take it.",
            {"kv_cache_dtype": "fp8"},
        )


def _checked(outcome: Outcome | None, *, first_gate: bool = False) -> str | None:
    """What the gates say of a change, for a person and a machine to read."""
    if outcome is Outcome.STARTED:
        return "starts"
    return "passes gate1_budget" if outcome is None and first_gate else None


def _total_text(ledger: LogLedger) -> str:
    """The device's total, and which of the two figures is missing that would give a number."""
    if ledger.total_bytes is None:
        return (
            "the device's total, if so much is free at the start (the log does not state the total; --device "
            "names it to autotune)"
        )
    return (
        f"the device's {gib_text(ledger.total_bytes)}, if so much is free at the start (the log does not say "
        "what it was)"
    )


# -- words -----------------------------------------------------------------------------------------


def _what_is_unknown(ledger: LogLedger, share: float) -> str:
    if ledger.kv_pool_bytes is not None and ledger.kv_needed_bytes is not None:
        return ", and the pool still holds one sequence."
    if ledger.weights_bytes is not None and ledger.total is not None:
        left = ledger.total.best * share - ledger.weights_bytes
        if left < 0:
            return f"; but the weights alone take {gib_text(ledger.weights_bytes)}."
    return TOO_EARLY


def _gib_up(count_bytes: float) -> str:
    """GiB with two decimals, rounded up."""
    return f"{math.ceil(count_bytes / GIB * 100 - 1e-9) / 100:.2f} GiB"
