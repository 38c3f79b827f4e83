"""Checkpoints beside a real training: what it costs, and what a disk that refuses does to it."""

import os
import time

import pytest

from ppdist.distributed import comm
from ppdist.engine import checkpoint
from ppdist.engine.checkpoint import newest_valid, path_of, point, read_checkpoint
from ppdist.engine.early_stopping import EarlyStoppingState
from ppdist.engine.state import capture_state, restore_state
from tests.errors import raises
from tests.faults.fault import parse_faults
from tests.faults.injector import FaultInjector
from tests.unit.engine.amp import enable_scaling
from tests.unit.engine.runs import assert_same_checkpoint, build_run, said, train
from tests.unit.engine.tiny import FASTEST


@pytest.fixture(autouse=True)
def no_second_try(monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_SECONDS", ())


# A run of 12 steps, three to an epoch, that saves after every third.
OWN = ("train.batch_size_per_card=4", "train.epochs=4", "checkpoint.every_steps=3")


def build(data, output_dir, *overrides, **options):
    return build_run(data, output_dir, *OWN, *overrides, model=FASTEST, **options)


def exit_code(data, output_dir, *overrides, **options):
    return train(data, output_dir, *OWN, *overrides, model=FASTEST, **options)[0]


def final(output_dir):
    found, passed_over = newest_valid(output_dir / "checkpoints")
    assert found is not None and passed_over == []
    return found


class FullDisk(FaultInjector):
    """Once a step is on disk, so many files after it find no room."""

    def __init__(self, files, step):
        super().__init__(parse_faults(f"disk-full={files}@rank0:step{step + 2}"))
        self.step = step

    def on_save(self, step):
        while comm.is_main() and step == self.step and not self.checkpoint(step).exists():
            time.sleep(0.01)

    def checkpoint(self, step):
        return path_of(self.output_dir / "checkpoints", step)


@pytest.fixture(scope="module")
def undisturbed(shapes, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("undisturbed")
    assert exit_code(shapes, output_dir) == 0
    return output_dir


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    shapes, tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setattr(os, "fsync", os.fsync)  # which the fault replaces
    assert exit_code(shapes, tmp_path, callbacks=[FullDisk(2, 3)]) == 0
    assert final(tmp_path).state["step"] == 12
    assert_same_checkpoint(tmp_path, undisturbed)
    for step in (6, 9):
        assert f"the checkpoint of step {step} was not written" in said(tmp_path)


@pytest.mark.slow
def test_resume_repairs_links_lost_to_kill(shapes, tmp_path):
    assert exit_code(shapes, tmp_path, "train.max_steps=6", evaluate=True) == 0
    folder = tmp_path / "checkpoints"
    best = read_checkpoint(folder / "best").state["best_step"]
    other = next(step for step in (3, 6) if step != best)
    point(folder / "best", folder / f"step-{other:08d}")
    (folder / "last").unlink()
    experiment = build(shapes, tmp_path, "train.max_steps=6", resume=True)
    experiment.log.close()
    assert (folder / "best").resolve().name == f"step-{best:08d}"
    assert (folder / "last").resolve().name == "step-00000006"


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
    assert said(folder).count(f"checkpoints go to {disk}") == 1


def test_rollback_and_resume_undo_everything_learned(shapes, tmp_path):
    experiment = build(shapes, tmp_path)
    with experiment.log:
        trainer = experiment.trainer
        state = trainer.state
        state.early_stopping = EarlyStoppingState("mAP", 0.5, 3, 1)
        state.losses.trained(2.0)
        scaler = trainer.train_step.precision.scaler
        enable_scaling(scaler)
        snapshot = capture_state(trainer.train_step, state, trainer.schedule)
        trainer.train_step.precision.reject(lowers_scale=True)
        assert trainer.train_step.precision.loss_scale == 512.0
        restored, _ = restore_state(snapshot, trainer.train_step)
        assert trainer.train_step.precision.loss_scale == 1024.0
        state.early_stopping = EarlyStoppingState("mAP", 0.9, 6, 0)
        state.losses.trained(99.0)
        state.roll_back_to(restored)
    assert state.early_stopping == EarlyStoppingState("mAP", 0.5, 3, 1)
    assert (state.losses.summed, state.losses.steps) == (2.0, 1)
