"""An engine without a machine: the ledger says what starts, the scheduler who runs with whom, the step model
how long that takes. Nothing is launched and nobody waits; every figure is predicted.

    engine = SimulatorEngine(Predictor(spec, "0.32.0"), device_named("4090"), loaded, seed=0)
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.calibration import Calibration
from autotune.core.device import Device, DeviceKind
from autotune.core.facts import Facts
from autotune.core.launch import SEARCHED, LaunchConfig
from autotune.core.outcome import Outcome
from autotune.core.roofline import StepModel, costs_of
from autotune.core.scheduler import POLICIES, Limits, Loop, StepTime
from autotune.core.stats import falls_behind
from autotune.core.throughput import busy_clients
from autotune.core.workload import Shape, Workload, begun
from autotune.engines.base import Engine, LaunchFailed, MeasurePlan, Progress, Session, Window
from autotune.engines.served import ServedModel
from autotune.engines.simulated_log import log_of
from autotune.engines.simulated_memory import Memory, Truth, memory_of
from autotune.errors import BadInput
from autotune.vllm.command import serve_args, yaml_config
from autotune.vllm.logs import read_log_file
from autotune.vllm.predict import Predictor
from autotune.vllm.speed import Speed, limits_of

#: One launch against others of its configuration: S1's five of one speed (6.02 to 6.60 tok/s) have a
#: deviation of 3.5 % of their mean.
_LAUNCH_NOISE = 0.035
#: One step against others of its kind. Nothing rests on it but that no two windows are quite alike.
_STEP_NOISE = 0.05
#: Of a workload with arrivals: so many give a rate within 3 %, and a simulation takes a second or two.
_LEAST_ARRIVALS, _MOST_ARRIVALS = 1000, 5000
_COMMENT = "# predicted by autotune's simulator, not measured\n"


class SimulatorEngine(Engine):
    """Simulates vLLM on a device that need not be there.

    Args:
        predictor: of the model under one vLLM version.
        device: as it is known; one with exact memory within its bounds is simulated.
        model: its name and folder, for the command.
        speed: what is known of the device's speed; data-sheet figures by default.
        calibration: launches seen on the real device.
        seed: of everything drawn; the same seed gives the same machine and the same figures.
        extra_args: further vLLM options for the command; the simulation knows nothing of them.

    Raises:
        BadInput: the device's memory bandwidth is not known.
    """

    name = "sim"
    measured = False

    def __init__(
        self,
        predictor: Predictor,
        device: Device,
        model: ServedModel,
        *,
        speed: Speed | None = None,
        calibration: Calibration | None = None,
        seed: int = 0,
        extra_args: Sequence[str] = (),
        dummy_weights: bool = False,
    ) -> None:
        if device.kind is not DeviceKind.CPU and device.memory_bandwidth_gb_s is None:
            raise BadInput(
                f"the memory bandwidth of {device.name} is not known, so its speed cannot be simulated",
                hint="give memory_bandwidth_gb_s and fp16_tflops in a device file, or a card's name",
            )
        self._predictor = predictor
        self._truth = Truth.drawn(seed)
        self._device = self._truth.device(device)
        self._model = model
        self._speed = speed or Speed(predictor.model, device)
        self._calibration = calibration
        self._seed = seed
        self._extra = tuple(extra_args)
        self._dummy = dummy_weights
        self._launched: Counter[LaunchConfig] = Counter()

    def device(self) -> Device:
        return self._device

    def version(self) -> str:
        return self._predictor.rules.version

    def argv(self, config: LaunchConfig) -> list[str]:
        words = serve_args(config, model=self._served, extra=self._extra, dummy_weights=self._dummy)
        return ["vllm", "serve", *words]

    def yaml_config(self, config: LaunchConfig) -> str:
        text = yaml_config(config, model=self._served, extra=self._extra, dummy_weights=self._dummy)
        return _COMMENT + text

    def fingerprint(self) -> Mapping[str, Any]:
        """What a prediction depends on: no machine is part of it."""
        return {
            "simulated": True,
            "simulated_device": self._device.name,
            "vllm": self.version(),
            "model": self._model.name,
            "seed": self._seed,
            "speed_from_launches": self._speed.current.launches,
        }

    def launch(self, config: LaunchConfig, *, log_path: Path, progress: Progress = lambda _: None) -> Session:
        progress("simulating a start")
        self._launched[config] += 1
        # By configuration and how often it was launched: the order of a search changes no figure.
        chance = random.Random(f"launch {self._seed} {self._launched[config]} {config.params()}")
        memory = memory_of(
            self._predictor,
            config,
            self._device,
            self._truth,
            calibration=self._calibration,
            again=chance.uniform(-1, 1),
        )
        log_path.write_text(
            log_of(memory, config, model=self._served, version=self.version()), encoding="utf-8"
        )
        facts = self._facts(memory, config, log_path)
        if memory.outcome is not Outcome.STARTED:
            log = log_path.read_text(encoding="utf-8")
            raise LaunchFailed(memory.outcome, f"simulated: {memory.reason}", facts=facts, log_tail=log)
        costs = costs_of(self._predictor.model, memory.resolved, self._device, memory.offloaded)
        step = _Noisy(StepModel(costs, self._speed.current), chance)
        return _SimulatedSession(facts, limits_of(memory.resolved, memory.tokens), step)

    def launched_before(self, config: LaunchConfig) -> None:
        self._launched[config] += 1

    @property
    def _served(self) -> str:
        return str(self._model.path.resolve()) if self._model.path is not None else self._model.name

    def _facts(self, memory: Memory, config: LaunchConfig, log_path: Path) -> Facts:
        """What the log says, and the exact counts that a started server has on `/metrics`."""
        facts = read_log_file(log_path).facts
        # Nothing else runs on a machine that is not there.
        facts = replace(facts, polluted_by_bytes=0, max_model_len=memory.resolved.max_model_len)
        if memory.outcome is not Outcome.STARTED:
            return facts
        given = config.params()
        return replace(
            facts,
            num_gpu_blocks=memory.blocks,
            block_size=memory.resolved.block_size,
            kv_tokens=memory.tokens,
            max_concurrency=memory.concurrency,
            max_num_seqs=memory.resolved.max_num_seqs,
            max_num_batched_tokens=memory.resolved.max_num_batched_tokens,
            ineffective={n: why for n, why in memory.resolved.ignored if n in SEARCHED and n in given},
        )


class _SimulatedSession(Session):
    def __init__(self, facts: Facts, limits: Limits, step: StepTime) -> None:
        self._facts = facts
        self._limits = limits
        self._step = step

    def facts(self) -> Facts:
        return self._facts

    def fill(self, target_len: int) -> None:
        self._facts = replace(self._facts, requested_len=target_len)
        started = self._facts.max_model_len
        if started is not None and started < target_len:
            raise LaunchFailed(
                Outcome.OTHER,
                f"it started with a context of {started} tokens, {target_len} are needed",
                facts=self._facts,
            )
        prompt = max(1, target_len * 3 // 4)
        self._loop([Shape(prompt, target_len - prompt)] * 2, clients=2).run()
        self._facts = replace(self._facts, filled_len=target_len)

    def measure(
        self, workload: Workload, plan: MeasurePlan, progress: Progress = lambda _: None
    ) -> Iterator[Window]:
        """The waves that the plan asks for, whatever their simulated time: `limit_s` never binds."""
        progress("simulating the load")
        if workload.arrivals:
            yield from self._open(workload, plan)
            return
        # Clients that would only wait change no throughput, but every latency.
        clients = workload.concurrency if plan.probes else busy_clients(self._limits, workload)
        # One wave more than is counted, so that the last one still runs beside others.
        shapes = workload.first((plan.warmup_waves + plan.waves + 1) * clients)
        shapes[:clients] = [begun(shape, client) for client, shape in enumerate(shapes[:clients])]
        marks: list[tuple[float, int, int]] = []
        loop = self._loop(shapes, clients=clients, marks=marks)
        loop.run()
        ends = sorted(s.finished_s or 0.0 for s in loop.sequences)
        begin = ends[plan.warmup_waves * clients - 1] if plan.warmup_waves else 0.0
        # The steady part begins and ends where a wave does.
        yield from _windows(loop, marks, begin, ends[(plan.warmup_waves + plan.waves) * clients - 1], plan)

    def _open(self, workload: Workload, plan: MeasurePlan) -> Iterator[Window]:
        """The workload's own arrivals: the whole trace if it is not very long, its first fifth left out."""
        count = min(_MOST_ARRIVALS, max(_LEAST_ARRIVALS, len(workload.shapes)))
        coming = list(itertools.islice(workload.coming(), count))
        marks: list[tuple[float, int, int]] = []
        loop = self._loop(
            [replace(shape, arrival_s=when) for when, shape in coming], clients=None, marks=marks
        )
        loop.run()
        begin, end = coming[count // 5][0], coming[-1][0]
        windows = list(_windows(loop, marks, begin, end, plan))
        came, answered = count - count // 5, sum(window.requests for window in windows)
        if falls_behind(came, answered):
            said = f"the server does not keep up: {came} requests came and {answered} were answered"
            windows[-1] = replace(windows[-1], doubts=(*windows[-1].doubts, said))
        yield from windows

    def close(self) -> None:
        """Nothing runs."""

    def _loop(
        self, shapes: list[Shape], *, clients: int | None, marks: list[tuple[float, int, int]] | None = None
    ) -> Loop:
        def watch(loop: Loop) -> None:
            if marks is not None:
                marks.append((loop.clock_s, loop.totals.preemptions, loop.totals.hit_tokens))

        try:
            return Loop(
                self._limits, POLICIES["first-come"], shapes, self._step, clients=clients, watch=watch
            )
        except BadInput as error:
            # vLLM before 0.32 starts with a pool that is one block too small, and the request waits for ever.
            raise LaunchFailed(Outcome.HUNG, f"simulated: {error.message}", facts=self._facts) from None


class _Noisy:
    """Step times with the chance of one launch, and of each step."""

    def __init__(self, step: StepTime, chance: random.Random) -> None:
        self._step = step
        self._chance = chance
        self._pace = math.exp(chance.gauss(0, _LAUNCH_NOISE))

    def step_s(
        self, decodes: int, prefill_tokens: int, prefill_pairs: float, context_tokens: int, sequences: int
    ) -> float:
        seconds = self._step.step_s(decodes, prefill_tokens, prefill_pairs, context_tokens, sequences)
        return seconds * self._factor(1)

    def span_s(self, decodes: int, context_tokens: int, steps: int) -> float:
        return self._step.span_s(decodes, context_tokens, steps) * self._factor(steps)

    def _factor(self, steps: int) -> float:
        return self._pace * math.exp(self._chance.gauss(0, _STEP_NOISE / math.sqrt(max(1, steps))))


def _windows(
    loop: Loop, marks: list[tuple[float, int, int]], begin: float, end: float, plan: MeasurePlan
) -> Iterator[Window]:
    """Equal spans from `begin` to `end`."""
    ends = [s.finished_s or 0.0 for s in loop.sequences]
    edges = [begin + (end - begin) * at / plan.windows for at in range(plan.windows + 1)]
    tokens = [round(value) for value in _between(loop.totals.timeline, edges)]
    counted = [_last(marks, edge) for edge in edges]
    for at in range(plan.windows):
        first, last = edges[at], edges[at + 1]
        timed = [
            s.token_times_ms
            for s in loop.sequences
            if (plan.probes if s.client is None else s.client < plan.probes)
            and first < (s.finished_s or 0.0) <= last
        ]
        yield Window(
            seconds=last - first,
            output_tokens=tokens[at + 1] - tokens[at],
            requests=sum(first < moment <= last for moment in ends),
            preemptions=counted[at + 1][0] - counted[at][0],
            prefix_hit_tokens=counted[at + 1][1] - counted[at][1],
            ttft_ms=tuple(times[0] for times in timed if times),
            tpot_ms=tuple(times[1] for times in timed if times and times[1] is not None),
        )


def _between(timeline: Sequence[tuple[float, int]], at: Sequence[float]) -> list[float]:
    """Tokens made by each moment; those of one jump are made evenly."""
    found, index = [], 0
    before = (0.0, 0)
    for moment in at:
        while index < len(timeline) and timeline[index][0] < moment:
            before = timeline[index]
            index += 1
        after = timeline[index] if index < len(timeline) else before
        span = after[0] - before[0]
        share = (moment - before[0]) / span if span > 0 else 0.0
        found.append(before[1] + share * (after[1] - before[1]))
    return found


def _last(marks: Sequence[tuple[float, int, int]], moment: float) -> tuple[int, int]:
    """Preemptions and hit tokens by a moment."""
    import bisect

    at = bisect.bisect_right(marks, moment, key=lambda mark: mark[0])
    return marks[at - 1][1:] if at else (0, 0)
