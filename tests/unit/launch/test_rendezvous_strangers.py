"""Strangers, and ranks of earlier jobs, neither join a run nor delay or end it."""

import itertools
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch import rendezvous
from ppdist.launch.options import TOKEN_VARIABLE, parse_options
from ppdist.launch.rendezvous import ControlChannel, Handshake, KeyExchange, name_of_job
from ppdist.launch.topology import make_plan
from tests.distributed import run_on_ranks
from tests.ports import free_port
from tests.unit.launch import hosts as launched
from tests.unit.launch.waiting import A, B, Host, host

TOKEN = "correct horse battery staple"
COMMAND = ("cfg.yml", "seed=1", "train.py")  # words of it


class Member(Host):
    """A fleetrun with a token of its own."""

    def __init__(self, handshake: Handshake, port: int, token: str, seconds: float = 15) -> None:
        super().__init__(handshake, port, seconds)
        self.token = token

    def _meet(self) -> None:
        try:
            self.channel = rendezvous.rendezvous(
                self.handshake, self.port, self.seconds, self.said.append, (), self.token
            )
        except ValueError as error:
            self.error = str(error)


def finished(*members: Member) -> None:
    for each in members:
        each.thread.join(30)
    for each in sorted(members, key=lambda each: each.handshake.is_first):
        each.end()


def test_hosts_of_one_token_meet_and_name_the_job_alike() -> None:
    port = free_port()
    members = [Member(host(own), port, TOKEN) for own in (A, B)]
    for each in members:
        each.start()
    finished(*members)
    assert [each.error for each in members] == ["", ""]
    drawn = {each.channel.drawn for each in members if each.channel is not None}
    assert len(drawn) == 1
    assert name_of_job(TOKEN, *drawn) == name_of_job(TOKEN, *drawn)
    assert name_of_job(TOKEN, *drawn) != name_of_job("", *drawn), "the token is part of it"
    assert name_of_job("") != name_of_job(""), "a host alone draws"
    assert name_of_job(TOKEN, "") == name_of_job(TOKEN, "") != name_of_job("", "")


@pytest.mark.parametrize("others", ["", pytest.param("another", marks=pytest.mark.slow)])
def test_a_host_without_the_token_is_refused(others: str) -> None:
    port = free_port()
    first, stranger = Member(host(A), port, TOKEN), Member(host(B), port, others, seconds=3)
    first.start()
    stranger.start()
    stranger.thread.join(30)
    assert f"has another {TOKEN_VARIABLE}, or none: set the same on every host" in stranger.error
    assert first.thread.is_alive()
    second = Member(host(B), port, TOKEN)
    second.start()
    finished(first, second)
    assert (first.error, second.error) == ("", "")
    refused = f"refused who calls from {B}: it has another {TOKEN_VARIABLE}, or none"
    assert sum(line.startswith(refused) for line in first.said) == 1


@pytest.mark.slow
def test_first_host_without_token_is_told() -> None:
    port = free_port()
    members = Member(host(A), port, "", seconds=4), Member(host(B), port, TOKEN, seconds=4)
    for each in members:
        each.start()
    finished(*members)
    said = f"has another {TOKEN_VARIABLE}, or none: set the same on every host"
    assert said in members[0].error or said in members[1].error
    assert all(each.error and each.channel is None for each in members)


def exchanged(called: KeyExchange, calls: KeyExchange) -> tuple[KeyExchange, KeyExchange]:
    """Two ends of a connection after their first lines."""
    assert called.meet(calls.hello()) and calls.meet(called.hello())
    called.check(calls.proofs())
    calls.check(called.proofs())
    return called, calls


@pytest.mark.parametrize(
    ("token", "command", "knows"),
    [
        (TOKEN, "c", (True, True)),
        (TOKEN, "d", (True, False)),
        ("", "c", (False, False)),
        ("correct horse battery stapler", "c", (False, False)),
    ],
)
def test_both_ends_prove_what_they_know(token: str, command: str, knows: tuple) -> None:
    ends = exchanged(KeyExchange(TOKEN, "c", False), KeyExchange(token, command, True))
    assert [(end.same_token, end.same_command) for end in ends] == [knows] * 2
    for own, other in (ends, ends[::-1]):
        assert other.is_signed(own.sign({"type": "x"})) == knows[0]
        assert not other.is_signed(own.sign({"type": "x"}) | {"type": "y"}), "changed"
        assert not own.is_signed(own.sign({"type": "x"})), "sent back"
        for forged in ({}, {"signature": "ä"}, {"signature": 1}):
            assert not other.is_signed({"type": "x"} | forged)


def test_what_was_said_on_one_connection_is_void_on_another() -> None:
    _, heard = exchanged(KeyExchange(TOKEN, "c", False), KeyExchange(TOKEN, "c", True))
    anew = KeyExchange(TOKEN, "c", False)
    assert anew.meet(heard.hello())
    anew.check(heard.proofs())
    assert not anew.same_token and not anew.is_signed(heard.sign({"type": "x"}))
    assert len({str(KeyExchange(TOKEN, "c", True).hello()) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "numbers", [None, [], ["5"], ["5", "0"], ["5", "1"], ["5", "x"], ["5", "f" * 512], ["5", 5]]
)
def test_numbers_that_prove_nothing_are_refused(numbers: object) -> None:
    hello = KeyExchange("", "c", True).hello() | {"numbers": numbers}
    assert not KeyExchange("", "c", False).meet(hello)


def said_to(stranger: socket.socket, *messages: dict) -> bytes:
    """What comes back until the other end hangs up."""
    stranger.settimeout(5)
    for message in messages:
        stranger.sendall(json.dumps(message).encode() + b"\n")
    heard = b""
    with suppress(ConnectionError):
        while piece := stranger.recv(65536):
            heard += piece
    return heard


def old_hello(own: str, **changes: object) -> dict:
    """The first line of a host with protocol 1."""
    return asdict(host(own)) | {"type": "hello", "proof": "0" * 64} | changes


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_a_stranger_ends_no_job_and_learns_nothing(token: str) -> None:
    port = free_port()
    first, heard = Member(host(A), port, token), []
    first.start()
    launched.wait_for(lambda: answers(port), 10)
    for change in ({"processes": 7}, {"hosts": (B, A)}, {"ppdist": "9"}, {"host": A}, {}):
        with socket.create_connection((A, port), 5) as stranger:
            heard.append(said_to(stranger, old_hello(B, **change)))
            assert b"another version of ppdist" in heard[-1]
    for knows in ("", "a guess of somebody who tries"):
        stranger_keys = KeyExchange(knows, host(B).command + "x", True)
        # Not from the address of a host, as binding to one would give.
        with socket.create_connection((A, port), 5, ("127.0.0.9", 0)) as stranger:
            stranger.sendall(json.dumps(stranger_keys.hello()).encode() + b"\n")
            heard.append(stranger.makefile().readline().encode())
            answer = json.loads(heard[-1])
            assert set(answer) == {"type", "protocol", "numbers", "once", "proofs"}
            assert stranger_keys.meet(answer)
            stranger_keys.check(answer)
            assert stranger_keys.same_token == (token == knows) and not stranger_keys.same_command
            told = host(B, processes=7).message(with_command=False)
            heard.append(said_to(stranger, stranger_keys.proofs(), stranger_keys.sign(told)))
    assert not any(word.encode() in each for word in COMMAND for each in heard)
    second = Member(host(B), port, token)
    second.start()
    finished(first, second)
    assert (first.error, second.error) == ("", "")


def pass_on(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while piece := one.recv(65536):
            other.sendall(piece)
        other.shutdown(socket.SHUT_WR)


def test_what_a_host_says_ends_nothing_if_passed_back() -> None:
    """A stranger at the address of another host connects the first one with itself."""
    port = free_port()
    with socket.create_server((B, port)) as server:
        first = Member(host(A), port, TOKEN, seconds=1.5)
        first.start()
        caller, _ = server.accept()
        with caller, socket.create_connection((A, port)) as back:
            threads = [
                threading.Thread(target=pass_on, args=ends, daemon=True)
                for ends in ((caller, back), (back, caller))
            ]
            for each in threads:
                each.start()
            first.end()
    assert "gave up after 1.5 s" in first.error and "it closed the connection" in first.error


def test_without_a_token_hosts_show_their_own_command_alone() -> None:
    port = free_port()
    others = {B: "seed=2"}
    members = [
        Member(host(own, arguments=("-c", "cfg.yml", "-o", others.get(own, "seed=1"))), port, "")
        for own in (A, B)
    ]
    for each in members:
        each.start()
    finished(*members)
    for each, own, other in zip(members, ("seed=1", "seed=2"), ("seed=2", "seed=1")):
        assert f"has tools/train.py -c cfg.yml -o {own}, " in each.error and other not in each.error
        assert "start every host with the same command" in each.error


def test_a_host_of_an_older_version_is_named() -> None:
    with socket.create_server((A, 0)) as server:
        port = server.getsockname()[1]
        waiting = Member(host(B), port, TOKEN, seconds=1.5)
        waiting.start()
        caller, _ = server.accept()
        assert b"hello" in caller.recv(4096)
        caller.close()  # as protocol 1 does with what is no handshake to it
        waiting.end()
    assert "another program, or another version of ppdist, has the port" in waiting.error


def test_a_job_token_must_be_long_enough() -> None:
    for short in ("secret", "fifteen letters"):
        with pytest.raises(LaunchError) as caught:
            parse_options(["t.py"], {TOKEN_VARIABLE: short})
        assert caught.value.code == "job_token_short" and short not in str(caught.value)
    assert parse_options(["t.py"], {TOKEN_VARIABLE: "sixteen letters."}).script == "t.py"


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((A, port)) == 0


@contextmanager
def sending(address: str, port: int, content: bytes) -> Iterator[None]:
    """Somebody sends this again and again, and calls anew when it is sent away."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection((address, port), 1) as one:
                one.settimeout(1)
                while not over.is_set():
                    one.sendall(content)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def rendezvous_seconds(port: int) -> float:
    """How long a host takes that finds the first one waiting."""
    first, second = Member(host(A), port, ""), Member(host(B), port, "")
    first.start()
    time.sleep(1.0)
    began = time.monotonic()
    second.start()
    finished(first, second)
    assert (first.error, second.error) == ("", "")
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", [b"x" * 65536, b"[" * 65536, b"\n" * 1000, b'{"type": "hello"}\n' * 100]
)
def test_who_sends_without_end_does_not_delay_the_others(content: bytes) -> None:
    port = free_port()
    with sending(A, port, content):
        assert rendezvous_seconds(port) < 15


@pytest.mark.slow
def test_hundreds_of_silent_callers_block_no_host(record_property) -> None:
    port, over = free_port(), threading.Event()

    def crowd() -> None:
        open_ones: list[socket.socket] = []
        while not over.is_set():
            with suppress(OSError):
                open_ones.append(socket.create_connection((A, port), 1))
            if len(open_ones) > 400:
                open_ones.pop(0).close()
            time.sleep(0.001)
        for each in open_ones:
            each.close()

    thread = threading.Thread(target=crowd, daemon=True)
    thread.start()
    try:
        seconds = rendezvous_seconds(port)
    finally:
        over.set()
        thread.join(20)
    record_property("rendezvous_seconds", seconds)
    assert seconds < 20


@pytest.mark.slow
def test_callers_during_a_run_cost_it_no_time() -> None:
    with socket.create_server((A, 0)) as listener:
        listener.setblocking(False)
        line = ControlChannel(A, (A, B), {}, listener, print)
        longest = 0.0
        with sending(A, listener.getsockname()[1], b"x" * 65536):
            for _ in range(20):
                began = time.monotonic()
                line.watch([])
                longest = max(longest, time.monotonic() - began)
                time.sleep(0.05)
    assert longest < 2.0


def test_many_late_callers_are_all_answered() -> None:
    with socket.create_server((A, 0)) as listener:
        listener.setblocking(False)
        line = ControlChannel(A, (A, B), {}, listener, lambda text: None)
        callers = [socket.create_connection(listener.getsockname()[:2]) for _ in range(10)]
        for caller in callers:
            caller.sendall(b'{"type": "hello"}\n')
            caller.settimeout(10)
        for _ in range(9):
            line.watch([])
        answers = [caller.recv(4096) for caller in callers]
        for caller in callers:
            caller.close()
    assert all(answers)


def joins_late(argument: object) -> list[list[int]]:
    """Rank 1's place is first asked for by a process of an earlier job."""
    from ppdist.distributed import comm, store

    os.environ["PPDIST_JOB"] = "this job"
    if comm.rank() == 1:
        os.environ["PPDIST_JOB"] = "an earlier job"
        with pytest.raises(
            LaunchError, match=r"rank 1 .* found another job at 127\.0\.0\.1:"
        ) as caught:
            comm.all_gather_object(1)
        assert "started for a job that has ended" in str(caught.value)
        assert "this job" not in str(caught.value)
        os.environ["PPDIST_JOB"], store._reached = "this job", False  # as a new process
        store._barriers = itertools.count()
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
