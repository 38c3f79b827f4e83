"""The private folder of a job: room for it, and what killed fleetruns have left of theirs."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch import supervisor
from ppdist.launch.options import parse_options
from ppdist.launch.supervisor import private_folder, run_job
from ppdist.launch.topology import make_plan
from tests.unit.launch.machines import machine


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # tmp_path is too long for a socket
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def left(base: Path, name: str = "ppdist-left", **owner: object) -> Path:
    """A private folder as a fleetrun makes it."""
    folder = base / name
    folder.mkdir(mode=0o700)
    mark = {"place": supervisor._place(), "pid": ended_process(), "began": 1} | owner
    (folder / "owner").write_text(json.dumps(mark))
    return folder


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def started() -> None:
    with private_folder():
        pass


@pytest.mark.parametrize("owner", [{}, {"pid": os.getpid()}, {"pid": 2**22 + 1}])
def test_a_killed_fleetruns_folder_goes_at_the_next_start(temporary: Path, owner: dict) -> None:
    """Its process is gone, or another one has its number."""
    folder, outside = left(temporary, **owner), temporary / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (folder / "link").symlink_to(outside)
    started()
    assert not folder.exists() and (outside / "file").exists()
    assert sorted(path.name for path in temporary.iterdir()) == ["outside"]


@pytest.mark.parametrize(
    "owner",
    [
        {"pid": os.getpid(), "began": supervisor._began(os.getpid())},  # it lives
        {"place": "another machine or container"},
        {"place": ""},
    ],
)
def test_the_folder_of_one_that_may_live_stays(temporary: Path, owner: dict) -> None:
    folder = left(temporary, **owner)
    started()
    assert folder.is_dir()


def test_what_strangers_may_have_made_stays(temporary: Path) -> None:
    target = left(temporary, "not-ours")
    (temporary / "ppdist-link").symlink_to(target)
    left(temporary, "ppdist-open").chmod(0o755)
    (temporary / "ppdist-file").touch()
    for name, make in (
        ("ppdist-none", lambda path: None),
        ("ppdist-pipe", os.mkfifo),
        ("ppdist-linked", lambda path: path.symlink_to(target / "owner")),
        ("ppdist-noise", lambda path: path.write_text("[" * 9999)),
    ):
        folder = left(temporary, name)
        (folder / "owner").unlink()
        make(folder / "owner")
    if os.geteuid() == 0:
        os.chown(left(temporary, "ppdist-of-another"), 12345, -1)
    before = sorted(temporary.iterdir())
    started()
    assert sorted(temporary.iterdir()) == before and (target / "owner").is_file()


def test_a_folder_whose_ranks_still_run_stays(temporary: Path) -> None:
    folder = left(temporary)
    variables = os.environ | {"PPDIST_JOB_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=variables, stdin=-1) as rank:
        started()
        assert folder.is_dir()
        rank.communicate(b"\n")
    started()
    assert not folder.exists()


def test_a_folder_named_through_a_link_stays_too(temporary: Path) -> None:
    folder, link = left(temporary), temporary / "link"
    link.symlink_to(temporary)
    variables = os.environ | {"PPDIST_JOB_DIR": str(link / folder.name)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=variables, stdin=-1) as rank:
        started()
        assert folder.is_dir()
        rank.communicate(b"\n")


def test_a_tmpdir_that_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, capsys
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary / "nowhere"))
    with private_folder() as folder:
        assert folder.is_dir()
    said = f"TMPDIR={temporary}/nowhere is full or cannot be written; using {folder.parent}"
    assert capsys.readouterr().err == f"fleetrun: note: {said}\n"


def test_too_little_room_for_reports_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else ranks that ended well would count as ranks that never began."""

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    options = parse_options(["t.py"], {})
    plan = make_plan(options, {}, machine())
    with private_folder() as folder:
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(LaunchError) as caught:
            run_job(options, plan, None, folder, 0, [])
    assert caught.value.code == "temporary_folder_unwritable"
