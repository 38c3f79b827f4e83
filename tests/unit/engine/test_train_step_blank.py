"""A rank without an image keeps the others company and changes nothing, whatever its pass gives."""

import hashlib
import math
import tempfile
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.distributed import comm
from ppdist.distributed.paddle_api import running_statistics
from ppdist.engine.train_step import TrainStep
from ppdist.losses.base import LossOutput
from ppdist.optim.exchange import DuringBackward
from ppdist.optim.lr_scheduler import LearningRates
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import (
    FASTEST,
    blank_batch,
    build_step,
    fixed_batch,
    init_cpu,
    norms_of,
    take_step,
    tiny_config,
)

FAMILIES = ("yolov5", "ppyoloe", "rtdetr", "dfine", "yolov5_cls")
STANDING = LearningRates(0.0, 0.0, 0.9)  # the weights stay as they are


def spoil(output: LossOutput) -> LossOutput:
    """Makes everything of it, and of its gradient, not finite."""
    separate = output.separate_loss
    return LossOutput(
        total=output.total * math.nan,
        normalizer=output.normalizer * math.nan,
        parts={name: part * math.nan for name, part in output.parts.items()},
        separate_loss=None if separate is None else spoil(separate),
    )


def train_with_blank(step: TrainStep):
    return take_step(step, [fixed_batch(0, 0, 2), blank_batch()], 0, STANDING)


@pytest.mark.parametrize("model", FAMILIES)
def test_a_blank_image_that_is_not_finite_adds_nothing(model, tmp_path):
    init_cpu()
    step, _ = build_step(tiny_config(tmp_path, [], model), frozen=False)
    expected = train_with_blank(step)
    step.loss.register_forward_post_hook(
        lambda loss, inputs, output: output if step.model.training else spoil(output)
    )
    result = train_with_blank(step)
    assert result.applied and result.own_not_finite == []
    assert result.losses == expected.losses and result.gradient_norm == expected.gradient_norm


def test_activations_beyond_minus_100_of_a_blank_image_add_nothing(tmp_path):
    """Paddle's gradient of SiLU is not a number there, on a CPU."""
    init_cpu()
    step, _ = build_step(tiny_config(tmp_path, [], "yolov5"), frozen=False)
    with paddle.no_grad():
        for norm in norms_of(step.model):
            mean, _ = running_statistics(norm)
            mean.set_value(mean + 1000.0)
    alone = take_step(step, [blank_batch()], 0, STANDING)
    assert alone.applied and alone.gradient_norm == 0.0 and not any(alone.losses.values())
    assert math.isfinite(train_with_blank(step).gradient_norm)


def test_a_gradient_that_is_not_finite_is_named(tmp_path):
    init_cpu()
    step, _ = build_step(tiny_config(tmp_path, [], FASTEST), frozen=False)
    before = {key: value.numpy() for key, value in step.model.state_dict().items()}
    name, parameter = next(
        (name, p) for name, p in step.model.named_parameters() if not p.stop_gradient
    )
    parameter.register_hook(lambda gradient: gradient * math.inf)
    result = take_step(step, [fixed_batch(0, 0, 2)], 0, STANDING)
    assert not result.applied and math.isfinite(result.losses["loss"])
    assert result.own_not_finite == [f"gradient of {name}"]
    for key, value in step.model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[key])


def test_statistics_that_are_not_finite_stop_a_step(tmp_path):
    init_cpu()
    step, _ = build_step(tiny_config(tmp_path, [], FASTEST), frozen=False)
    norm = norms_of(step.model)[0]
    _, variance = running_statistics(norm)
    norm.register_forward_post_hook(
        lambda norm, inputs, output: variance.set_value(variance * math.inf)
    )
    result = take_step(step, [fixed_batch(0, 0, 2)], 0, STANDING)
    assert not result.applied and result.own_not_finite == ["running statistics"]
    assert np.isfinite(variance.numpy()).all()


# Two ranks, of which the second has no image; how batch norm and the exchange work.
WAYS = {
    "own norms": ([], False),
    "exchange inside backward": ([], True),
    "norms of all ranks": (["train.sync_bn=true"], False),
    "norms of all ranks, exchange inside backward": (["train.sync_bn=true"], True),
}


def digest_after_steps(way: str, spoiled: bool) -> str:
    overrides, during_backward = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(Path(folder), overrides, FASTEST)
    step, rates = build_step(config, frozen=False)
    if during_backward:
        step.exchange = DuringBackward()
    if spoiled and comm.rank() == 1:
        step.loss.register_forward_post_hook(lambda loss, inputs, output: spoil(output))
    for number in range(2):
        batch = blank_batch() if comm.rank() else fixed_batch(number, 0, 4)
        result = take_step(step, [batch], number, rates, [comm.rank()])
        assert result.applied and result.images == 4 and result.gradient_norm > 0
    values = [value.numpy().tobytes() for value in step.model.state_dict().values()]
    return hashlib.blake2b(b"".join(values)).hexdigest()


def digests(argument):
    init_cpu()
    return {way: [digest_after_steps(way, spoiled) for spoiled in (False, True)] for way in WAYS}


def test_a_rank_without_images_changes_nothing():
    first, second = run_on_ranks(2, f"{__name__}:digests")
    assert first == second
    for way, (right, spoiled) in first.items():
        assert spoiled == right, way
