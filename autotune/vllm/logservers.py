"""The servers that speak in one log: restarts of one, and several interleaved ones, are told apart."""

from __future__ import annotations

import re
from functools import lru_cache

from autotune.core.outcome import Outcome
from autotune.vllm.logscan import Scan
from autotune.vllm.logsession import Mark, Session
from autotune.vllm.logtext import Line
from autotune.vllm.rules import Kind

# Containers or API servers of one log that are told apart; junk must not fill memory.
_MAX_SERVERS = 64
_PID = re.compile(r"\bpid=(\d+)")


@lru_cache(maxsize=1024)
def _pid_of(process: str) -> tuple[int | None, bool]:
    """The process id, and whether it is that of an API server."""
    pid = _PID.search(process)
    return (int(pid[1]) if pid else None), process.startswith("APIServer")


Verdict = tuple[Session, "Outcome | None", "Mark | None"]


class Servers:
    """Gives each line to the server that wrote it.

    Servers are told apart by the container that a collector names, and by the process id of their API
    server: the processes of a server are started by it, so theirs are the next greater ones. A line that
    names no process belongs to the server that spoke last.
    """

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, int], Session] = {("", 0): Session()}
        #: What became of a server before it was started again, by the same key.
        self._earlier: dict[tuple[str, int], Session] = {}
        self._leaders: dict[str, list[int]] = {}
        self._current = ("", 0)
        self._failing: tuple[str, int] | None = None

    @property
    def errors_matter(self) -> bool:
        """Whether a line that only says that something went wrong can still change an answer."""
        return any(session.error is None or session.serving for session in self._sessions.values())

    def apply(self, scan: Scan, at: int, *, answered: bool) -> None:
        """Weigh what line number `at` says; `answered`: of a request served, if it says so."""
        key = self._key(scan.line)
        if not scan.line.process and not scan.line.container and (scan.rules or scan.error or scan.file):
            # Python's own last words name no process: those of the server that is failing.
            key = self._failing if self._failing in self._sessions else key
        session = self._sessions[key]
        if scan.line.process and any(rule.kind in (Kind.ROOT, Kind.OOM) for rule in scan.rules):
            self._failing = key
        if scan.banner and session.failed_before(at):
            self._earlier[key] = session
            session = self._sessions[key] = Session()
        if answered:
            session.answered()
        session.apply(scan, at)

    def complete(self, scan: Scan, first: int, last: int) -> None:
        """Give the whole message to causes that were read in one of the lines `first` to `last`.

        Args:
            scan: of these lines joined.
        """
        self._sessions[self._key(scan.line)].complete(scan, first, last)

    def verdicts(self) -> list[Verdict]:
        """Each server's session and verdict; the one that answers for the whole log is the first.

        Of servers that ran at the same time it is the first that failed, else the last. One that had
        ended before another began in the same container counts only when nothing can be said of others.
        """
        spoke = sorted(
            (key for key, session in self._sessions.items() if session.last_at),
            key=lambda key: self._sessions[key].last_at,
        )
        if not spoke:
            return [(self._sessions[self._current], None, None)]
        last_start = {container: self._sessions[container, pid].first_at for container, pid in spoke}
        judged = [self._judge(key) for key in spoke]
        present = [
            verdict
            for (container, _), verdict in zip(spoke, judged, strict=True)
            if verdict[0].last_at >= last_start[container]
        ]
        failed = [
            verdict for verdict in present if verdict[1] is not None and verdict[1] is not Outcome.STARTED
        ]
        known = [verdict for verdict in present if verdict[1] is not None]
        before = [verdict for verdict in judged if verdict[1] is not None]
        chosen = (failed[:1] or known[-1:] or before[-1:] or present[-1:])[0]
        return [chosen, *(verdict for verdict in present if verdict is not chosen)]

    def _judge(self, key: tuple[str, int]) -> Verdict:
        session = self._sessions[key]
        outcome, mark = session.verdict()
        earlier = self._earlier.get(key)
        if outcome is None and earlier is not None:  # the restarted server had not come to an end
            return (earlier, *earlier.verdict())
        return session, outcome, mark

    def _key(self, line: Line) -> tuple[str, int]:
        if not line.process and line.container in ("", self._current[0]):
            return self._current
        container = line.container
        pid, leads = _pid_of(line.process)
        if leads and pid is not None:
            self._lead(container, pid)
        leaders = self._leaders.get(container)
        number = 0
        if leaders and pid is not None:
            number = max((one for one in leaders if one <= pid), default=leaders[0])
        elif leaders:
            number = self._current[1] if self._current[0] == container else leaders[0]
        key = (container, number)
        if key not in self._sessions:
            if len(self._sessions) >= _MAX_SERVERS:
                return self._current
            self._sessions[key] = Session()
        self._current = key
        return key

    def _lead(self, container: str, pid: int) -> None:
        leaders = self._leaders.setdefault(container, [])
        if pid in leaders or len(leaders) >= _MAX_SERVERS:
            return
        if not leaders and (container, 0) in self._sessions:  # its lines so far named no API server
            self._sessions[container, pid] = self._sessions.pop((container, 0))
            if (container, 0) in self._earlier:
                self._earlier[container, pid] = self._earlier.pop((container, 0))
            if self._current == (container, 0):
                self._current = (container, pid)
            if self._failing == (container, 0):
                self._failing = (container, pid)
        leaders.append(pid)
        leaders.sort()
