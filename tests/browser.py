"""A headless Chromium for tests: its DevTools protocol over two pipes, with real keys and a real mouse."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEYS = {
    "ArrowUp": 38,
    "ArrowDown": 40,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    "Escape": 27,
    " ": 32,
}
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Page:
    """One tab. `requests` are the addresses that it asked for, `errors` what its scripts complained about."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing, self._rest, self._number = reading, writing, b"", 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    _session: str | None = None

    def send(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while (answer := self._receive(deadline)).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self, deadline: float) -> Any:
        while b"\0" not in self._rest:
            if not select.select([self._reading], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            read = os.read(self._reading, 1 << 16)
            if not read:
                raise EOFError("Chromium has ended")
            self._rest += read
        first, self._rest = self._rest.split(b"\0", 1)
        return json.loads(first)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Load an address anew and wait until it is drawn."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        for _ in range(200):
            if self("document.readyState") == "complete" and self("location.href").startswith(url.partition("#")[0]):
                return self.settle()
            time.sleep(0.02)
        raise TimeoutError(url)

    def __call__(self, expression: str) -> Any:
        """The value of an expression in the page, awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")

    def focus(self, selector: str) -> None:
        self(f"document.querySelector({selector!r}).focus()")

    def press(self, key: str, times: int = 1, shift: bool = False) -> None:
        """A key of the keyboard, in what has the focus."""
        named = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        typed = {"text": " "} if key == " " else {}
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    modifiers=8 * shift,
                    **named,
                    **(typed if kind == "keyDown" else {}),
                )
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Replace what stands in a box, and leave it."""
        self.focus(selector)
        self(f"document.querySelector({selector!r}).select()")
        self.send("Input.insertText", text=text)
        self.press("Tab")

    def point(self, selector: str, x: float, y: float, click: bool = False) -> None:
        """Move the mouse to shares of the width and the height of an element."""
        element = f"document.querySelector({selector!r})"
        self(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self(f"(({{x, y, width, height}}) => [x, y, width, height])({element}.getBoundingClientRect())")
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.settle()

    def resize(self, width: int, height: int = 900, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.settle()

    def theme(self, name: str) -> None:
        """What the reader's system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.settle()


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A tab of a fresh Chromium, which ends with it.

    Raises:
        RuntimeError: there is no Chromium.
    """
    if CHROMIUM is None:
        raise RuntimeError("there is no Chromium")
    (its_reading, writing), (reading, its_writing) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium reads descriptor 3 and writes descriptor 4
        joined = f'exec "$0" "$@" 3<&{its_reading} 4>&{its_writing}'
        command = ["bash", "-c", joined, CHROMIUM, *QUIET, f"--user-data-dir={Path(profile)}"]
        process = subprocess.Popen(command, pass_fds=(its_reading, its_writing), stderr=subprocess.DEVNULL)
        os.close(its_reading)
        os.close(its_writing)
        try:
            yield Page(reading, writing)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(reading)
            os.close(writing)
