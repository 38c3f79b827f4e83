"""One optimizer step against the same step computed by hand in numpy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.config.optimizer import OptimizerConfig
from ppdist.data.types import Batch
from ppdist.engine.clock import Clock
from ppdist.engine.precision import Precision
from ppdist.engine.step_policy import StepPolicy, Verdict
from ppdist.engine.train_step import StepSettings, TrainStep
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel, Targets
from ppdist.optim.exchange import Exchange
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import build_optimizer
from ppdist.optim.updater import Updater
from tests.unit.engine.tiny import init_cpu, take_step

LR, MOMENTUM, CLIP = 0.1, 0.9, 0.5
TARGETS = ("boxes_BM4", "labels_BM", "mask_BM", "seeds_B")


class Plane(ImageModel):
    """y = w x + b of the three channel means x of each image."""

    def __init__(self, weight_3: np.ndarray, bias: float) -> None:
        super().__init__(1, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        self.linear = nn.Linear(3, 1)
        self.linear.weight.set_value(weight_3.reshape(3, 1))
        self.linear.bias.set_value(np.array([bias], "float32"))

    def normalize(self, images_B3HW):
        return images_B3HW

    def forward(self, images_B3HW):
        return self.linear(images_B3HW.mean([2, 3])).flatten()


class HalfSquares(Loss):
    """Sum of y^2 / 2 over the images, divided by their number."""

    def forward(self, outputs_B, boxes_BM4, labels_BM, mask_BM, step, global_normalizers=None):
        total = 0.5 * (outputs_B * outputs_B).sum()
        return LossOutput(total, paddle.to_tensor(float(len(outputs_B))), {})


def batch_of(x_B3: np.ndarray) -> Batch:
    images = paddle.to_tensor(x_B3.reshape(-1, 3, 1, 1)).tile([1, 1, 2, 2])
    boxes, rest = paddle.zeros([len(x_B3), 1, 4]), [paddle.zeros([len(x_B3), 1])] * 5
    return Batch(images, boxes, *rest, seeds_B=np.arange(len(x_B3)))


def step_of(
    model: Plane,
    config: OptimizerConfig,
    clip: float | None = None,
    policies: Sequence[StepPolicy] = (),
) -> TrainStep:
    optimizer = Updater(build_optimizer(model, config, LR, False), model)
    settings = StepSettings(seed=0, clip_norm=clip)
    precision = Precision()
    return TrainStep(model, HalfSquares(), optimizer, Exchange(), precision, policies, settings)


@pytest.mark.parametrize("clip", [None, CLIP])
def test_clipped_momentum_steps_equal_numpy(clip):
    init_cpu()
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=3).astype("float32"), 0.5
    steps = [[rng.normal(size=(images, 3)).astype("float32") for images in (2, 3)] for _ in "123"]
    model = Plane(weight, bias)
    config = OptimizerConfig(name="momentum", momentum=MOMENTUM, nesterov=False, weight_decay=0.0)
    step = step_of(model, config, clip)
    velocity, norms = np.zeros(4), []
    for number, micro_batches in enumerate(steps):
        x_N3 = np.concatenate(micro_batches).astype("float64")
        y_N = x_N3 @ weight + bias
        gradient = np.append(y_N @ x_N3, y_N.sum()) / len(x_N3)
        norm = np.sqrt((gradient**2).sum())
        if clip is not None:
            gradient *= min(1.0, clip / norm)
        velocity = MOMENTUM * velocity + gradient
        weight, bias = weight - LR * velocity[:3], bias - LR * velocity[3]
        rates = LearningRates(lr=LR, bias_lr=LR, momentum=MOMENTUM)
        batches = [batch_of(x_B3) for x_B3 in micro_batches]
        result = take_step(step, batches, number, rates)
        assert result.applied and result.images == 5
        assert result.losses["loss"] == pytest.approx((y_N**2).mean() / 2, rel=1e-5)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-5)  # before clipping
        np.testing.assert_allclose(model.linear.weight.numpy()[:, 0], weight, rtol=1e-5)
        np.testing.assert_allclose(model.linear.bias.numpy(), [bias], rtol=1e-5)
        norms.append(norm)
    assert max(norms) > CLIP and min(norms) != CLIP  # clipping had something to do


class SkipSecond(StepPolicy):
    """Skips every second step, whatever it would have taught."""

    def before_step(self, step, synchronised):
        self.skips = step % 2 == 1

    def verdict(self, totals):
        return Verdict.SKIP if self.skips else Verdict.APPLY


def test_a_policy_can_skip_a_step():
    init_cpu()
    model = Plane(np.ones(3, "float32"), 0.5)
    step = step_of(model, OptimizerConfig(), policies=[SkipSecond()])
    rates, weights = LearningRates(lr=LR, bias_lr=LR, momentum=MOMENTUM), []
    for number in range(3):
        result = step([batch_of(np.ones((2, 3), "float32"))], number, rates, Clock())
        assert (result.applied, result.finite) == (number != 1, True)
        weights.append(model.linear.weight.numpy())
    assert np.array_equal(weights[0], weights[1]) and not np.array_equal(weights[1], weights[2])


def test_a_model_that_takes_targets_gets_them_of_each_batch():
    init_cpu()

    class Asks(Plane):
        takes_targets = True

        def forward(self, images_B3HW, targets):
            asked.append((self.training, targets))
            return super().forward(images_B3HW)

    asked: list[tuple[bool, Targets]] = []
    step = step_of(Asks(np.ones(3, "float32"), 0.5), OptimizerConfig())
    real = batch_of(np.ones((2, 3), "float32"))
    rates = LearningRates(lr=LR, bias_lr=LR, momentum=MOMENTUM)
    result = take_step(step, [real, replace(real, real=False)], 0, rates)
    assert result.applied and [training for training, _ in asked] == [True, False]
    for _, targets in asked:
        assert all(
            getattr(targets, name) is getattr(real, name)
            for name in ("boxes_BM4", "labels_BM", "mask_BM", "seeds_B")
        )


def test_a_weight_that_loses_its_gradient_stays():
    """Paddle's optimizer has a list of those it updates at once, of its first step."""
    init_cpu()

    class Planes(Plane):
        def __init__(self):
            super().__init__(np.ones(3, "float32"), 0.5)
            self.other = nn.Linear(3, 1)
            self.both = True

        def forward(self, images_B3HW):
            mean_B3 = images_B3HW.mean([2, 3])
            other = self.other(mean_B3).flatten() if self.both else 0.0
            return self.linear(mean_B3).flatten() + other

    model = Planes()
    step = step_of(model, OptimizerConfig())
    rates = LearningRates(lr=LR, bias_lr=2 * LR, momentum=MOMENTUM)

    def weights_after_a_step():
        before = [p.numpy() for p in model.parameters()]
        batches = [batch_of(np.ones((2, 3), "float32"))]
        assert take_step(step, batches, 0, rates).applied
        return [not np.array_equal(a, b.numpy()) for a, b in zip(before, model.parameters())]

    assert weights_after_a_step() == [True] * 4
    model.both = False
    for parameter in model.parameters():
        parameter.clear_gradient(False)  # else it has one of zeros
    assert weights_after_a_step() == [True, True, False, False]
    model.both = True
    assert weights_after_a_step() == [True] * 4
