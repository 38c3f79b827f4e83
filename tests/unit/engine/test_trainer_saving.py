"""Checkpoints beside a real training: what it costs, and what a disk that refuses does to it."""

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoint import measure_saving
from ppdist.common import files
from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.distributed import comm
from ppdist.engine import checkpoint
from ppdist.engine.callbacks import Callback
from ppdist.engine.checkpoint import newest_valid, point, read_checkpoint, unpacked
from ppdist.engine.early_stopping import EarlyStoppingState
from ppdist.engine.monitor import Stopwatch
from ppdist.engine.state import capture_state, restore_state
from ppdist.engine.train_step import loss_scale, lower_scale
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.forked import ROOT
from tests.unit.engine.amp import enable_scaling
from tests.unit.engine.runs import build_run
from tests.unit.engine.tiny import FASTEST, init_cpu, tiny_config

HERE = "tests.unit.engine.test_trainer_saving"


@pytest.fixture(autouse=True)
def no_second_try(monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_SECONDS", ())


def build(data, output_dir, *overrides, **options):
    """A run of 12 steps, three to an epoch, that saves after every third."""
    own = ["train.batch_size_per_card=4", "train.epochs=4", "checkpoint.every_steps=3"]
    return build_run(data, output_dir, *own, *overrides, model=FASTEST, **options)


def train(*arguments, before=lambda trainer: None, **options):
    experiment = build(*arguments, **options)
    with experiment.log:
        before(experiment.trainer)
        return experiment.trainer.fit()


def final(output_dir):
    found, passed_over = newest_valid(output_dir / "checkpoints")
    assert found is not None and passed_over == []
    return found


def assert_same(first, second):
    assert first.state["step"] == second.state["step"]
    for group in ("model", "ema", "optimizer"):
        ours, theirs = (
            unpacked(each.files[f"{group}.safetensors"], each.path) for each in (first, second)
        )
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not np.array_equal(ours[key], theirs[key])] == []


def refuse_steps(monkeypatch, *steps):
    """The disk is full whenever one of these steps is written."""
    write = checkpoint._write_durably

    def full(path, pieces):
        if any(f"step-{step:08d}" in f"{path}" for step in steps):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces)

    monkeypatch.setattr(checkpoint, "_write_durably", full)


@pytest.fixture(scope="module")
def undisturbed(shapes, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("undisturbed")
    assert train(shapes, output_dir) == 0
    return final(output_dir)


def test_training_on_does_not_change_a_snapshot(shapes, tmp_path):
    experiment = build(shapes, tmp_path)
    with experiment.log:
        trainer = experiment.trainer
        trainer._begin()
        trainer._seek()
        trainer._step(Stopwatch())
        snapshot = capture_state(trainer.train_step, trainer.state, trainer.schedule)
        kept = {
            (group, key): array.copy()
            for group, arrays in snapshot.groups.items()
            for key, array in arrays.items()
        }
        trainer._step(Stopwatch())
        moved = capture_state(trainer.train_step, trainer.state, trainer.schedule)
    assert {group for group, _ in kept} == {"model", "ema", "optimizer"}
    for (group, key), array in kept.items():
        np.testing.assert_array_equal(snapshot.groups[group][key], array)
    assert any(not np.array_equal(moved.groups["model"][key], array)
               for (group, key), array in kept.items() if group == "model")  # fmt: skip


@pytest.mark.slow
def test_slow_storage_does_not_stall_training(
    shapes, tmp_path, undisturbed, monkeypatch, record_property
):
    """A write that would take longer than all steps together: the run waits for it once, at its
    end."""
    ended, stalls = threading.Event(), []
    write = checkpoint._write_durably

    def throttled(path, pieces):
        assert ended.wait(120)
        return write(path, pieces)

    def watch(trainer):
        save, finish = trainer._save, trainer._finish_saving

        def timed():
            began = time.perf_counter()
            save()
            stalls.append(time.perf_counter() - began)

        def finish_and_write():
            ended.set()
            finish()

        trainer._save, trainer._finish_saving = timed, finish_and_write

    monkeypatch.setattr(checkpoint, "_write_durably", throttled)
    assert train(shapes, tmp_path, before=watch) == 0
    record_property("longest_stall_seconds", max(stalls))
    assert_same(final(tmp_path), undisturbed)
    steps = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert steps == {"step-00000003", "step-00000012"}  # the first was at it all the time


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    shapes, tmp_path, undisturbed, monkeypatch
):
    refuse_steps(monkeypatch, 6, 9)
    assert train(shapes, tmp_path) == 0
    assert_same(final(tmp_path), undisturbed)
    said = (tmp_path / "train.log").read_text()
    for step in (6, 9):
        assert f"the checkpoint of step {step} was not written" in said
    assert "No space left on device (needs" in said and "inodes free" in said
    assert "training continues and will retry" in said


@pytest.mark.slow
def test_refused_last_checkpoint_fails_resumable_run(shapes, tmp_path, undisturbed, monkeypatch):
    with monkeypatch.context() as context:
        refuse_steps(context, 12)
        with raises("checkpoint_lost", "step 12"):
            train(shapes, tmp_path)
    assert final(tmp_path).state["step"] == 9
    assert "training goes on" not in (tmp_path / "train.log").read_text()
    assert train(shapes, tmp_path, resume=True) == 0
    assert_same(final(tmp_path), undisturbed)


def refused_at_the_end(argument):
    """Only rank 0 writes; rank 1 must hear of it."""
    checkpoint._RETRY_SECONDS = ()
    write = checkpoint._write_durably

    def full(path, pieces):
        if comm.is_main() and "step-00000002" in f"{path}":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, pieces)

    checkpoint._write_durably = full
    short = ["train.max_steps=2", "checkpoint.every_steps=1"]
    try:
        train(Path(argument["shapes"]), Path(argument["output"]), *short)
    except CheckpointError as error:
        return [error.code, error.from_rank, str(error)]
    return []


@pytest.mark.slow
def test_refused_last_checkpoint_fails_every_rank(shapes, tmp_path):
    argument = {"shapes": str(shapes), "output": str(tmp_path)}
    told = run_on_ranks(2, f"{HERE}:refused_at_the_end", argument, seconds=240)
    assert [each[:2] for each in told] == [["checkpoint_lost", None], ["checkpoint_lost", 0]]
    assert all("step 2 was not written" in text for *_, text in told)
    assert final(tmp_path).state["step"] == 1


class Lose(Callback):
    """Before step 2, another training has the folder of the rank that writes."""

    def __init__(self, folder):
        self._lock = folder / "run.lock"

    def on_step_begin(self, step):
        if step == 2 and comm.is_main():
            self._lock.unlink()
            self._lock.write_text("of another")
            with raises("output_dir_lost"):
                files.require_held(self._lock.parent)


def lost_by_the_rank_that_writes(argument):
    output = Path(argument["output"])
    callbacks = [Lose(output)]
    try:
        train(Path(argument["shapes"]), output, "checkpoint.every_steps=100", callbacks=callbacks)
    except ConfigError as error:
        return [error.code, error.from_rank]
    return []


@pytest.mark.slow
def test_a_folder_lost_by_one_rank_ends_every_rank(shapes, tmp_path):
    argument = {"shapes": str(shapes), "output": str(tmp_path / "run")}
    told = run_on_ranks(2, f"{HERE}:lost_by_the_rank_that_writes", argument, seconds=240)
    assert told == [["output_dir_lost", None], ["output_dir_lost", 0]]
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.slow
def test_resume_repairs_links_lost_to_kill(shapes, tmp_path):
    assert train(shapes, tmp_path, "train.max_steps=6", evaluate=True) == 0
    folder = tmp_path / "checkpoints"
    best = read_checkpoint(folder / "best").state["best_step"]
    other = next(step for step in (3, 6) if step != best)
    point(folder / "best", folder / f"step-{other:08d}")
    (folder / "last").unlink()
    experiment = build(shapes, tmp_path, "train.max_steps=6", resume=True)
    experiment.log.close()
    assert (folder / "best").resolve().name == f"step-{best:08d}"
    assert (folder / "last").resolve().name == "step-00000006"


def test_second_training_into_same_folder_is_refused(shapes, tmp_path, monkeypatch):
    code = "import sys, time\nfrom pathlib import Path\nfrom ppdist.common.files import hold\n" \
           "hold(Path(sys.argv[1]))\nprint(flush=True)\ntime.sleep(300)"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", code, f"{tmp_path}"], cwd=ROOT, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            monkeypatch.setattr(files.hold, "__defaults__", (0.0,))  # seconds to wait
            with raises("output_dir_in_use", str(other.pid)):
                train(shapes, tmp_path)
        finally:
            other.kill()
    assert {path.name for path in tmp_path.iterdir()} == {"run.lock"}  # nothing was touched


def test_only_checkpoints_may_be_a_linked_folder_of_a_run(shapes, tmp_path):
    folder, disk = tmp_path / "run", tmp_path / "disk"
    for each in (folder, disk):
        each.mkdir()
    for name in ("checkpoints", "plots"):
        (folder / name).symlink_to(disk)
    with raises("folder_is_link", f"{folder / 'plots'}"):
        build(shapes, folder)
    (folder / "plots").unlink()
    build(shapes, folder).log.close()
    said = (folder / "train.log").read_text()
    assert said.count(f"{folder / 'checkpoints'} is a link: checkpoints go to {disk}") == 1


@pytest.mark.slow
def test_checkpoint_cost_is_measured_in_parts(shapes, tmp_path):
    init_cpu()
    config = tiny_config(shapes, ["train.batch_size_per_card=4"])
    report = measure_saving(config, saves=2, scratch=tmp_path)
    assert report["standing_still_seconds"] > 0 and report["writing_seconds"] > 0
    percents = report["percent_of_a_minute"]
    assert 0 < percents["standing_still"] < percents["waiting_for_the_write"]
    assert report["bytes"] > 100_000 and report["saves"] == 2


def test_rollback_and_resume_undo_everything_learned(shapes, tmp_path):
    experiment = build(shapes, tmp_path)
    with experiment.log:
        trainer = experiment.trainer
        state = trainer.state
        state.early_stopping = EarlyStoppingState("mAP", 0.5, 3, 1)
        state.losses.trained(2.0)
        scaler = trainer.train_step.scaler
        enable_scaling(scaler)
        snapshot = capture_state(trainer.train_step, state, trainer.schedule)
        lower_scale(scaler)
        assert loss_scale(scaler) == 512.0
        restored, _ = restore_state(snapshot, trainer.train_step)
        assert loss_scale(scaler) == 1024.0
        state.early_stopping = EarlyStoppingState("mAP", 0.9, 6, 0)
        state.losses.trained(99.0)
        state.roll_back_to(restored)
    assert state.early_stopping == EarlyStoppingState("mAP", 0.5, 3, 1)
    assert (state.losses.summed, state.losses.steps) == (2.0, 1)


def test_what_a_rollback_undoes_is_saved_again(shapes, tmp_path):
    experiment = build(shapes, tmp_path)
    with experiment.log:
        trainer = experiment.trainer
        trainer._saved_step, trainer._owes_save = 3, True
        trainer._rolled_back()  # to step 0: step 3 will be another one
        assert (trainer._saved_step, trainer._owes_save) == (-1, False)
