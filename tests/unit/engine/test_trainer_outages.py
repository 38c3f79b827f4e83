"""Images whose storage stays away: what was learned is saved, as it was before the lost step."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from ppdist.common import retry
from ppdist.common.errors import StorageError
from ppdist.common.process import STOPPED
from ppdist.distributed import comm, store
from ppdist.engine.callbacks import Callback
from tests.errors import raises
from tests.unit.engine.runs import assert_same_checkpoint, build_run, run_to_end
from tests.unit.engine.tiny import FASTEST


class TakeAway(Callback):
    """Takes a folder away before a step, as a storage that does not come back."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step_begin(self, step: int) -> None:
        if step == self.step:
            self.folder.rename(self.folder.with_name("away"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(store, "_timeout", 0.1)
    monkeypatch.setattr(comm, "set_timeout", lambda seconds: None)
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.05)


def test_work_is_saved_before_images_end_a_run(shapes, tmp_path):
    data = Path(shutil.copytree(shapes, tmp_path / "data"))
    own = ["train.batch_size_per_card=4", "checkpoint.every_steps=100"]
    whole, output = tmp_path / "whole", tmp_path / "output"
    run_to_end(data, whole, *own, "train.max_steps=2", model=FASTEST)
    callbacks = [TakeAway(data / "images", 3)]
    experiment = build_run(data, output, *own, model=FASTEST, callbacks=callbacks)
    with experiment.log, raises("storage_unreachable", "rank 0 (host "):
        experiment.trainer.fit()
    assert (output / "checkpoints" / "last").resolve().name == "step-00000002"
    assert_same_checkpoint(whole, output)


def stop_at_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process asked to stop, once: a later signal counts as a second one, and ends it."""
    sleep = time.sleep

    def ask(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(time, "sleep", sleep)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", ask)


def test_a_stop_does_not_wait_for_storage(shapes, tmp_path, monkeypatch):
    """A scheduler that asks to stop gives seconds; what is away would take minutes."""
    monkeypatch.setattr(store, "_timeout", 1800.0)
    data, output = Path(shutil.copytree(shapes, tmp_path / "data")), tmp_path / "output"
    own = ["train.batch_size_per_card=4"]
    callbacks = [TakeAway(data / "images", 2)]
    experiment = build_run(data, output, *own, model=FASTEST, callbacks=callbacks)
    with experiment.log:
        stop_at_first_pause(monkeypatch)
        assert experiment.trainer.fit() == STOPPED
    assert (output / "checkpoints" / "last").resolve().name == "step-00000001"


@pytest.mark.slow
def test_a_stop_amid_an_evaluation_does_not_wait_for_storage(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_timeout", 1800.0)
    data, output = Path(shutil.copytree(shapes, tmp_path / "data")), tmp_path / "output"
    own = ["train.batch_size_per_card=4", "train.max_steps=1"]
    experiment = build_run(data, output, *own, model=FASTEST, evaluate=True)
    evaluate = experiment.trainer.evaluations.evaluator.evaluate

    def evaluate_without_images(*arguments):
        (data / "images").rename(data / "away")
        return evaluate(*arguments)

    monkeypatch.setattr(
        experiment.trainer.evaluations.evaluator, "evaluate", evaluate_without_images
    )
    with experiment.log:
        stop_at_first_pause(monkeypatch)
        assert experiment.trainer.fit() == STOPPED
    assert (output / "checkpoints" / "last").resolve().name == "step-00000001"


def test_evaluation_without_images_ends_all_ranks_alike(monkeypatch):
    """The others hear it as what it is: training on would lack the images, too."""

    def lacks():
        raise StorageError("away", code="storage_unreachable", where="a.jpg")

    with raises("storage_unreachable"):
        comm.evaluate_on_all_ranks(lacks)
    own = comm.all_gather_object

    def with_another_rank(value):
        with raises("storage_unreachable") as raised:
            lacks()
        return [*own(value), [[False, "rank 1", vars(comm.failure_of(raised.value))], None]]

    monkeypatch.setattr(comm, "all_gather_object", with_another_rank)
    with raises("storage_unreachable"):
        comm.evaluate_on_all_ranks(lambda: 1)
