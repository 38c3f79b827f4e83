"""Nothing that lies in a run's folder makes a command write, cut or append elsewhere."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ppdist.cli import default_folder
from ppdist.common import files
from ppdist.common.records import read_metrics
from ppdist.common.run_log import RunLog
from ppdist.common.writers import VisualDLWriter
from ppdist.engine.checkpoint import save_checkpoint, set_aside, set_run_aside
from ppdist.lab.tune.results import read_rows
from ppdist.predict.detections import write_picture
from ppdist.predict.results import write_table
from ppdist.viz.draw import write_jpeg
from ppdist.viz.run_plots import draw_run
from tests.errors import raises

IMAGE_HW3 = np.zeros((8, 8, 3), np.uint8)
EMPTY: dict[str, list[dict]] = {"images": [], "categories": [], "annotations": []}
WRITERS: dict[str, Callable[[Path], object]] = {
    "replace_file": lambda path: files.replace_file(path, b"new"),
    "write_whole": lambda path: files.write_whole(path, b"new"),
    "write_json": lambda path: files.write_json(path, [1], sync=True),
    "append": lambda path: files.append(path, b"new"),
    "open_own": lambda path: files.open_own(path, "w").close(),
    "lock": lambda path: files.FileLock(path).write(b"new"),
    "write_jpeg": lambda path: write_jpeg(path, IMAGE_HW3),
    "write_picture": lambda path: write_picture(path, IMAGE_HW3),
    "write_table": lambda path: write_table(path, EMPTY),
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


@pytest.mark.parametrize("mode", ["a", "w", "rb+"])
def test_a_file_with_two_names_is_written_under_one(mode: str, tmp_path: Path, precious: Path):
    path = tmp_path / "train.log"
    path.hardlink_to(precious)
    with files.open_own(path, mode) as file:
        file.write(b"new" if "b" in mode else "new")
    assert precious.read_text() == "precious"
    assert path.read_text() == {"a": "preciousnew", "w": "new", "rb+": "newcious"}[mode]
    assert path.stat().st_nlink == 1


@pytest.mark.parametrize("name", ["replace_file", "append", "open_own", "lock", "write_picture"])
def test_a_pipe_blocks_no_writer(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.png"
    os.mkfifo(path)
    WRITERS[name](path)
    assert path.is_file()


def test_a_pipe_is_written_to_if_somebody_reads(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with raises("file_unwritable"):
        files.write_text(path, "text")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(path, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_a_pipe_blocks_no_reader(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    for read in (files.text_of, files.bytes_of, read_metrics):
        with pytest.raises(OSError, match="not a file"):
            read(path)
    assert files.read_json(path) is None
    with raises("folder_unwritable"):
        RunLog(tmp_path, True, 2, 1, 0, visualdl=False)
    os.mkfifo(tmp_path / "trials.jsonl")
    with raises("study_not_found"):
        read_rows(tmp_path)


def test_a_closed_log_writes_no_picture(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    files.hold(folder)
    with RunLog(folder, True, 2, 1, None, visualdl=False) as log:
        pass
    shutil.rmtree(folder)  # as the comparison of ranks does with its folder
    log.put("picture", (folder / "picture").touch)
    assert log.flush() and not folder.exists()


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
        default_folder(run / "model.pdparams", "export")
    with raises("folder_is_link"):
        VisualDLWriter(run / "vdl", "run", None)
    (run / "predictions").mkdir()
    (run / "predictions" / "crops").symlink_to(tmp_path / "elsewhere")
    with raises("folder_is_link"):
        default_folder(run / "model.pdparams", "predictions")
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("target", ["../disk", "{}/disk"])
def test_checkpoints_behind_a_link_stay_on_their_disk(target: str, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    for folder in (run, disk):
        folder.mkdir()
    link = run / "checkpoints"
    link.symlink_to(target.format(tmp_path))
    weights = {"model": {"a": np.zeros(3, np.float32)}}
    for number in (1, 2):
        save_checkpoint(link, number, weights, {}, "")
        old = set_run_aside(run)
        assert old == run / f"old-{number}" and link.is_symlink()
        moved = (old / "checkpoints").resolve()
        assert moved == disk / f"old-{number}"
        assert (moved / "last").resolve() == moved / f"step-{number:08d}"
    save_checkpoint(link, 3, weights, {}, "")
    assert set_aside(link, 0) == disk / "old-3"
    assert sorted(os.listdir(disk)) == ["old-1", "old-2", "old-3"]
