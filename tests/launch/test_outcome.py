"""How many ranks' ends become one exit code and one message."""

import json
import os
import signal
from pathlib import Path

import pytest

from ppdist.launch.outcome import Outcome, judge

TERM = -signal.SIGTERM
GLOO = "RuntimeError: [/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:584] TIMEOUT"


def ended(folder: Path, *ranks: tuple, stopped: int | None = None, launcher: int = 0) -> Outcome:
    """Each rank: (exit code, time) or (exit code, time, reported code, reported message)."""
    for rank, (code, time, *report) in enumerate(ranks):
        state = {"rank": rank, "local": rank, "pid": 1, "code": code, "time": time}
        (folder / f"exit-{rank}.json").write_text(json.dumps(state))
        if report:
            path = folder / f"rank-{rank}.json"
            path.write_text(json.dumps({"rank": rank, "code": report[0], "message": report[1]}))
            os.utime(path, (time, time))
    (folder / "launcher.log").write_text("noise\nTraceback (most recent call last):\nlast words\n")
    return judge(folder, folder, {}, launcher, stopped, folder / "launcher.log")


def test_all_done_is_0_and_all_stopped_is_75(tmp_path: Path) -> None:
    assert ended(tmp_path, (0, 1.0), (0, 2.0)) == Outcome(0, "")
    assert ended(tmp_path, (75, 1.0), (75, 2.0)).code == 75
    assert ended(tmp_path, (0, 1.0), (75, 2.0), stopped=15).code == 75


def test_wrong_input_wins_over_what_killed_its_peers(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (1, 3.0, 1, GLOO), (2, 2.0, 2, "no such file"), (TERM, 4.0))
    assert outcome == Outcome(2, "error: no such file")


def test_the_same_message_of_every_rank_is_said_once(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (2, 1.0, 2, "unknown key"), (2, 1.1, 2, "unknown key"))
    assert outcome == Outcome(2, "error: unknown key")


def test_ranks_told_of_rank_0s_failure_do_not_make_it_wrong_input(tmp_path: Path) -> None:
    outcome = ended(
        tmp_path, (1, 2.0, 1, "Traceback: boom"), (2, 1.9, 2, "rank 0 (host a) failed: boom")
    )
    assert outcome.code == 1 and "rank 0 failed first" in outcome.message


def test_the_cause_is_named_even_when_a_consequence_was_seen_earlier(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (1, 1.0, 1, GLOO), (-signal.SIGSEGV, 1.2), (TERM, 1.1))
    assert outcome.code == 1
    assert outcome.message.startswith("rank 1 failed first: it was killed by SIGSEGV")


def test_a_crash_after_a_good_report_is_a_failure(tmp_path: Path) -> None:
    assert ended(tmp_path, (0, 1.0, 0, ""), (-signal.SIGABRT, 2.0, 0, "")).code == 1


def test_a_lost_peer_alone_is_said_to_be_no_cause(tmp_path: Path) -> None:
    assert "no rank of this host says why" in ended(tmp_path, (1, 1.0, 1, GLOO)).message


def test_stopped_before_saving_is_1(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (75, 1.0), (TERM, 1.0), stopped=signal.SIGTERM)
    assert outcome == Outcome(1, "stopped by SIGTERM; rank 1 left no checkpoint", signal.SIGTERM)


@pytest.mark.parametrize("stopped", [None, signal.SIGINT])
def test_without_any_rank_the_launcher_speaks(tmp_path: Path, stopped: int | None) -> None:
    outcome = ended(tmp_path, stopped=stopped, launcher=1)
    assert outcome.code == 1
    said = "stopped by SIGINT before any rank began" if stopped else "Traceback (most recent"
    assert said in outcome.message and "noise" not in outcome.message


def test_other_hosts_get_what_only_this_terminal_shows(tmp_path: Path) -> None:
    outcome = ended(tmp_path, (1, 5.0, 1, "Traceback: boom"), (TERM, 6.0))
    assert "boom" not in outcome.message and "its output is above" in outcome.message
    assert outcome.told.endswith("its output is on the terminal there\nTraceback: boom")
    assert (outcome.is_consequence, outcome.time) == (False, 5.0)
    assert ended(tmp_path, (1, 1.0, 1, GLOO), (TERM, 2.0)).is_consequence
