"""A file server on loopback that fails as it is told, request by request."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path.

    files: path -> content.  faults: what happens to the next requests, in order; then none.
        "cut N": ends after N bytes of the answer; "stall N": sends N, then nothing for `stalls`
        seconds; an int: that status; "page": a web page; "no ranges": the whole file, whatever is
        asked for; "no length", "odd": the whole without its length, or with a word in its place.
    asked: (path, Range) of every request.  version: of all files, as ETag.  delay: seconds before
        each answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[str | int] = []
        self.asked: list[tuple[str, str | None]] = []
        self.version = '"1"'
        self.delay = 0.0
        self.stalls = 5.0
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def do_GET(self) -> None:
        server = self.server
        server.asked.append((self.path, self.headers.get("Range")))
        time.sleep(server.delay)
        fault = server.faults.pop(0) if server.faults else ""
        if self.path.startswith("/moved"):
            return self.answer(302, b"", {"Location": self.path.removeprefix("/moved")})
        if isinstance(fault, int):
            return self.answer(fault, b"sorry", {"Retry-After": "0"})
        content = server.files.get(self.path)
        if content is None:
            return self.answer(404, b"nothing here")
        if fault == "page":
            return self.answer(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        fresh = self.headers.get("If-Range") in (None, server.version)
        headers = {"ETag": server.version}
        if not found or not fresh or fault == "no ranges":
            return self.answer(200, content, headers, fault)
        first = int(found[1])
        if first >= len(content):
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        end = int(found[2]) + 1 if found[2] else len(content)
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        return self.answer(206, content[first:end], headers, fault)

    def do_HEAD(self) -> None:
        self.server.asked.append((f"HEAD {self.path}", None))
        self.answer(200, self.server.files[self.path], {"ETag": self.server.version}, "cut 0")

    def answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, fault: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if fault != "no length":
            self.send_header("Content-Length", "many" if fault == "odd" else f"{len(content)}")
        self.send_header("Connection", "close")
        self.end_headers()
        what, _, count = fault.partition(" ")
        sent = content[: int(count)] if what in ("cut", "stall") else content
        self.wfile.write(sent)
        self.wfile.flush()
        if what == "stall":
            self.server.ended.wait(self.server.stalls)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[FileServer]:
    """A server for as long as the block lasts."""
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
