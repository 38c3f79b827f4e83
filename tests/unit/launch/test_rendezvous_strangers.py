"""Strangers, and ranks of earlier jobs, neither join a run nor delay or end it."""

import importlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ppdist.launch.connection import OTHER_TOKEN, Connection
from ppdist.launch.options import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, parse_options
from ppdist.launch.topology import make_plan
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.ports import free_port
from tests.unit.launch import hosts as launched
from tests.unit.launch.sockets import socket_pair
from tests.unit.launch.waiting import A, B, Host, host

TOKEN = "correct horse battery staple"


def finished(*members: Host) -> None:
    for each in members:
        each.thread.join(30)
    for each in sorted(members, key=lambda each: each.handshake.is_first):
        each.end()


def started(*members: Host) -> tuple[Host, ...]:
    for each in members:
        each.start()
    return members


@pytest.mark.parametrize("others", ["", pytest.param("another", marks=pytest.mark.slow)])
def test_a_host_without_the_token_is_refused(others: str) -> None:
    port = free_port()
    first, stranger = started(
        Host(host(A), port, 15, token=TOKEN), Host(host(B), port, 1.8, token=others)
    )
    stranger.thread.join(30)
    assert OTHER_TOKEN in stranger.error and first.thread.is_alive()
    (second,) = started(Host(host(B), port, token=TOKEN))
    finished(first, second)
    assert (first.error, second.error) == ("", "")
    refused = f"rejected a call from {B}: {OTHER_TOKEN}"
    assert sum(line == refused for line in first.said) == 1


def ends(own: str, other: str) -> tuple[Connection, Connection, socket.socket, socket.socket]:
    """A connection after its greeting, with the tokens of who was called and of who calls, and
    the sockets of both."""
    one, two = socket_pair()
    called, calls = Connection(one, own), Connection(two, other, calls=True)
    for each in (calls, called, calls):
        assert each.receive() == []
    return called, calls, one, two


@pytest.mark.parametrize(("own", "other"), [(TOKEN, ""), ("", TOKEN), (TOKEN, TOKEN + "r")])
def test_another_token_is_noticed_on_both_sides(own: str, other: str) -> None:
    called, calls, *_ = ends(own, other)
    assert called.closed == OTHER_TOKEN and calls.closed == OTHER_TOKEN


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.replace(b"go", b"no"),
        lambda said: said[1:],
        lambda said: said.partition(b" ")[2],
        lambda said: b"\xff" + said,
        lambda said: said.splitlines(keepends=True)[1],  # the first is left out
        lambda said: said.splitlines(keepends=True)[0] * 2,  # and sent again
    ],
)
def test_a_line_that_is_not_as_it_was_sent_ends_the_connection(change) -> None:
    called, calls, called_socket, calls_socket = ends(TOKEN, TOKEN)
    for _ in range(2):
        calls.send({"type": "go"})
    said = called_socket.recv(4096)
    calls_socket.send(change(said))
    called.receive()
    assert called.closed is not None and called.receive() == []


def test_what_was_said_elsewhere_or_the_other_way_is_void() -> None:
    _, calls, called_socket, _ = ends(TOKEN, TOKEN)
    calls.send({"type": "go"})
    said = called_socket.recv(4096)
    elsewhere, _, _, there = ends(TOKEN, TOKEN)
    for end, other in ((elsewhere, there), (calls, called_socket)):
        other.send(said)
        assert end.receive() == [] and end.closed is not None


def test_another_command_from_elsewhere_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token anybody may say that a host of the run has it."""
    port = free_port()
    (first,) = started(Host(host(A), port, 15))
    launched.wait_for(lambda: answers(port), 10)
    call = Connection.call(A, port, "127.0.0.9")
    call.send(host(B, processes=7).message())
    launched.wait_for(lambda: bool(call.receive()) or call.closed is not None, 10)
    call.close()
    (second,) = started(Host(host(B), port))
    finished(first, second)
    assert (first.error, second.error) == ("", "")
    assert any("call from 127.0.0.9" in line for line in first.said)


@pytest.mark.parametrize(
    ("content", "mode", "code"),
    [
        ("sixteen letters.\n", 0o600, ""),
        ("sixteen letters.", 0o640, "job_token_exposed"),
        ("secret", 0o600, "job_token_short"),
        ("", 0o600, "job_token_short"),
        (None, 0, "job_token_unreadable"),
    ],
)
def test_a_job_token_is_long_and_private(
    content: str | None, mode: int, code: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    variables = [{TOKEN_FILE_VARIABLE: str(file)}]
    variables += [{TOKEN_VARIABLE: content.strip()}] if content and mode == 0o600 else []
    for environment in variables:
        if not code:
            assert parse_options(["t.py"], environment).token == "sixteen letters."
            continue
        with raises(code) as caught:
            parse_options(["t.py"], environment)
        assert not (content and content in str(caught.value))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((A, port)) == 0


@contextmanager
def crowd(port: int, content: bytes, held: int, threads: int = 1) -> Iterator[None]:
    """Strangers call the first host, say this, and keep so many connections open."""
    over = threading.Event()

    def call() -> None:
        callers: list[socket.socket] = []
        while not over.is_set():
            with suppress(OSError):
                callers.append(socket.create_connection((A, port), 1))
                callers[-1].sendall(content)
            for each in callers[:-held]:
                each.close()
            callers = callers[-held:]
        for each in callers:
            each.close()

    running = [threading.Thread(target=call, daemon=True) for _ in range(threads)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in running:
            each.join(20)


GREETING = b"0" * 32 + b" " + b"1" * 64 + b"\n"  # well-formed


@pytest.mark.parametrize(
    ("content", "token"),
    [
        (GREETING, TOKEN),
        (GREETING, ""),
        pytest.param(b"", "", marks=pytest.mark.slow),
        pytest.param(b"x" * 65536, TOKEN, marks=pytest.mark.slow),
        pytest.param(json.dumps({"type": "hello"}).encode() + b"\n", "", marks=pytest.mark.slow),
    ],
    ids=["greeting and token", "greeting", "silence", "garbage", "old greeting"],
)
def test_a_flood_of_strangers_prevents_no_start(content: bytes, token: str) -> None:
    port = free_port()
    (first,) = started(Host(host(A), port, 20, token=token))
    launched.wait_for(lambda: answers(port), 10)
    with crowd(port, content, held=200, threads=2):
        time.sleep(0.2)
        began = time.monotonic()
        (second,) = started(Host(host(B), port, 20, token=token))
        finished(first, second)
        seconds = time.monotonic() - began
    assert (first.error, second.error) == ("", "")
    assert seconds < 10


def hung_up(caller: socket.socket) -> bool:
    caller.setblocking(False)
    with suppress(BlockingIOError):
        while caller.recv(4096):
            pass
        return True
    return False


def test_of_silent_strangers_only_the_newest_are_kept() -> None:
    port = free_port()
    (first,) = started(Host(host(A), port, 20))
    launched.wait_for(lambda: answers(port), 10)
    silent = [socket.create_connection((A, port)) for _ in range(150)]
    launched.wait_for(lambda: sum(hung_up(each) for each in silent) == 150 - 64, 3)
    assert [hung_up(each) for each in silent[-64:]] == [False] * 64
    for each in silent:
        each.close()
    first.received.append(signal.SIGTERM)
    first.end()


def joins_late(argument: object) -> list[list[int]]:
    """Rank 1's place is first asked for by a process of an earlier job."""
    from ppdist.distributed import comm, store

    os.environ["PPDIST_JOB"] = "this job"
    if comm.rank() == 1:
        os.environ["PPDIST_JOB"] = "an earlier job"
        with raises("other_job", "127.0.0.1") as caught:
            comm.all_gather_object(1)
        assert "this job" not in str(caught.value)
        os.environ["PPDIST_JOB"] = "this job"
        importlib.reload(store)  # as a new process has it
        return [comm.all_gather_object(1), comm.all_gather_object(2)]
    return [comm.all_gather_object(0), comm.all_gather_object(3)]


def test_a_rank_of_an_earlier_job_disturbs_nothing() -> None:
    results = run_on_ranks(2, "tests.unit.launch.test_rendezvous_strangers:joins_late")
    assert results == [[[0, 1], [3, 2]]] * 2


SECRET = "a-secret-of-the-environment-4711"


def what_was_left(*folders: Path) -> list[str]:
    """Files that hold the secret."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and SECRET.encode() in path.read_bytes():
                    found.append(str(path))
    return found


@pytest.mark.parametrize(
    "ending",
    ["well", *(pytest.param(each, marks=pytest.mark.slow) for each in ("failure", "killed"))],
)
def test_no_file_of_a_run_holds_secrets(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    temporary = Path(tempfile.mkdtemp(prefix="s"))  # pytest's own is too long for a socket
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    script = launched.write(
        "Path(f'up{rank}').touch()\n"
        "while not Path('go').exists(): time.sleep(0.05)\n"
        "assert 'PPDIST_JOB_TOKEN' not in os.environ and len(os.environ['PPDIST_JOB']) == 64\n"
        "def main():\n"
        f"    if rank == 1 and {ending == 'failure'}: raise RuntimeError('boom')\n"
        f"    if {ending == 'killed'}: time.sleep(120)\n"
        "run(main)\n"
    )
    variables = {"API_KEY": SECRET, TOKEN_VARIABLE: f"token {SECRET}", "TMPDIR": str(temporary)}
    with launched.hosts_of_a_test() as start:
        run = start("a", "--nproc_per_node", "2", script, variables=variables)
        launched.wait_for(lambda: Path("up0").exists() and Path("up1").exists())
        assert what_was_left(tmp_path, temporary) == [], "while it runs"
        modes = {path.name: path.stat().st_mode & 0o777 for path in temporary.iterdir()}
        assert modes and set(modes.values()) == {0o700}
        if ending == "killed":
            run.process.kill()
        else:
            Path("go").touch()
        ended = run.ended()
    assert ended.code == {"well": 0, "failure": 1, "killed": -9}[ending], ended.errors
    if ending == "killed":
        launched.wait_for(lambda: not alive(temporary))
    assert what_was_left(tmp_path, temporary) == []
    assert ending == "killed" or not list(temporary.iterdir())


def alive(mark: Path) -> list[str]:
    """Processes with this folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end at any moment
            if f"TMPDIR={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(str(path))
    return found


def test_the_token_stays_with_fleetrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.launch.machines import machine

    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    environment = {TOKEN_VARIABLE: TOKEN, "PPDIST_JOB": "of a run around this one", "HOME": "/x"}
    plan = make_plan(parse_options(["t.py"], environment), environment, machine())
    assert plan.environment["HOME"] == "/x"
    assert not {TOKEN_VARIABLE, "PPDIST_JOB"} & set(plan.environment)
    assert TOKEN not in repr(parse_options(["t.py"], environment))
