"""A real headless Chromium, spoken to through two pipes by its DevTools protocol: no driver, port or network.

with Chrome(folder) as chrome:
    page = chrome.open(path, width=390, dark=True)
    page.evaluate("document.title"), page.problems, page.screenshot()
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Debian's name first; the others are what distributions and vendors call it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: Chromium reads commands from descriptor 3 and answers on 4, wherever the pipes are.
_LAUNCH = """
import fcntl, os, sys
for number, fd in zip((3, 4), [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]):
    os.dup2(fd, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
#: A cold start on two busy cores.
_LIMIT_S = 60.0


def find_chrome() -> str | None:
    """The program, or None: AUTOTUNE_CHROME, else the first of the usual names on PATH."""
    own = os.environ.get("AUTOTUNE_CHROME")
    return own or next((found for name in NAMES if (found := shutil.which(name))), None)


class Chrome:
    """One browser process, ended with the block."""

    def __init__(self, folder: Path) -> None:
        program = find_chrome()
        assert program, "no Chromium"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = [
            "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
            # Nothing leaves the machine, whatever a page or the browser itself may want.
            "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write), program, *options],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chrome:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's answer; events that come before it are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)
        raise TimeoutError(method)

    def wait_for(self, event: str) -> None:
        """Returns when `event` has come since the last wait."""
        if any(known.get("method") == event for known in self.events):
            return
        for message in self._messages():
            self.events.append(message)
            if message.get("method") == event:
                return
        raise TimeoutError(event)

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            if b"\0" in self._buffer:
                message, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(message)
                continue
            if select.select([self._read], [], [], 1.0)[0]:
                data = os.read(self._read, 1 << 20)
                if not data:
                    raise TimeoutError("Chromium ended")
                self._buffer += data

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """The file in a new tab of that size."""
        self.events.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", session, url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        return Page(self, session)


class Page:
    """A tab with a file in it."""

    def __init__(self, chrome: Chrome, session: str) -> None:
        self._chrome = chrome
        self._session = session

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._chrome.call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def problems(self) -> list[str]:
        """What the console said: errors, warnings, uncaught exceptions, blocked content."""
        found = []
        for event in self._chrome.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._chrome.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the whole page."""
        answer = self._chrome.call(
            "Page.captureScreenshot", self._session, format="png", captureBeyondViewport=whole
        )
        return base64.b64decode(answer["data"])
