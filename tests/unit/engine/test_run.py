"""What a training is made of, before it begins."""

import pytest

from ppdist.common.errors import WeightsError
from ppdist.engine.recipe import TrainOptions
from ppdist.engine.run import plan_training


def test_absent_weights_are_told_before_the_data_are_read(tmp_path):
    options = TrainOptions(model="yolov5n", weights="yolov5n_cocoo")
    with pytest.raises(WeightsError) as caught:
        plan_training(data=tmp_path / "set", config=None, options=options, overrides=[])
    assert caught.value.code == "weights_not_found"
    assert "yolov5n_coco" in (caught.value.fix or "")
