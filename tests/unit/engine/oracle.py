"""Five images, their batches, and models that know what is in them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import paddle

from ppdist.config.evaluate import NMSConfig
from ppdist.data.types import Batch, DetectionSet, ImageRecord
from ppdist.engine.evaluator import ClassificationEvaluator, Evaluator
from ppdist.models.base import Detector, ImageModel
from tests.unit.data.classified import classified_set

IMAGES, CLASSES = 5, 2
HEIGHT, WIDTH = 32, 64  # input; originals are 320 x 256 (y, x), so the scales are 0.1 and 0.25
ZOOM = 8  # with which pictures of so small inputs are drawn
SCALE_YX = (0.1, 0.25)


def five_images() -> DetectionSet:
    """Image i has i objects; the first has none."""
    records = []
    for index in range(IMAGES):
        corner = np.array([[10.0 + 40 * k, 20 + 60 * k] for k in range(index)]).reshape(-1, 2)
        boxes_M4 = np.concatenate([corner, corner + np.array([32, 50])], axis=1).astype(np.float32)
        records.append(
            ImageRecord(
                path=f"/images/{index}.jpg",
                image_id=100 + index,
                width=256,
                height=320,
                boxes_M4=boxes_M4,
                labels_M=np.arange(index) % CLASSES,
                crowd_M=np.zeros(index, bool),
                area_M=np.full(index, 1600, np.float32),
            )
        )
    return DetectionSet(
        records=tuple(records), class_names=("cat", "dog"), category_ids=(1, 2), source="test"
    )


class Loader:
    """Rank r's images r, r+W, ... in batches of 2, the last filled up with padding.

    Every pixel of image i is i, which is how the models below know what they look at.
    """

    def __init__(self, dataset: DetectionSet, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.indices), 2):
            index_B = [*self.indices[start : start + 2], -1][:2]
            boxes_BM4 = np.zeros((2, IMAGES, 4), np.float32)
            labels_BM, mask_BM = np.zeros((2, IMAGES), np.int64), np.zeros((2, IMAGES), np.float32)
            for row, index in enumerate(index_B):
                record = self.dataset.records[index]
                count = len(record.labels_M) if index >= 0 else 0
                boxes_BM4[row, :count] = record.boxes_M4[:count] * np.array(SCALE_YX[::-1] * 2)
                labels_BM[row, :count] = record.labels_M[:count]
                mask_BM[row, :count] = 1
            pixels = np.array(index_B).clip(0).astype(np.uint8)
            images = np.broadcast_to(pixels[:, None, None, None], (2, 3, HEIGHT, WIDTH))
            yield Batch(
                images_B3HW=paddle.to_tensor(images.copy()),
                boxes_BM4=paddle.to_tensor(boxes_BM4),
                labels_BM=paddle.to_tensor(labels_BM),
                mask_BM=paddle.to_tensor(mask_BM),
                image_index_B=paddle.to_tensor(np.array(index_B, np.int64)),
                scale_B2=paddle.to_tensor(np.array([SCALE_YX] * 2, np.float32)),
                offset_B2=paddle.zeros([2, 2]),
                seeds_B=np.zeros(2, int),
            )


class SeesNumbers(ImageModel):
    """Gives the number of each image; notes the mode of each forward pass."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.norm = paddle.nn.BatchNorm2D(3)
        self.modes: list[bool] = []

    def forward(self, images_B3HW):
        self.modes.append(self.norm.training)
        self.norm(images_B3HW)
        return images_B3HW.mean(axis=[1, 2, 3])


class Oracle(SeesNumbers, Detector):
    """Finds what is there, surest first, and a wrong box at the end."""

    def __init__(self, dataset: DetectionSet) -> None:
        super().__init__(CLASSES, (32,))
        self.dataset = dataset
        self.frozen = paddle.nn.BatchNorm2D(3)
        self.frozen.eval()

    def decode(self, outputs):
        scores_BNC = np.zeros((len(outputs), IMAGES, CLASSES), np.float32)
        boxes_BN4 = np.zeros((len(outputs), IMAGES, 4), np.float32)
        for row, index in enumerate(outputs.numpy().round().astype(int)):
            record = self.dataset.records[index]
            for k, (box, label) in enumerate(zip(record.boxes_M4, record.labels_M)):
                scores_BNC[row, k, label] = 0.9 - 0.1 * k - 0.01 * index
                boxes_BN4[row, k] = box * np.array(SCALE_YX[::-1] * 2)
            scores_BNC[row, IMAGES - 1, 0] = 0.2  # hangs over the right and lower edge
            boxes_BN4[row, IMAGES - 1] = [50, 28, 90, 50]
        return paddle.to_tensor(scores_BNC), paddle.to_tensor(boxes_BN4)


def evaluator(indices=range(IMAGES), **options) -> Evaluator:
    dataset = five_images()
    return Evaluator(dataset, Loader(dataset, indices), NMSConfig(), **options)


class Damaged(Loader):
    """The third image of the five cannot be read."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            index_B = batch.image_index_B.numpy()
            if 2 not in index_B:
                yield batch
                continue
            index_B = [index for index in index_B.tolist() if index not in (2, -1)]
            others = next(iter(Loader(self.dataset, index_B or [-1])))
            yield replace(others, bad_images={2: "cut short"})


def damaged_evaluator(indices=range(IMAGES)) -> Evaluator:
    dataset = five_images()
    return Evaluator(dataset, Damaged(dataset, indices), NMSConfig())


NAMES = tuple("abcdefg")


class Lookup(SeesNumbers):
    """Image i is of class i, which comes i-th: images 0 is right, 0 to 4 are among five."""

    def __init__(self) -> None:
        super().__init__(len(NAMES), 32)

    def decode(self, outputs):
        """Class c of image i: higher scores for smaller c, so that class i has i above it."""
        scores_C = np.linspace(0.7, 0.1, len(NAMES)).astype(np.float32)
        return paddle.to_tensor(np.repeat(scores_C[None], len(outputs), axis=0))


def classification_evaluator(indices=range(IMAGES), **options) -> ClassificationEvaluator:
    dataset = classified_set([*range(IMAGES)], NAMES)
    return ClassificationEvaluator(dataset, Loader(dataset, indices), **options)
