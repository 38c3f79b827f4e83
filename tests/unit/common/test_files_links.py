"""Nothing that lies in a run's folder makes a command write, cut or append elsewhere."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ppdist.cli import folder_for
from ppdist.common import files
from ppdist.common.run_log import RunLog
from ppdist.common.writers import VisualDLWriter
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.runtime.results import write_picture, write_table
from ppdist.viz.draw import write_jpeg
from ppdist.viz.run_plots import draw_run
from tests.errors import raises

IMAGE_HW3 = np.zeros((8, 8, 3), np.uint8)
WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_file": lambda path: files.replace_file(path, b"new"),
    "write_whole": lambda path: files.write_whole(path, b"new"),
    "write_json": lambda path: files.write_json(path, [1], sync=True),
    "append": lambda path: files.append(path, b"new"),
    "open_own": lambda path: files.open_own(path, "w").close(),
    "lock": lambda path: files.FileLock(path).write(b"new"),
    "write_jpeg": lambda path: write_jpeg(path, IMAGE_HW3),
    "write_picture": lambda path: write_picture(path, IMAGE_HW3),
    "write_table": lambda path: write_table(path, {"images": [], "categories": []}),
}


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file outside the run's folder, which none may touch."""
    path = tmp_path / "precious.png"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_takes_the_place_of_a_link(name: str, tmp_path: Path, precious: Path):
    link = tmp_path / "run" / "file.png"
    link.parent.mkdir()
    link.symlink_to(precious)
    WRITERS[name](link)
    assert precious.read_text() == "precious"
    assert link.is_file() and not link.is_symlink()
    assert list(link.parent.iterdir()) == [link]  # no draft is left


def test_what_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()  # a file cannot replace it
    with pytest.raises(OSError, match="Is a directory"):
        files.replace_file(tmp_path / "kept", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_log_of_a_run_follows_no_link(tmp_path: Path, precious: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("train.log", "metrics.jsonl", "metrics.jsonl.tmp", "run.lock", "trackers"):
        (folder / name).symlink_to(precious)
    (folder / "vdl").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    files.hold(folder)
    with RunLog(folder, True, 2, 1, None) as log:
        log.metrics({"step": 1, "loss": 1.0})
    assert precious.read_text() == "precious"
    assert "loss" in (folder / "metrics.jsonl").read_text()
    assert not any((folder / name).is_symlink() for name in ("train.log", "run.lock"))
    assert not any((tmp_path / "elsewhere").iterdir())


def test_folders_that_are_links_are_refused_where_nobody_typed_them(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("plots", "export", "vdl"):
        (run / name).symlink_to(tmp_path / "elsewhere")
    assert draw_run(run) == []
    with raises("folder_is_link"):
        folder_for(run / "model.pdparams", "export")
    with raises("folder_is_link"):
        VisualDLWriter(run / "vdl", "run", None)
    (run / "predictions").mkdir()
    (run / "predictions" / "crops").symlink_to(tmp_path / "elsewhere")
    with raises("folder_is_link"):
        folder_for(run / "model.pdparams", "predictions")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_linked_folder_of_checkpoints_is_followed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    weights = {"model": {"a": np.zeros(3, np.float32)}}
    save_checkpoint(tmp_path / "run" / "checkpoints", 1, weights, {}, "")
    assert sorted(os.listdir(disk)) == ["last", "step-00000001"]
