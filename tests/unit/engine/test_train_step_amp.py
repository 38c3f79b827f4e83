"""Loss scaling and float32 gradients of AMP, as far as a CPU can run them."""

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.engine.precision import Precision
from ppdist.engine.train_step import StepSettings, TrainStep
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel
from ppdist.optim.exchange import DuringBackward
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.updater import Updater
from tests.distributed import run_on_ranks
from tests.unit.engine.amp import RecordingOptimizer, enable_scaling
from tests.unit.engine.tiny import init_cpu, take_step

RATES = LearningRates(lr=0.1, bias_lr=0.1, momentum=0.9)


class Scale(ImageModel):
    """y = w * mean of each image, w in bfloat16 and computed in float32."""

    def __init__(self) -> None:
        super().__init__(1, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.w = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.to(dtype="bfloat16")

    def normalize(self, images_B3HW):
        return images_B3HW.astype("float32")

    def forward(self, images_B3HW):
        return self.w.astype("float32") * images_B3HW.mean([1, 2, 3])


class Total(Loss):
    def forward(self, outputs_B, boxes_BM4, labels_BM, mask_BM, step, global_normalizers=None):
        return LossOutput(outputs_B.sum(), paddle.to_tensor(float(len(outputs_B))), {})


def batch(value: float) -> Batch:
    image = paddle.full([1, 3, 2, 2], value)
    empty = paddle.zeros([1, 1])
    return Batch(image, paddle.zeros([1, 1, 4]), *[empty] * 5, seeds_B=np.zeros(1, int))


def build() -> tuple[TrainStep, RecordingOptimizer]:
    model = Scale()
    optimizer = RecordingOptimizer(model.w)
    step = TrainStep(
        model, Total(), Updater(optimizer, model), DuringBackward(),  # as on GPUs
        Precision(), [], StepSettings(seed=0),
    )  # fmt: skip
    return step, optimizer


def test_overflow_halves_loss_scale(record_property):
    init_cpu()
    step, optimizer = build()
    enable_scaling(step.precision.scaler)
    paddle.amp.auto_cast(enable=False, dtype="float16").__enter__()  # what scale() looks at
    scales = []
    for number, value in enumerate((2.0, float("inf"), float("inf"), 4.0)):
        result = take_step(step, [batch(value)], number, RATES)
        assert result.applied == (value < 5)
        scales.append(step.precision.loss_scale)
    assert scales == [1024.0, 512.0, 256.0, 256.0]
    record_property("figure", "1024 to 256 by two overflows")
    assert optimizer.gradients == pytest.approx([2.0, 4.0])  # unscaled


def test_high_loss_scale_is_no_fault_until_below_one():
    init_cpu()
    step, _ = build()
    enable_scaling(step.precision.scaler)
    paddle.amp.auto_cast(enable=False, dtype="float16").__enter__()

    def searching(value, scale):
        state = step.precision.scaler.state_dict()
        step.precision.scaler.load_state_dict({**state, "scale": np.array([scale], "float32")})
        result = take_step(step, [batch(value)], 0, RATES)
        assert not result.applied
        return result.searching

    assert searching(1e15, 2.0**80)  # the scaled gradient overflows, the loss does not
    assert searching(1e30, 2.0)  # 1 from here on
    assert not searching(1e30, 1.0)
    assert not searching(float("inf"), 1024.0)


def accumulate(argument):
    init_cpu()
    step, optimizer = build()
    rank = comm.rank()
    for number in range(2):
        micro = [batch(1.0 + rank), batch(3.0 + rank)]
        take_step(step, micro, number, RATES)
    return optimizer.gradients


def test_two_ranks_accumulate_amp_update_float32():
    expected = [(1 + 3 + 2 + 4) / 4] * 2
    assert run_on_ranks(2, "tests.unit.engine.test_train_step_amp:accumulate") == [
        expected,
        expected,
    ]
