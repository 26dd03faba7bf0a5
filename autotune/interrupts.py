"""Ctrl-C once stops cleanly, twice at once.

The first signal raises KeyboardInterrupt where the program is: the server is ended, what was measured is
kept, and the command says how to go on. The second one leaves without any of that; the watchdogs end the
servers within seconds, and a later `--resume` puts the run folder in order.

What must not be left half done (a server being started, its end, a line of the record) is `held_back`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_EXIT_CODE = 130


class _State:
    """Of the process, as its handlers are.

    Attributes:
        counting: within `interruptible`.
        count: signals since it began.
        held: within `held_back`.
    """

    counting = False
    count = 0
    held = False


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it the three signals work as said above; afterwards they do what they did before.

    Only in the main thread, as Python's signals do.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _State.count += 1
        if _State.count > 1:
            _leave()
        raise KeyboardInterrupt

    # SIGHUP (the terminal was closed) is ignored under nohup, and stays so. SIGINT is taken even where it is
    # ignored: the background job of a script inherits it so, and could then only be killed.
    before = {
        number: signal.signal(number, stop)
        for number in _numbers()
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
    }
    _State.counting, _State.count = True, 0
    try:
        yield
    finally:
        _restore(before)
        _State.counting = False


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within it a signal waits until the end, where KeyboardInterrupt is raised.

    Under `interruptible` a second one leaves at once; without it (the Python API) all wait, since the process
    lives on with whatever was left half done.

    For what cannot be interrupted anywhere without a loss. The end stands inside the `try` that cleans up:

        try:
            with held_back():
                process = start()
        except BaseException:
            end(process)

    In other threads it does nothing, since signals come to the main one.
    """
    if _State.held or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if _State.counting:
            _State.count += 1
            if _State.count > 1:
                _leave()

    try:
        with _blocked():
            for number in _numbers():
                # None: set by another language; such a one is not called from here.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.getsignal(number)
                    signal.signal(number, note)
            _State.held = True
        yield
    finally:
        with _blocked():
            _State.held = False
            _restore(before)
        if came:
            _act(came[0], before[came[0]])


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Signals that come between two handlers' changes come after them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _numbers())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _act(number: int, handler: Any) -> None:
    """What would have happened when the signal came."""
    if _State.counting:
        raise KeyboardInterrupt
    if callable(handler):
        handler(number, None)
    else:
        signal.raise_signal(number)


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]


def _restore(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        # None: it was not set by Python, and cannot be set again.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _leave() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        # Not print: it may be what was interrupted.
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        line = b"\nautotune: stopped at once; what was finished is kept\n"
        os.write(sys.stderr.fileno(), show_cursor + line)
    os._exit(_EXIT_CODE)
