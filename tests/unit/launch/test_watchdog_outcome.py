"""How many ranks' ends become one exit code and one message."""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from ppdist.common.errors import Failure, LaunchError, StorageError, UserError, failure_of
from ppdist.launch import worker
from ppdist.launch.outcome import Attempt, Outcome, judge
from tests.unit.launch.beats import write_beat

TERM = -signal.SIGTERM
GLOO = failure_of(RuntimeError("[/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:584] TIMEOUT"))


def wrong(message: str) -> Failure:
    """A mistake of the user's."""
    return failure_of(UserError(message, code="any"))


def crash(message: str) -> Failure:
    return Failure("crash", "crash", message)


def ended(
    folder: Path,
    *ranks: tuple,
    stopped: int | None = None,
    launcher: int = 0,
    ran: float | None = None,
    printed: bool = True,
) -> Outcome:
    """Each rank: (exit code, time) or (exit code, time, reported exit code, Failure).

    Args:
        ran: seconds for which each script did; None: nobody knows.
        printed: each rank has printed its failure.
    """
    for rank, (code, time, *report) in enumerate(ranks):
        state = {"rank": rank, "local": rank, "pid": 1, "code": code, "time": time, "seconds": ran}
        (folder / f"exit-{rank}.json").write_text(json.dumps(state))
        if report:
            path = folder / f"rank-{rank}.json"
            said = {"rank": rank, "exit_code": report[0], "time": time, **asdict(report[1])}
            said["printed"] = printed
            path.write_text(json.dumps(said))
    (folder / "launcher.log").write_text("noise\nTraceback (most recent call last):\nlast words\n")
    return judge(Attempt(folder, folder), launcher, stopped)


SEGV, STOPPED = -signal.SIGSEGV, {"stopped": signal.SIGTERM}
TOLD = wrong("boom").of_rank(0, "a")  # a rank that was told of another one's failure
LOADING = ((TERM, 1.0), (TERM, 1.0))  # Python
# How each rank ended, what else is known -> the exit code, and what the message holds.
VERDICTS = {
    "all done": (((0, 1.0), (0, 2.0)), {}, 0, ""),
    "all stopped": (((75, 1.0), (75, 2.0)), {}, 75, ""),
    "done or stopped": (((0, 1.0), (75, 2.0)), STOPPED, 75, ""),
    "wrong input wins over what killed its peers":
        (((1, 3.0, 1, GLOO), (2, 2.0, 2, wrong("no file")), (TERM, 4.0)), {}, 2, "no file [any]"),
    "wrong input wins over an earlier crash":
        (((1, 1.0, 1, crash("boom")), (2, 9.0, 2, wrong("no file"))), {}, 2, "no file [any]"),
    "who was told changes nothing":
        (((1, 2.0, 1, crash("boom")), (2, 1.9, 2, TOLD)), {}, 1, "rank 0 failed first"),
    "the cause before its consequence":
        (((1, 1.0, 1, GLOO), (SEGV, 1.2), (TERM, 1.1)), {}, 1, "rank 1 failed first: it was"),
    "a crash after a good report":
        (((0, 1.0, 0, crash("")), (-signal.SIGABRT, 2.0, 0, crash(""))), {}, 1, "rank 1"),
    "a lost peer is no cause": (((1, 1.0, 1, GLOO),), {}, 1, "no rank of this host says why"),
    "stopped before saving": (((75, 1.0), (TERM, 1.0)), STOPPED, 1, "SIGTERM; rank 1 left no"),
    "stopped while Python is loaded": (LOADING, STOPPED | {"ran": 0.3}, 75, ""),
    "stopped later": (LOADING, STOPPED | {"ran": 30.0}, 1, ""),
    "stopped at an unknown time": (LOADING, STOPPED, 1, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_ends_of_ranks_are_one_verdict(case: str, tmp_path: Path) -> None:
    ranks, known, code, said = VERDICTS[case]
    outcome = ended(tmp_path, *ranks, **known)
    assert outcome.code == code and said in outcome.message
    assert outcome.message or code in (0, 75)


@pytest.mark.parametrize("printed", [True, False])
def test_a_lost_peer_is_told_here_unless_the_rank_has_told_it(
    printed: bool, tmp_path: Path
) -> None:
    """Of a job that goes on without lost hosts fleetrun says which host it was."""
    outcome = ended(tmp_path, (1, 1.0, 1, GLOO), printed=printed)
    assert (GLOO.message in outcome.message) == (
        not printed
    ) and GLOO.message in outcome.remote_message


def test_without_any_rank_the_launcher_speaks(tmp_path: Path) -> None:
    outcome = ended(tmp_path, launcher=1)
    assert outcome.code == 1 and "noise" not in outcome.message
    assert "Traceback (most recent" in outcome.message


def say(folder: Path, rank: int, phase: str, steps: int) -> None:
    """The last sign of life of a rank."""
    write_beat(folder, rank, 1, phase, 7, steps=steps, measured=steps)


def test_stopped_before_the_first_step_is_75(
    tmp_path: Path,
) -> None:
    before = "stopped by SIGINT before any rank began: it wrote no checkpoint"
    assert ended(tmp_path, stopped=signal.SIGINT) == Outcome(75, before, signal.SIGINT)
    for rank, phase in enumerate(("start", "step", "step")):
        say(tmp_path, rank, phase, 0)
    outcome = ended(tmp_path, (TERM, 1.0), (1, 1.1, 1, GLOO), (75, 1.2), stopped=signal.SIGTERM)
    assert outcome.code == 75 and outcome.is_final
    before = "stopped by SIGTERM before the first step of this attempt: it wrote no checkpoint"
    assert outcome.message == before
    say(tmp_path, 1, "step", 1)
    outcome = ended(tmp_path, (TERM, 1.0), (1, 1.1, 1, GLOO), (75, 1.2), stopped=signal.SIGTERM)
    assert outcome.code == 1


def test_how_far_an_attempt_came_is_known_in_every_phase(tmp_path: Path) -> None:
    for phase, reached in (("step", 8), ("save", 7), ("evaluate", 7)):
        say(tmp_path, 0, phase, 3)
        assert ended(tmp_path, (-signal.SIGSEGV, 1.0)).reached == reached


def test_a_rank_that_gave_up_on_the_store_says_so(
    tmp_path: Path,
) -> None:
    said = (
        "host a cannot reach port 6071 of 10.0.0.1, the TCP store of rank 0 "
        "(Connection refused, tried for 300 s): nothing listens there: see in its log what keeps"
    )
    gone = (2, 1.0, 2, failure_of(LaunchError(said, code="store_unreachable")))
    assert ended(tmp_path, (TERM, 9.0), gone) == Outcome(2, f"error: {said} [store_unreachable]")
    outcome = ended(tmp_path, (-signal.SIGSEGV, 1.5), gone)
    assert outcome.message.startswith("rank 0 failed first")


def test_last_words_that_were_cut_off_are_printed_again(tmp_path: Path) -> None:
    killed = ended(tmp_path, (-signal.SIGKILL, 2.0, 1, crash("Traceback: boom")))
    assert killed.message.endswith("its output is below\nTraceback: boom")
    assert "boom" not in ended(tmp_path, (1, 2.0, 1, crash("Traceback: boom"))).message


def test_the_end_of_a_rank_needs_no_room_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    worker.begin_report(tmp_path, 3, 1, 4711)
    (begun,) = worker.read_reports(tmp_path)
    assert (begun.rank, begun.local, begun.child, begun.code) == (3, 1, 4711, None)
    path = tmp_path / "exit-3.json"
    before, node = path.stat().st_size, path.stat().st_ino
    monkeypatch.setattr(Path, "write_bytes", None)  # nothing is made anew
    worker.end_report(tmp_path, 3, 1, -signal.SIGKILL)
    assert (path.stat().st_size, path.stat().st_ino) == (before, node)
    assert worker.read_reports(tmp_path)[0].code == -9


def test_an_end_that_is_just_being_written_is_none_yet(tmp_path: Path) -> None:
    worker.begin_report(tmp_path, 0, 0)
    path = tmp_path / "exit-0.json"
    begun = path.read_bytes()
    worker.end_report(tmp_path, 0, 0, 0)
    path.write_bytes(path.read_bytes()[: len(begun) // 2 + 20].ljust(len(begun)))
    assert worker.read_reports(tmp_path)[0].code is None


def test_other_hosts_get_what_only_this_terminal_shows(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (1, 5.0, 1, crash("Traceback: boom")), (TERM, 6.0))
    assert "boom" not in outcome.message and "its output is above" in outcome.message
    assert outcome.remote_message.endswith("its output is on the terminal there\nTraceback: boom")
    assert (outcome.is_consequence, outcome.time) == (False, 5.0)
    assert ended(tmp_path, (1, 1.0, 1, GLOO), (TERM, 2.0)).is_consequence


def test_storage_that_is_away_blames_no_step(tmp_path: Path) -> None:
    """A restart may help, and makes the step again: it is never one to be left out."""
    away = failure_of(StorageError("away", code="storage_unreachable"))
    for rank in (0, 1):
        write_beat(tmp_path, rank, os.getpid(), "step", 6)
    outcome = ended(tmp_path, (1, 1.0, 1, away), (1, 1.1, 1, away))
    assert (outcome.code, outcome.is_final, outcome.step) == (1, False, None)
    outcome = ended(tmp_path, (1, 1.0, 1, crash("boom")), (1, 1.1, 1, away))
    assert outcome.step == 7
