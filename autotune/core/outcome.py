"""The one vocabulary for what a launch does: verdicts, trials, log diagnosis and data use it."""

from __future__ import annotations

from enum import Enum


class Outcome(str, Enum):
    """What became of a launch, or what arithmetic says would become of it."""

    STARTED = "started"
    #: The declared budget is more than what is free.
    GATE1_BUDGET = "gate1_budget"
    #: Nothing is left of the budget for the KV pool.
    GATE2_NO_KV = "gate2_no_kv"
    #: The KV pool holds less than one sequence of `max_model_len`.
    GATE3_SEQ_TOO_LONG = "gate3_seq_too_long"
    OOM_LOAD = "oom_load"
    OOM_PROFILE = "oom_profile"
    OOM_CUDAGRAPH = "oom_cudagraph"
    OOM_SAMPLER = "oom_sampler"
    OOM_RUNTIME = "oom_runtime"
    HOST_RAM = "host_ram"
    UNSUPPORTED_ARCH = "unsupported_arch"
    BAD_ARG = "bad_arg"
    PORT = "port"
    HUNG = "hung"
    #: An honest "unknown": the evidence is not there.
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


#: Outcomes of the memory gates, in the order in which vLLM checks them.
GATES = (Outcome.GATE1_BUDGET, Outcome.GATE2_NO_KV, Outcome.GATE3_SEQ_TOO_LONG)
