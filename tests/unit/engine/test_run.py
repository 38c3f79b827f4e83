"""What a training is made of, before it begins."""

from ppdist.engine.recipe import TrainOptions
from ppdist.engine.run import plan_training
from tests.errors import raises


def test_absent_weights_are_told_before_the_data_are_read(tmp_path):
    options = TrainOptions(model="yolov5n", weights="yolov5n_cocoo")
    with raises("weights_not_found") as caught:
        plan_training(data=tmp_path / "set", config=None, options=options, overrides=[])
    assert "yolov5n_coco" in (caught.value.fix or "")
