"""The private folder of a job, and room for it."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
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
