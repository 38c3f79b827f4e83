"""The HTTP service of deploy/serving as a process: sockets, signals."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.fake_model import SERVING, encoded, picture
from tests.ports import free_port

for package in ("fastapi", "httptools", "python_multipart", "prometheus_client", "uvicorn"):
    pytest.importorskip(package)

sys.path.insert(0, str(SERVING))
import server  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_model.py")
PNG = encoded(picture())
WAIT = 120.0  # a bound against hanging, seconds


@contextmanager
def running(command: list[object], port: int) -> Iterator[subprocess.Popen]:
    """A server that is ready."""
    process = subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                if ask(port, "GET", "/ready")[0] == 200:
                    break
            except OSError:
                pass
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "never ready"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def fake(port: int, seconds: float = 0.0, *token: str):
    return running([sys.executable, FAKE, port, seconds, *token], port)


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def exchanged(connection: socket.socket, sent: bytes) -> bytes:
    """What is answered until the server closes; a reset: it has not read all that was sent."""
    answer = b""
    with suppress(ConnectionError):
        connection.sendall(sent)
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    number = free_port()
    with fake(number):
        yield number


class Half:
    """A request of which half is sent."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
        self.connection.putrequest("POST", "/detect")
        self.connection.putheader("Content-Length", str(len(PNG)))
        self.connection.endheaders(PNG[:50])

    def finish(self) -> int:
        self.connection.send(PNG[50:])
        try:
            return self.connection.getresponse().status
        finally:
            self.connection.close()


def test_a_body_that_breaks_is_answered_once():
    """Each was a traceback in the log: the request had begun, and was answered again."""
    number = free_port()
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with fake(number) as process:
        for path, pause in ((b"/detect", 0), (b"/nothing", 0), (b"/nothing", 0.2)):
            with socket.create_connection(("127.0.0.1", number), timeout=WAIT) as connection:
                connection.sendall(head % path + b"4\r\nabcd\r\n")
                time.sleep(pause)  # with one it is answered before
                answer = exchanged(connection, b"no number\r\n")
            assert answer.count(b"HTTP/1.1 ") == 1 and answer[9:12] in (b"400", b"404")
        assert ask(number, "GET", "/health")[0] == 200
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=WAIT)[1]


STUCK = """
import sys, time
sys.path[:0] = sys.argv[2:]
import server, service
from tests.deploy.fake_model import FakeModel
service.decode = lambda *_: time.sleep(600)
limits = server.Limits(seconds=0.5)
server.leave(server.serve(FakeModel, limits, "127.0.0.1", int(sys.argv[1])))
"""


UNREAD = """
import sys
sys.path[:0] = sys.argv[1:]
import server
lines = server.Lines()
for _ in range(2000):  # more than a pipe holds
    lines("x" * 200)
lines.close(0.2)
server.leave(0)
"""


def test_exit_does_not_wait_for_a_reader_of_the_access_log():
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", UNREAD, SERVING, REPOSITORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=buffered) as process:
        try:
            assert process.wait(WAIT) == 0
        finally:
            process.kill()


RUDE = """
import ctypes, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
sys.path[:0] = sys.argv[2:]
import server
from tests.deploy.fake_model import FakeModel

def load():
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL: as disable_signal_handler of Paddle
    return FakeModel()

server.leave(server.serve(load, server.Limits(), "127.0.0.1", int(sys.argv[1])))
"""


@pytest.mark.parametrize("rude", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sigterm_finishes_accepted_requests_only(rude):
    """Also where a runtime has replaced the handlers of signals."""
    number = free_port()
    command = [sys.executable, "-c", RUDE, number, SERVING, REPOSITORY]
    with running(command, number) if rude else fake(number) as process:
        half = Half(number)
        while b"requests_under_way 1.0" not in ask(number, "GET", "/metrics")[1]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(OSError):
            while True:
                ask(number, "GET", "/health")
        assert process.poll() is None, "ended before it had answered"
        assert half.finish() == 200
        assert process.wait(WAIT) == 0


@pytest.mark.slow
def test_sigterm_does_not_wait_for_a_decoder_that_hangs():
    number = free_port()
    with running([sys.executable, "-c", STUCK, number, SERVING, REPOSITORY], number) as process:
        assert ask(number, "POST", "/detect", PNG)[0] == 504
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0


def test_refused_large_body_still_gets_answer(port):
    status, content = ask(port, "POST", "/detect", bytes(30 * 2**20))
    assert status == 413
    assert "10485760 bytes" in json.loads(content)["error"]


def test_an_answer_on_a_kept_connection_waits_for_no_ack(port):
    """Without TCP_NODELAY each took the 40 ms of a delayed ACK."""
    connection, took = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT), []
    for _ in range(30):
        started = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        took.append(time.monotonic() - started)
    connection.close()
    assert min(took[10:]) < 0.02, took


def test_broken_http_closes_one_connection_and_no_more(port):
    for broken in (b"\0\1\2\r\n\r\n", b"POST /detect HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                   b"GET / HTTP/1.1\r\nHost: " + b"a" * 200_000):  # fmt: skip
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
            assert b" 400 " in exchanged(connection, broken)
    with socket.create_connection(("127.0.0.1", port)) as connection:  # leaves amid its body
        connection.sendall(b"POST /detect HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\nabc")
    assert ask(port, "POST", "/detect", PNG)[0] == 200
    deadline = time.monotonic() + WAIT
    while b'request_seconds_count{status="499"} 1.0' not in ask(port, "GET", "/metrics")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def chunked(path: bytes, *chunks: bytes, rest: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + rest


def get(path: bytes, headers: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (path, headers)


CLOSE = get(b"/ready", b"Connection: close\r\n")
# What a client sends -> the status of each answer that it gets before its connection is closed.
BOUNDS = {
    "a few small chunks": (chunked(b"/detect", *([b"a"] * 90)) + CLOSE, [415, 200]),
    "many fair chunks": (chunked(b"/detect", *([bytes(400)] * 200)) + CLOSE, [415, 200]),
    "one-byte chunks": (chunked(b"/detect", *([b"a"] * 2000)), [400]),
    "one-byte chunks to no route": (chunked(b"/nothing", *([b"a"] * 2000)), [400]),
    "trailers without end": (chunked(b"/detect", rest=b"0\r\n" + b"a: b\r\n" * 9000), [400]),
    "extensions without end": (chunked(b"/detect", rest=b"1;" + b"a=b;" * 90_000), [400]),
    "long headers": (get(b"/ready", b"a: %b" % (b"b" * 200_000))[:-2], [400]),
    "70 KB in one header": (get(b"/ready", b"a: %b\r\n" % (b"b" * 70_000)), [400]),
    "70 KB in 70 headers": (get(b"/ready", b"a: %b\r\n" % (b"b" * 1000) * 70), [400]),
    "70 KB of address": (get(b"/ready?" + b"b" * 70_000), [400]),
    "60 KB in one header": (
        get(b"/ready", b"a: %b\r\nConnection: close\r\n" % (b"b" * 60_000)),
        [200],
    ),
    "many headers": (get(b"/ready", b"a: b\r\n" * 200), [400]),
    "a few requests at once": (get(b"/ready") * 7 + CLOSE, [200] * 8),
    "many requests at once": (get(b"/ready") * 400, []),
    "an upgrade": (get(b"/ready", b"Connection: upgrade\r\nUpgrade: websocket\r\n"), [200]),
    "a tunnel": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", [400]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_connection_is_closed_beyond_its_bounds(name, port):
    sent, statuses = BOUNDS[name]
    with silent(port) as connection:
        answer = exchanged(connection, sent)
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)] == statuses
    assert ask(port, "GET", "/health")[0] == 200


LIMITED = """
import sys
sys.path[:0] = sys.argv[2:]
import server
from tests.deploy.fake_model import FakeModel
limits = server.Limits(header_seconds=1.0, write_seconds=1.0, most_connections=20)
server.leave(server.serve(FakeModel, limits, "127.0.0.1", int(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    """The port of a server with short deadlines and few connections."""
    number = free_port()
    with running([sys.executable, "-c", LIMITED, number, SERVING, REPOSITORY], number):
        yield number


def silent(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    connection.sendall(sent)
    return connection


def is_open(connection: socket.socket) -> bool:
    """Whether the server keeps it; what it sent is read."""
    connection.settimeout(0.001)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def test_connections_without_a_request_are_closed(hasty):
    head = b"POST /detect HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n"
    trickles = {
        "nothing": silent(hasty),
        "half a header": silent(hasty, head),
        "half of a second header": silent(hasty, get(b"/ready") + head),
        "the rest of a refused body": silent(hasty, head + b"\r\n"),
    }
    deadline = time.monotonic() + WAIT
    while trickles:
        assert time.monotonic() < deadline, f"kept: {[*trickles]}"
        for name, connection in [*trickles.items()]:
            try:
                if name != "nothing":
                    connection.sendall(b"x")
            except OSError:
                pass
            if not is_open(connection):
                del trickles[name]
        time.sleep(0.05)


def test_client_that_never_reads_is_closed(hasty):
    """Its requests are answered as long as buffers take the answers; then a deadline runs."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", hasty))
    connection.settimeout(WAIT)
    deadline = time.monotonic() + WAIT
    with connection, pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            connection.sendall(get(b"/openapi.json") * 4)
            time.sleep(0.02)


def test_connections_beyond_the_bound_are_refused_until_one_ends(hasty):
    half = Half(hasty)  # has begun a request: not idle
    idle = [silent(hasty) for _ in range(40)]
    deadline = time.monotonic() + WAIT
    while sum(map(is_open, idle)) > 19:
        assert time.monotonic() < deadline
    while any(map(is_open, idle)):
        assert time.monotonic() < deadline
    assert ask(hasty, "GET", "/health")[0] == 200
    assert half.finish() == 200


@pytest.mark.slow
def test_missing_model_is_one_line_and_exit_2():
    ended = subprocess.run(
        [sys.executable, SERVING / "server.py", "--port", str(free_port()), "--model", "nowhere"],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    errors = [line for line in ended.stderr.splitlines() if line.startswith("serving: error:")]
    assert ended.returncode == 2, ended.stderr
    assert len(errors) == 1 and "nowhere/infer.yml: No such file" in errors[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "options, token, message",
    [
        (["--most-batch", "0"], None, "--most-batch 0: out of range"),
        (["--threshold", "1.5"], None, "--threshold 1.5: out of range"),
        (["--seconds", "nan"], None, "--seconds nan: out of range"),
        (["--seconds", "inf"], None, "--seconds inf: out of range"),
        (["--least-rate", "-1"], None, "--least-rate -1: out of range"),
        (["--write-seconds", "0"], None, "--write-seconds 0: out of range"),
        (["--port", "99999"], None, "--port 99999: bind(): port must be 0-65535"),
        (["--token-file", "nowhere"], None, "No such file"),
        ([], "", "PPDIST_SERVING_TOKEN: expected one word of printable ASCII"),
        ([], "two words", "PPDIST_SERVING_TOKEN: expected one word of printable ASCII"),
    ],
)
def test_wrong_options_are_named_and_a_token_is_not(options, token, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["server.py", "--model", ".", *options])
    monkeypatch.delenv("PPDIST_SERVING_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("PPDIST_SERVING_TOKEN", token)
    assert server.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("serving: error: ") and message in said
    assert not token or token not in said


def test_taken_port_is_one_line_and_exit_2(port):
    command = [sys.executable, FAKE, str(port), "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT, check=False, cwd=REPOSITORY
    )
    assert ended.returncode == 2
    assert f"--host 127.0.0.1 --port {port}: " in ended.stderr
    assert "in use" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
def test_served_export_gives_boxes_of_predictor(tmp_path_factory):
    from tests.unit.export.tiny import exported_detector

    sys.path.insert(0, str(SERVING.parent / "python"))
    from predictor import Predictor

    folder, number = exported_detector(tmp_path_factory), free_port()
    rng = np.random.default_rng(0)
    image_HW3 = rng.integers(0, 256, (9, 14, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    rows_R6 = Predictor(folder, "paddle")([image_HW3])[0]
    assert len(rows_R6) > 3
    command = [sys.executable, SERVING / "server.py", "--model", folder, "--port", number,
               "--backend", "paddle", "--most-batch", "2"]  # fmt: skip
    with running(command, number):
        status, content = ask(number, "POST", "/detect?threshold=0", encoded(image_HW3))
    answer = json.loads(content)
    assert (status, answer["width"], answer["height"]) == (200, 112, 72)
    assert len(answer["objects"]) == len(rows_R6)
    for one, row in zip(answer["objects"], rows_R6):
        assert one["class"] == ("red", "green", "blue")[int(row[0])]
        assert one["category_id"] == int(row[0]) + 1
        assert one["score"] == pytest.approx(row[1], abs=1e-4)
        assert one["box"] == pytest.approx(row[2:].tolist(), abs=0.05)


def test_what_the_server_needs_is_the_same_in_both_lists():
    lines = (SERVING / "requirements.txt").read_text().splitlines()
    needed = {line for line in lines if line and line[0] not in "#-"}
    extras = re.search(r'"serving": \[(.*?)\]', (REPOSITORY / "setup.py").read_text(), re.DOTALL)
    assert extras is not None
    assert set(re.findall(r'"(.+?)"', extras[1])) == needed
