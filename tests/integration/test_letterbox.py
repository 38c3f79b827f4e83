"""Letterbox from the image to the metrics: what goes in comes back, in every road."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from PIL import Image

from ppdist.config.augment import AugmentConfig
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.evaluate import NMSConfig
from ppdist.config.experiment import load_config
from ppdist.data.datasets.build import read_split
from ppdist.data.loading.loader import EvalLoader
from ppdist.data.transforms.geometry import (
    GREY,
    GeometryParams,
    fit_image,
    letterbox,
    map_boxes,
    random_geometry,
    resize_for_evaluation,
)
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.engine.evaluator import Evaluator
from ppdist.export.predictor import detect, prepare
from ppdist.export.spec import describe, read_spec, write_spec
from ppdist.models.base import Detector
from tests.unit.data.sets import write_coco

INPUTS = [(320, 320), (320, 416), (64, 96), (97, 33)]  # height, width
IMAGES = [(640, 480), (480, 640), (500, 375), (641, 427), (33, 1000), (7, 5), (320, 320)]


@pytest.mark.parametrize("size", INPUTS)
@pytest.mark.parametrize(("width", "height"), IMAGES)
def test_the_image_lies_in_the_middle_in_its_shape(width, height, size):
    placement = letterbox(width, height, size)
    left, top, right, bottom = placement.target
    wide, tall = right - left, bottom - top
    assert wide == size[1] or tall == size[0]
    assert 0 <= left <= right <= size[1] and 0 <= top <= bottom <= size[0]
    assert 0 <= (size[1] - right) - left <= 1 and 0 <= (size[0] - bottom) - top <= 1
    scale = min(size[0] / height, size[1] / width)
    assert abs(wide - width * scale) <= 0.5 or wide == 1
    assert abs(tall - height * scale) <= 0.5 or tall == 1


def test_letterbox_is_linear_resize_padded_with_grey():
    image = np.random.RandomState(0).randint(0, 256, (480, 640, 3)).astype(np.uint8)
    found = resize_for_evaluation(image, (320, 320), "letterbox")
    assert found.shape == (320, 320, 3)
    assert (found[:40] == GREY).all() and (found[280:] == GREY).all()
    expected = image.reshape(240, 2, 320, 2, 3).mean((1, 3))  # linear at exactly one half
    assert np.abs(found[40:280] - expected).max() <= 0.75
    assert not (found[40:280] == GREY).all(2).all(1).any()


def test_plain_training_places_image_as_evaluation():
    still = AugmentConfig(distort=0, expand=0, crop=0, flip=0)
    rng = np.random.default_rng(0)
    for width, height in IMAGES:
        boxes = np.array([[1, 1, 4, 4]], np.float32)
        params = GeometryParams.of_image(boxes, width, height, (320, 416))
        placed = random_geometry(params, still, rng).placement("letterbox")
        assert placed == letterbox(width, height, (320, 416))


# --- evaluation ----------------------------------------------------------------------------------


class Oracle(Detector):
    """Gives one image after another the boxes it is told, in input pixels."""

    def __init__(self, boxes: list[np.ndarray], labels: list[np.ndarray]) -> None:
        super().__init__(3, (32,), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.answers = list(zip(boxes, labels))

    def forward(self, images_B3HW):
        return images_B3HW.shape[0]

    def decode(self, outputs):
        scores, boxes = np.zeros((outputs, 8, 3), np.float32), np.zeros((outputs, 8, 4), np.float32)
        for row in range(outputs):
            boxes_M4, labels_M = self.answers.pop(0)
            boxes[row, : len(boxes_M4)] = boxes_M4
            scores[row, np.arange(len(labels_M)), labels_M] = 0.9
        return paddle.to_tensor(scores), paddle.to_tensor(boxes)


def image_set(folder: Path) -> DetectionSet:
    records = []
    for index, (width, height) in enumerate([(640, 480), (480, 640), (500, 375), (333, 640)]):
        rng, path = np.random.RandomState(index), folder / f"{index}.png"
        Image.fromarray(np.full((height, width, 3), 50 * index, np.uint8)).save(path)
        low = np.array([[20, 30], [150, 200], [240, 90]]) + rng.randint(0, 9, (3, 2))
        boxes_M4 = np.concatenate([low, low + rng.randint(40, 81, (3, 2))], 1).astype(np.float32)
        area_M = (boxes_M4[:, 2:] - boxes_M4[:, :2]).prod(1)
        records.append(
            ImageRecord(
                path=str(path),
                image_id=index + 1,
                width=width,
                height=height,
                boxes_M4=boxes_M4,
                labels_M=np.array([0, 1, 2]),
                crowd_M=np.zeros(3, bool),
                area_M=area_M,
            )
        )
    return DetectionSet(tuple(records), ("a", "b", "c"), (1, 2, 3), "test")


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
@pytest.mark.parametrize("size", [(320, 320), (256, 416)])
def test_perfect_detections_survive_letterbox(tmp_path, resize, size):
    dataset = image_set(tmp_path)
    split = SplitConfig(annotations="unused")
    config = DataConfig(root=str(tmp_path), train=split, val=split, workers=0, resize=resize)
    loader = EvalLoader(dataset, config, image_size=size, batch_size=3, rank=0, world=1)
    in_input = []
    for record in dataset.records:
        x_scale, y_scale = size[1] / record.width, size[0] / record.height
        offset = np.zeros(2)
        if resize == "letterbox":  # independently of the product, and without its rounding
            x_scale = y_scale = min(x_scale, y_scale)
            offset = np.array(
                [(size[1] - record.width * x_scale) / 2, (size[0] - record.height * y_scale) / 2]
            )
        scale = np.array([x_scale, y_scale])
        in_input.append(record.boxes_M4 * np.tile(scale, 2) + np.tile(offset, 2))
    labels = [record.labels_M for record in dataset.records]
    for batch in loader:
        for position, index in enumerate(batch.image_index_B.numpy()):
            found = batch.boxes_BM4[position].numpy()[:3]
            np.testing.assert_allclose(found, in_input[index], atol=0.75)  # whole pixels of places
    exact = [
        map_boxes(record.boxes_M4, fit_image(record.width, record.height, size, resize))[0]
        for record in dataset.records
    ]
    evaluator = Evaluator(dataset, loader, NMSConfig())
    metrics = evaluator.evaluate(Oracle(exact, labels))
    assert metrics["mAP"] == pytest.approx(1.0) and metrics["mAP50"] == pytest.approx(1.0)
    rows_R7 = evaluator.predict(Oracle(exact, labels))
    true_boxes = np.concatenate([record.boxes_M4 for record in dataset.records])
    np.testing.assert_allclose(rows_R7[:, 3:], true_boxes, atol=1e-3)


# --- inference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
@pytest.mark.parametrize("size", [(320, 320), (320, 448)])
@pytest.mark.parametrize(("width", "height"), [(640, 480), (480, 640), (641, 427), (200, 900)])
def test_box_in_input_maps_back_to_image(width, height, size, resize):
    box = np.array([0.3 * width, 0.2 * height, 0.7 * width, 0.9 * height]).round().astype(int)
    image = np.zeros((height, width, 3), np.uint8)
    image[box[1] : box[3], box[0] : box[2]] = 255

    def predict(images_B3HW):
        assert images_B3HW.shape == (1, 3, *size) and images_B3HW.dtype == np.float32
        ys, xs = np.nonzero(images_B3HW[0, 0] > 127)
        edges = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        beyond = [-50, -50, 2 * size[1], 2 * size[0]]
        rows = [[1, 0.5, *beyond], [0, 0.9, *edges]]
        return [np.array(rows, np.float32)]

    rows_R6 = detect(predict, image, size, resize)
    pixel = max(width / size[1], height / size[0])
    np.testing.assert_allclose(rows_R6[0, 2:], box, atol=1.01 * pixel)
    assert rows_R6[1, 2:].tolist() == [0, 0, width, height], "boxes are cut at the image's border"


def test_prepare_gives_what_evaluation_sees():
    image = np.random.RandomState(0).randint(0, 256, (48, 64, 3)).astype(np.uint8)
    for resize in ("stretch", "letterbox"):
        expected = resize_for_evaluation(image, (96, 96), resize)
        np.testing.assert_array_equal(prepare(image, (96, 96), resize).transpose(1, 2, 0), expected)


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
def test_infer_yml_describes_resize_and_inverse(tmp_path, resize):
    write_coco(tmp_path, 4)
    file = tmp_path / "cfg.yml"
    file.write_text(
        f"data: {{root: {tmp_path}, train: {{annotations: set.json}}, "
        f"val: {{annotations: set.json}}, resize: {resize}}}\n"
        f"model: {{name: ppyoloe, num_classes: 3, image_size: [320, 320]}}\n",
        encoding="utf-8",
    )
    config = load_config(str(file), [])
    write_spec(tmp_path, describe(config, read_split(config.data, "val", 3)))
    section = read_spec(tmp_path).resize
    assert section.mode == resize
    assert section.interpolation == ("linear" if resize == "letterbox" else "cubic")
    assert section.fill == (GREY if resize == "letterbox" else None)
    left, top, right, bottom = fit_image(640, 480, (320, 320), resize).target
    names = {"image_width": 640, "image_height": 480, "input_width": 320, "input_height": 320}
    names |= {"left": left, "top": top, "wide": right - left, "tall": bottom - top}
    for corner, expected in (((left, top), (0, 0)), ((right, bottom), (640, 480))):
        x, y = eval(section.map_back, {}, {**names, "x": corner[0], "y": corner[1]})
        assert (x, y) == expected
