"""A real S3 server on loopback, and a proxy before it that delays, refuses and cuts."""

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BUCKET = "bucket"
KEY, SECRET = "AKIATESTINGONLY", "a-secret-that-no-log-may-show"


class FaultProxy(ThreadingHTTPServer):
    """Forwards requests; those of images and shards meet faults, each in its turn.

    faults: what happens to the first requests of each object and range, in order; then none.
        an int: that status; "cut": half of the answer; "reset": no answer; a float: seconds before
        the answer.  always: the same for every one of these requests, for ever; None: nothing.
    asked: requests by (method, path, range).
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.faults: Sequence[int | float | str] = ()
        self.always: int | float | str | None = None
        self.struck: Counter[str] = Counter()
        self.asked: Counter[tuple[str, str, str]] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault_of(self, method: str, path: str, span: str) -> int | float | str | None:
        with self.lock:
            self.asked[method, path, span] += 1
            if method != "GET" or not path.endswith((".jpg", ".png", ".tar")):
                return None
            turn = self.asked[method, path, span] - 1
            fault = self.always
            if fault is None and turn < len(self.faults):
                # Another order for each object, so that kinds meet in one batch.
                fault = self.faults[(turn + len(path) + sum(map(ord, span))) % len(self.faults)]
            if fault is not None:
                self.struck[str(fault)] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def forward(self) -> None:
        path, span = self.path.partition("?")[0], self.headers.get("Range") or ""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault_of(self.command, path, span)
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int):
            words = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message/></Error>"
            self.answer(fault, {"Content-Type": "application/xml"}, words, len(words))
            return
        if isinstance(fault, float):
            time.sleep(fault)
        back = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=30)
        back.request(self.command, self.path, body, dict(self.headers))
        found = back.getresponse()
        content = found.read()
        headers = {k: v for k, v in found.headers.items() if k.lower() != "transfer-encoding"}
        length = int(headers.pop("Content-Length", None) or headers.pop("content-length", 0) or 0)
        sent = content[: len(content) // 2] if fault == "cut" else content
        self.answer(found.status, headers, sent, len(content) or length)
        if fault == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        back.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def answer(self, status: int, headers: dict[str, str], content: bytes, length: int) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in ("content-length", "connection"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # whoever asked has gone
            self.close_connection = True


@contextmanager
def object_store() -> Iterator[FaultProxy]:
    """An S3 server with an empty bucket, reached through the proxy that is given."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    proxy = FaultProxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    _put(port, f"/{BUCKET}", b"")
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def environment(proxy: FaultProxy) -> dict[str, str]:
    """The variables by which S3's clients find the store."""
    return {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def upload(proxy: FaultProxy, folder: Path, prefix: str) -> str:
    """Puts all files of a folder into the store.  Returns: the address of it there."""
    for file in folder.rglob("*"):
        if file.is_file():
            path = f"/{BUCKET}/{prefix}/{file.relative_to(folder).as_posix()}"
            _put(proxy.target, path, file.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def _put(port: int, path: str, content: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    signed = f"AWS4-HMAC-SHA256 Credential={KEY}/20250101/us-east-1/s3/aws4_request"
    connection.request("PUT", path, content, {"Authorization": signed, "Host": "127.0.0.1"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()
