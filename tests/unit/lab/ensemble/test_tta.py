"""Views of a model: input sizes and mirrored images give boxes of the original."""

import numpy as np
import paddle

from ppdist.config.evaluate import NMSConfig
from ppdist.engine.evaluator import Evaluator
from ppdist.lab.ensemble.tta import Mirrored, scaled_sizes
from ppdist.models.base import Detector
from tests.errors import raises
from tests.unit.engine.oracle import IMAGES, Loader, Oracle, five_images


class Brightest(Detector):
    """Finds the one bright pixel of an image: a box that reaches from it 5 to the right, 3 down."""

    def __init__(self) -> None:
        super().__init__(1, (32,), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.norm = paddle.nn.BatchNorm2D(3)

    def forward(self, images_B3HW):
        return images_B3HW[:, 0].numpy()

    def decode(self, outputs):
        boxes = []
        for image_HW in outputs:
            y, x = np.unravel_index(image_HW.argmax(), image_HW.shape)
            boxes.append([[x, y, x + 5, y + 3]])
        return paddle.ones([len(boxes), 1, 1]), paddle.to_tensor(np.array(boxes, np.float32))


def test_boxes_of_mirrored_views_are_mirrored_back() -> None:
    images = np.zeros((2, 3, 32, 64), np.uint8)
    images[0, :, 4, 10] = images[1, :, 30, 63] = 255
    plain_BN4 = Brightest().predict(paddle.to_tensor(images))[1]
    mirrored_BN4 = Mirrored(Brightest()).predict(paddle.to_tensor(images))[1]
    assert plain_BN4.numpy().tolist() == [[[10, 4, 15, 7]], [[63, 30, 68, 33]]]
    # What it sees to the right of the pixel lies to its left: x1 = 64 - (53 + 5).
    assert mirrored_BN4.numpy().tolist() == [[[6, 4, 11, 7]], [[59, 30, 64, 33]]]


def test_the_evaluator_takes_mirrored_detectors() -> None:
    dataset = five_images()
    model = Oracle(dataset)
    evaluator = Evaluator(dataset, Loader(dataset, list(range(IMAGES))), NMSConfig())
    plain_R7 = evaluator.predict(model)
    model.train()
    seen_R7 = evaluator.predict(Mirrored(model))
    assert model.training and model.norm.training, "the model within has its mode back, too"
    # The images are grey, so the oracle finds the same boxes, which then are mirrored.
    inside = plain_R7[:, 2] != 0.2
    expected_R7 = plain_R7[inside].copy()
    expected_R7[:, [3, 5]] = 256 - plain_R7[inside][:, [5, 3]]
    found = {tuple(row.round(2)) for row in seen_R7.astype(float)}
    assert {tuple(row.round(2)) for row in expected_R7.astype(float)} <= found


def test_sizes_are_multiples_near_the_scales() -> None:
    assert scaled_sizes((256, 320), (0.83, 1, 1.2), 32) == [(224, 256), (256, 320), (320, 384)]
    assert scaled_sizes((64, 64), (0.1,), 32) == [(32, 32)]
    with raises("scales_repeated", "1.01", "256x320"):
        scaled_sizes((256, 320), (1, 1.01), 32)
