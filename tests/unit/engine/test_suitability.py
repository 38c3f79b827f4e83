"""What is said before the first step: codes, shares and the size that would help."""

import numpy as np
import pytest

from ppdist.config.experiment import experiment_of
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.engine.suitability import findings_of


def record(number: int, sides: list[float], size: tuple[int, int] = (640, 640)) -> ImageRecord:
    """An image with square objects.  Args: size: (width, height)."""
    boxes_M4 = np.array([[1, 1, 1 + side, 1 + side] for side in sides], np.float32).reshape(-1, 4)
    return ImageRecord(
        path=f"{number}.jpg", image_id=number, width=size[0], height=size[1], boxes_M4=boxes_M4,
        labels_M=np.zeros(len(sides), np.int64), crowd_M=np.zeros(len(sides), bool),
        area_M=np.prod(boxes_M4[:, 2:], axis=1),
    )  # fmt: skip


def dataset(*sides: list[float], size: tuple[int, int] = (640, 640)) -> DetectionSet:
    records = [record(number, each, size) for number, each in enumerate(sides)]
    return DetectionSet(records, ("cat",), (1,), "set.json")


def config(model: str = "yolov5", **more):
    return experiment_of(
        {
            "output_dir": "out",
            "data": {
                "format": "yolo", "root": "set", "train": {"images": "a"}, "val": {"images": "b"},
            },
            "loss": {"name": model},
            "model": {"name": model, "num_classes": 1, "image_size": [640, 640], **more},
        }
    )  # fmt: skip


def codes(*arguments) -> list[str]:
    return [finding.code for finding in findings_of(*arguments)]


def test_a_detr_of_random_weights_and_few_images_is_told_its_weights():
    few = dataset([100], [100])
    (found,) = findings_of(config("rtdetr", variant="dfine", size="s"), few, None)
    assert found.code == "detr_from_scratch" and "--weights dfine_s_coco " in found.text
    tuned = config("rtdetr", variant="dfine", size="s", pretrained="dfine_s_coco")
    assert codes(tuned, few, None) == codes(config(), few, None) == []
    assert codes(config("rtdetr"), None, few) == []  # an evaluation


@pytest.mark.parametrize(
    ("sides", "size", "advice"),
    [
        ([9] * 20, (640, 640), None),
        ([5] * 4 + [30] * 16, (640, 640), None),  # a fifth
        ([5] * 20, (640, 640), "100% of the training objects"),
        ([5] * 20, (640, 640), "--image-size 1024 "),
        ([5] * 10 + [30] * 10, (640, 640), "50% of the training objects"),
        ([9] * 20, (3840, 3840), "tiles of at most 720 pixels"),  # 1.5 pixels in the input
    ],
)
def test_objects_below_a_cell_are_told_the_size_that_would_help(sides, size, advice):
    found = findings_of(config(), dataset(sides, size=size), None)
    assert [finding.code for finding in found] == ["objects_tiny"] * bool(advice)
    assert not advice or advice in found[0].text


def test_more_objects_than_queries_are_counted_in_both_splits():
    train, val = dataset([50] * 40, [50]), dataset([50] * 12)
    model = config("rtdetr", queries=10, pretrained="rtdetr_r18_coco")
    found = findings_of(model, train, val)
    assert [finding.code for finding in found] == ["objects_beyond_queries"] * 2
    assert "1 of 2 images" in found[0].text and "model.queries=100" in found[0].text
    assert codes(model, None, dataset([50] * 10)) == []
    assert codes(config(), None, dataset([50] * 101)) == ["objects_crowded"]
