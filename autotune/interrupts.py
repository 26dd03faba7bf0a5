"""Ctrl-C once stops cleanly, twice at once.

The first signal raises KeyboardInterrupt where the program is: the server is ended, what was measured is
kept, and the command says how to go on. The second one leaves without any of that; the watchdogs end the
servers within seconds, and a later `--resume` puts the run folder in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_EXIT_CODE = 130


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it the three signals work as said above; afterwards they do what they did before.

    Only in the main thread, as Python's signals do.
    """
    count = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            with contextlib.suppress(OSError, ValueError):
                # Not print: it may be what was interrupted.
                show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
                line = b"\nautotune: stopped at once; what was finished is kept\n"
                os.write(sys.stderr.fileno(), show_cursor + line)
            os._exit(_EXIT_CODE)
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    # SIGHUP (the terminal was closed) is ignored under nohup, and stays so. SIGINT is taken even where it is
    # ignored: the background job of a script inherits it so, and could then only be killed.
    numbers = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
