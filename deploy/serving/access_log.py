"""Assigns request ids, echoes traces, and logs a JSON line per request."""

import json
import re
import sys
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TextIO

from ppdist_runtime.writer_thread import TERMINAL, Screen
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Accepted request ids of clients; any other text could forge lines in their logs.
_NAME = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# Version 00 of W3C Trace Context, section 3.2; neither of its two ids may be zero.
_TRACE = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_PROBES = ("/health", "/ready", "/metrics")  # polled every few seconds: only failures matter
_MOST_PATH = 200  # characters


class AccessLog:
    """The ASGI middleware that logs requests.

    Args: write: takes the line of a request; must not block.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None]) -> None:
        self._app, self._write = app, write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        name, trace = (
            request_headers.get(b"x-request-id", ""),
            request_headers.get(b"traceparent", ""),
        )
        response_headers = {"x-request-id": name if _NAME.fullmatch(name) else uuid.uuid4().hex}
        if _TRACE.fullmatch(trace):
            response_headers["traceparent"] = trace
        started, status, sent = scope.get("came", time.perf_counter()), 500, 0

        async def send_named(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                added_headers = [
                    (key.encode(), value.encode()) for key, value in response_headers.items()
                ]
                message = {**message, "headers": [*message.get("headers", ()), *added_headers]}
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            # In `finally`, so that a request whose client has left or whose handler fails is
            # logged, too.
            if status != 200 or scope["path"] not in _PROBES:
                line: dict[str, Any] = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    "request_id": response_headers["x-request-id"],
                    "traceparent": response_headers.get("traceparent"),
                    "method": scope["method"],
                    "path": scope["path"][:_MOST_PATH],
                    "status": status,
                    "seconds": round(time.perf_counter() - started, 6),
                    "bytes_sent": sent,
                }
                self._write(json.dumps(line))


class Lines:
    """A writer of lines to a stream, by default stdout; if that blocks, no request does.

    Beyond 1 MiB of waiting lines they are dropped, and a later line says how many.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._screen = Screen(stream or sys.stdout)
        self._reported = TERMINAL.dropped["terminal"]

    def __call__(self, line: str) -> None:
        dropped = TERMINAL.dropped["terminal"]
        lost = f'{{"lines_lost": {dropped - self._reported}}}\n' if dropped > self._reported else ""
        self._screen.write(f"{lost}{line}\n")
        if TERMINAL.dropped["terminal"] == dropped:
            self._reported = dropped

    def close(self, seconds: float) -> None:
        """Writes the waiting lines, within so many seconds."""
        TERMINAL.flush(seconds)
