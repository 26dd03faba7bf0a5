"""What else went on while a server was measured: throttling, other processes on the GPU, busy processors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import TracebackType

from autotune import probe

#: Reading NVML takes a millisecond or two.
_SAMPLE_S = 1.0
#: Of the looks at the GPU: a moment of heat moves nothing; a card at its power limit now and then is usual.
_SLOWED_SHARE = {"power limit": 0.5}
_ANY_SLOWED_SHARE = 0.1
#: Of the processors: more than this by others, with less than the second left idle, costs the server time.
_OTHERS_SHARE = 0.1
_IDLE_SHARE = 0.1


class Surroundings:
    """Watches from `with` to its end; `doubts` says what was seen since the last call.

    The texts hold no figures, so that the same trouble in several windows is one doubt.

    Args:
        gpu, env: which GPU, as `probe.cuda_device` takes them.
        cuda: False for the CPU backend, where there is no GPU to look at.
        own_pids: the server's processes.
        own_cpu_s: processor seconds that they have used so far.
        before: processes on the GPU before the launch; None when not known.
    """

    def __init__(
        self,
        *,
        cuda: bool,
        own_pids: Callable[[], Collection[int]],
        own_cpu_s: Callable[[], float],
        gpu: int | str | None = None,
        env: Mapping[str, str] | None = None,
        before: Collection[int] | None = None,
    ) -> None:
        self._cuda = cuda
        self._gpu, self._env = gpu, env
        self._own_pids, self._own_cpu_s = own_pids, own_cpu_s
        self._before = before
        self._lock = threading.Lock()
        self._looks = 0
        self._slowed: dict[str, int] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._mark = self._read_processors()

    def __enter__(self) -> Surroundings:
        if self._cuda:
            self._thread = threading.Thread(target=self._sample, name="autotune-watch", daemon=True)
            self._thread.start()
        self._mark = self._read_processors()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def doubts(self) -> list[str]:
        """What has disturbed the server since the last call; empty when nothing did, or nothing is told."""
        found = []
        if self._cuda:
            found += self._gpu_doubts()
        mark = self._read_processors()
        if self._crowded(self._mark, mark):
            found.append(
                f"other programs took more than {_OTHERS_SHARE:.0%} of the processors, none were left"
            )
        self._mark = mark
        return found

    def _gpu_doubts(self) -> list[str]:
        with self._lock:
            looks, slowed = self._looks, self._slowed
            self._looks, self._slowed = 0, {}
        found = [
            f"the GPU was slowed down by its {cause}" if cause == "power limit" else f"throttled: {cause}"
            for cause, times in sorted(slowed.items())
            if times >= _SLOWED_SHARE.get(cause, _ANY_SLOWED_SHARE) * looks
        ]
        names = sorted(f"{other.name or 'a process'} (pid {other.pid})" for other in self._others())
        return found + ([f"another process computed on the GPU: {', '.join(names)}"] if names else [])

    def _others(self) -> list[probe.Holder]:
        listed = [holder for holder in probe.holders(self._gpu, self._env) or () if holder.computes]
        own = set(self._own_pids())
        if any(holder.pid in own for holder in listed):
            return [holder for holder in listed if holder.pid not in own]
        # A container sees the host's ids, among which its own cannot be told; those that were there before
        # the launch are others' in any case.
        return [holder for holder in listed if holder.pid in (self._before or ())]

    def _sample(self) -> None:
        # One session for all looks: opening NVML takes longer than asking it.
        with probe.nvml_session():
            while not self._over.wait(_SAMPLE_S):
                seen = probe.condition(self._gpu, self._env)
                if seen is not None:
                    with self._lock:
                        self._looks += 1
                        for cause in seen.throttled_by:
                            self._slowed[cause] = self._slowed.get(cause, 0) + 1

    def _read_processors(self) -> tuple[float, float, float] | None:
        """Now, processor seconds of everybody, and of the server and this process."""
        ticks = probe.processor_ticks()
        if ticks is None:
            return None
        own_s = 0.0
        with contextlib.suppress(OSError):
            own_s = self._own_cpu_s()
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s + time.process_time()

    @staticmethod
    def _crowded(first: tuple[float, float, float] | None, last: tuple[float, float, float] | None) -> bool:
        if first is None or last is None:
            return False
        capacity_s = (last[0] - first[0]) * (len(probe.allowed_cpus()) or os.cpu_count() or 1)
        used_s, own_s = last[1] - first[1], max(0.0, last[2] - first[2])
        # Ticks of 10 ms blur a span this short.
        if capacity_s < 0.5:
            return False
        return used_s - own_s > _OTHERS_SHARE * capacity_s and used_s > (1 - _IDLE_SHARE) * capacity_s
