"""Pictures of what the model sees: when they are made, and that they never end a run."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import paddle
import pytest

from ppdist.common.run_log import RunLog
from ppdist.config.augment import AugmentConfig
from ppdist.data.types import Batch
from ppdist.engine.callbacks import TrainingRun
from ppdist.engine.monitor import EvaluationLogger
from ppdist.viz.draw import PALETTE
from ppdist.viz.run_pictures import BatchPictures, EvaluationPictures, write_validation

STEPS = 4  # of an epoch


def batch(images: int = 2, real: bool = True) -> Batch:
    pixels = np.full((images, 3, 64, 96), 114, np.uint8)
    boxes = np.tile(np.array([[10, 20, 60, 50]], np.float32), (images, 1, 1))
    labels = np.zeros((images, 1), np.int64)
    mask = np.ones((images, 1), np.float32)
    index = np.arange(images) if real else np.full(images, -1)
    arrays = (pixels, boxes, labels, mask, index, np.ones((images, 2)), np.zeros((images, 2)))
    return Batch(*map(paddle.to_tensor, arrays), np.zeros(images, int), real=real)


def pictures(folder: Path, epochs: int = 5, **augment: object) -> BatchPictures:
    config = SimpleNamespace(task="detect", augment=AugmentConfig(**augment))
    return BatchPictures(folder, ("cat",), config, STEPS, epochs)


def look(drawn: BatchPictures, first: int, last: int, per_step: int = 1) -> list[Batch]:
    batches = [batch() for _ in range((last - first) * per_step)]
    plan = SimpleNamespace(start_step=first, end_step=last, count=lambda step: per_step)
    seen = list(drawn.watching(iter(batches), plan))
    assert all(one is other for one, other in zip(seen, batches, strict=True))
    return seen


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_first_and_newly_augmented_batches_are_drawn(tmp_path):
    look(pictures(tmp_path, mosaic=1.0, close_mosaic_epochs=2), 0, 5 * STEPS)
    assert made(tmp_path) == sorted(
        f"train_batch{kind}_{number}.jpg" for kind in ("", "_epoch_3") for number in range(3)
    )


def test_a_picture_shows_the_images_with_their_boxes(tmp_path):
    look(pictures(tmp_path), 0, 1)
    image_HW3 = cv2.imread(str(tmp_path / "train_batch_0.jpg"))[:, :, ::-1].astype(int)
    zoom = 480 // 96
    edge = image_HW3[35 * zoom, 10 * zoom]
    assert np.abs(edge - PALETTE[0]).max() < 25
    assert np.abs(image_HW3[35 * zoom, 30 * zoom] - 114).max() < 10


def test_micro_batches_belong_to_their_step(tmp_path):
    look(pictures(tmp_path, mosaic=1.0, close_mosaic_epochs=4), 0, STEPS, per_step=2)
    assert made(tmp_path) == [f"train_batch_{number}.jpg" for number in range(3)]


def test_resume_keeps_drawn_images_new_run_redraws(tmp_path):
    old = tmp_path / "train_batch_0.jpg"
    old.write_text("old")
    look(pictures(tmp_path), 2, 5)
    assert old.read_text() == "old" and len(made(tmp_path)) == 3
    look(pictures(tmp_path), 0, 3)
    assert old.read_bytes() != b"old"


def test_batches_that_hold_no_image_are_passed_over(tmp_path):
    drawn = pictures(tmp_path)
    plan = SimpleNamespace(start_step=0, end_step=2, count=lambda step: 1)
    assert len(list(drawn.watching(iter([batch(real=False), batch()]), plan))) == 2
    assert made(tmp_path) == ["train_batch_0.jpg"]


def test_going_back_draws_nothing_twice(tmp_path):
    drawn = pictures(tmp_path)
    look(drawn, 0, 3)
    (tmp_path / "train_batch_0.jpg").unlink()
    look(drawn, 0, 3)
    assert made(tmp_path) == ["train_batch_1.jpg", "train_batch_2.jpg"]


def test_unwritable_folder_costs_warning_not_batch(tmp_path, caplog):
    (tmp_path / "plots").write_text("a file")
    look(pictures(tmp_path / "plots"), 0, 6)
    (warning,) = caplog.records
    assert "continuing without pictures" in warning.getMessage()


def test_unwritable_val_images_cost_one_warning(tmp_path):
    pictures = EvaluationPictures(("cat",), 1)
    pictures.drawn = [np.zeros((8, 20, 3), np.uint8)]
    with RunLog(tmp_path, True, 10, 1, None, visualdl=False) as log:
        (tmp_path / "plots").write_text("a file")
        shown = EvaluationLogger(log, 1, partial(pictures.show, log), analyse=lambda step: {})
        shown.on_train_begin(TrainingRun(SimpleNamespace(model=None), None, tmp_path, 0, 2))
        for step in (1, 2):
            shown.on_evaluate_end(step, {"mAP": 0.5}, is_best=False)
    text = (tmp_path / "train.log").read_text()
    assert text.count("plots/val_batch_*.jpg cannot be written") == 1


@pytest.mark.parametrize(("count", "files"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_validation_images_lie_four_in_a_file(tmp_path, count, files):
    write_validation(tmp_path, [np.full((40, 84, 3), 9, np.uint8)] * count)
    assert made(tmp_path) == [f"val_batch_{number}.jpg" for number in range(files)]
