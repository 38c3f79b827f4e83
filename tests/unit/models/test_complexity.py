"""How large a model is."""

import numpy as np
import paddle
import pytest

from ppdist.engine.build import build_model
from ppdist.models import complexity as counting
from ppdist.models.base import ImageModel
from ppdist.models.complexity import complexity
from tests.unit.engine.tiny import tiny_config


def test_one_pass_counts_parameters_and_operations():
    class Known(ImageModel):
        def __init__(self):
            super().__init__(1, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
            self.conv = paddle.nn.Conv2D(3, 5, 3, padding=1)

        def normalize(self, images):
            return images.astype("float32")

        def forward(self, images):
            return paddle.nn.functional.relu(self.conv(images))

    found = complexity(Known())
    assert (found.parameters, found.operations) == (5 * 3 * 9 + 5, (0, 2 * 5 * 3 * 9))


@pytest.mark.parametrize("family", ["ppyoloe", "yolov5", "yolov5_cls"])
def test_a_small_image_is_enough_and_nothing_changes(family, tmp_path, monkeypatch):
    model = build_model(tiny_config(tmp_path, model=family))
    model.train()
    model.sublayers()[3].eval()
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    paddle.seed(3)
    expected = paddle.rand([4]).numpy()
    paddle.seed(3)
    small = complexity(model)
    assert (paddle.rand([4]).numpy() == expected).all()
    assert modes == [layer.training for layer in model.sublayers(include_self=True)]
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[key])
    monkeypatch.setattr(counting, "_SIDE", 8)
    large = complexity(model)
    assert small.operations.fixed == 0
    assert large.operations.pixel == pytest.approx(small.operations.pixel, rel=0.1)
