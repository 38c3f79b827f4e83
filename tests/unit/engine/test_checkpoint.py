"""Checkpoints are whole or absent, and say what is wrong with them."""

import numpy as np
import pytest

from ppdist.engine.checkpoint import (
    newest_valid,
    point,
    prune,
    read_checkpoint,
    save_checkpoint,
    set_aside,
    set_run_aside,
    unpack_arrays,
)
from tests.errors import raises


def save(folder, step):
    arrays = {"conv.weight": np.full((2, 3), step, "float32"), "bn._mean": np.arange(3.0)}
    return save_checkpoint(folder, step, {"model": arrays}, {"step": step}, "seed: 1\n")


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 7))
    assert checkpoint.state == {"step": 7}
    assert set(checkpoint.files) == {"model.safetensors", "state.json", "config.yml"}
    arrays = unpack_arrays(checkpoint.files["model.safetensors"], checkpoint.path)
    assert np.array_equal(arrays["conv.weight"], np.full((2, 3), 7, "float32"))
    assert (tmp_path / "last").resolve() == checkpoint.path.resolve()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_manifest_lists_exactly_verified_files(tmp_path):
    path = save(tmp_path, 1)
    (path / "ema.safetensors").write_bytes(b"not ours")
    checkpoint = read_checkpoint(path)
    (path / "model.safetensors").write_bytes(b"written after the look at it")
    assert "ema.safetensors" not in checkpoint.files
    assert unpack_arrays(checkpoint.files["model.safetensors"], path)["conv.weight"].shape == (2, 3)


@pytest.mark.parametrize("data", [b"", b"garbage" * 9, b"\x02" + bytes(7) + b"{}extra"])
def test_a_file_without_arrays_is_named(data, tmp_path):
    with raises("checkpoint_damaged", "ema.safetensors"):
        unpack_arrays(data, tmp_path / "ema.safetensors")


def test_no_checkpoint_is_none_but_bad_path_is_error(tmp_path):
    assert newest_valid(tmp_path / "nothing") == (None, [])
    with raises("not_a_checkpoint"):
        read_checkpoint(tmp_path)


def test_old_checkpoints_go_but_best_and_last_stay(tmp_path):
    paths = [save(tmp_path, step) for step in range(1, 6)]
    point(tmp_path / "best", paths[0])
    prune(tmp_path, keep=2)
    assert [path.exists() for path in paths] == [True, False, False, True, True]


def test_new_run_sets_aside_later_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    first, *later = [save(folder, step) for step in (10, 20, 30)]
    point(folder / "best", later[0])
    aside = set_aside(folder, 10)
    assert aside == tmp_path / "checkpoints-old-1"
    assert [path.name for path in folder.iterdir()] == [first.name]
    assert (aside / "best").resolve().name == "step-00000020"
    assert (aside / "last").resolve().name == "step-00000030"
    assert set_aside(folder, 10) is None
    assert set_aside(folder, 0) == tmp_path / "checkpoints-old-2"
    assert newest_valid(folder) == (None, [])


def test_every_earlier_run_is_kept_whole(tmp_path):
    """Before, the third run in a folder destroyed the first's metrics, evaluation and plots."""
    for run in ("first", "second", "third"):
        (tmp_path / "checkpoints" / f"step-{len(run):08d}").mkdir(parents=True)
        (tmp_path / "plots").mkdir()
        for name in ("metrics.jsonl", "evaluation.json", "report.html", "plots/errors.png"):
            (tmp_path / name).write_text(run)
        (tmp_path / "notes.txt").write_text("a stranger's")
        (tmp_path / "run.lock").touch()
        number = ("first", "second", "third").index(run) + 1
        old = tmp_path / f"old-{number}"
        assert set_run_aside(tmp_path) == old
        assert {path.name for path in tmp_path.iterdir()} == {
            "notes.txt", "run.lock", *(f"old-{n}" for n in range(1, number + 1))
        }  # fmt: skip
    assert set_run_aside(tmp_path) is None
    assert (tmp_path / "old-1" / "plots" / "errors.png").read_text() == "first"
    (tmp_path / "metrics.jsonl").touch()  # of a run that did not come to its first step
    assert set_run_aside(tmp_path) is None


def test_a_disk_that_refuses_leaves_older_checkpoints(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000002").write_text("a file where the directory should go")
    with raises("checkpoint_unwritable"):
        save(tmp_path, 2)
    assert newest_valid(tmp_path)[0].state["step"] == 1
