"""Which unfinished files a later process removes."""

import os
import socket
import time
from pathlib import Path

import pytest

from ppdist.common.drafts import draft_of, remove_drafts

HOST, DAY = socket.gethostname(), 24 * 3600
ENDED = 2**22 + 1  # beyond the largest number of a process


@pytest.mark.parametrize(
    ("name", "age", "stays"),
    [
        (f".model.{HOST}.{ENDED}", 0, False),
        (f".model.{HOST}.{os.getpid()}", 0, False),  # this process has ended it
        (f".model.{HOST}.{os.getppid()}", 0, True),
        (f".model.{HOST}.{os.getppid()}", 2 * DAY, False),
        (f".model.other-{HOST}.{ENDED}", 0, True),
        (f".model.other-{HOST}.{ENDED}", 2 * DAY, False),
        (f".model.{os.getppid()}", 0, False),  # of an older version
        (f".user.{HOST}.{ENDED}", 0, True),
        (".model", 0, True),
    ],
    ids=range(9),  # names of processes differ from worker to worker
)
def test_drafts_of_ended_processes_go(name: str, age: float, stays: bool, tmp_path: Path) -> None:
    draft = tmp_path / name
    draft.mkdir()
    (draft / "part").touch()
    os.utime(draft, (time.time() - age,) * 2)
    remove_drafts(tmp_path, "model|best")
    assert draft.exists() == stays


def test_a_draft_lies_beside_what_it_becomes() -> None:
    assert draft_of(Path("a/model")) == Path(f"a/.model.{HOST}.{os.getpid()}")
