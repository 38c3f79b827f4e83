"""Which unfinished files a later process removes."""

import os
import socket
import time
from pathlib import Path

import pytest

from ppdist.common.drafts import remove_drafts
from ppdist.common.files import draft_of

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


def test_a_draft_lies_beside_what_it_becomes(tmp_path: Path) -> None:
    first, second = (draft_of(tmp_path / "model") for _ in range(2))
    assert first != second  # nobody can put a link there beforehand
    assert first.name.startswith(f".model.{HOST}.{os.getpid()}.x") and first.parent == tmp_path
    draft_of(tmp_path / ("狗" * 80)).touch()  # whose name has room for no more
    for draft in (first, second):
        draft.touch()
    remove_drafts(tmp_path, "model")
    assert not first.exists() and not second.exists()
