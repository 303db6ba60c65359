"""Headless Chromium, spoken to over a pair of pipes in its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PROGRAM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "chromium"
# Only our own page is opened; the sandbox needs rights that containers rarely have.
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")

# It reads commands from file 3 and writes to file 4.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for wanted, end in zip((3, 4), ends):
    os.dup2(end, wanted)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab. `problems` are what its console said: errors, and what the policy has blocked."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._last_id = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """scheme: "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def allow_scripts(self, allowed: bool) -> None:
        self._call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def open(self, url: str) -> None:
        """Returns once it is loaded."""
        self._call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression; a promise's, once it is kept."""
        reply = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the whole page, as PNG."""
        reply = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._last_id:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        match message.get("method"):
            case "Log.entryAdded":
                self.problems.append(message["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"]["text"])
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """profile: a folder for what it writes."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()

    ends = (command_read, answer_write)
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *map(str, ends), *command],
        pass_fds=ends,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    with os.fdopen(command_write, "wb") as commands, os.fdopen(answer_read, "rb") as answers:
        try:
            yield Page(commands, answers)
        finally:
            process.kill()
            process.wait()
