"""Steps that fail on one rank: what all ranks do, and that training is what it was."""

import json
import math
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.common.errors import is_out_of_memory
from ppdist.common.job import JOB_DIR_VARIABLE, SKIP_STEP_VARIABLE
from ppdist.distributed import comm
from ppdist.distributed.paddle_api import normalise_by_running, running_statistics
from ppdist.engine.policies import rollback
from ppdist.engine.policies.memory import count_parts
from ppdist.engine.policies.replicas import find_trusted_ranks
from ppdist.engine.precision import Precision
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.runs import (
    assert_same_checkpoint,
    at_step,
    losses,
    records,
    said,
    spoil,
    train,
    weights,
)  # fmt: skip
from tests.unit.engine.tiny import FASTEST, init_cpu

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=4", "log.every_steps=1",
    "checkpoint.every_steps=3", "checkpoint.keep=9", "optimizer.reference_batch_size=8",
    "data.bad_images=error",
)  # fmt: skip
# ten images: three steps an epoch on one rank, two on two


def alone(shapes, folder, *overrides, **options):
    """A run on the ranks of this process; returns the trainer, when it is done."""
    return train(shapes, folder, *OVERRIDES, *overrides, model=FASTEST, **options)[1]


def out_of_memory(trainer, from_images=2, before=True):
    """Batches of so many images do not fit any more, in forward or in backward."""
    model, step = trainer.train_step.model, trainer.train_step

    def fail(layer, inputs, outputs=None):
        if inputs[0].shape[0] >= from_images and layer.training:
            raise MemoryError("(ResourceExhausted) Fail to alloc memory")

    if before:
        return model.register_forward_pre_hook(fail)
    inner = step.precision.scale

    def scale(loss):
        if model.seen >= from_images:
            raise MemoryError("(ResourceExhausted) Fail to alloc memory")
        return inner(loss)

    step.precision.scale = scale
    return model.register_forward_pre_hook(
        lambda layer, inputs: setattr(layer, "seen", inputs[0].shape[0] if layer.training else 0)
    )


def freeze(trainer):
    for layer in trainer.train_step.model.sublayers():
        if isinstance(layer, paddle.nn.BatchNorm2D):
            normalise_by_running(layer)


@paddle.no_grad()
def flip(trainer):
    """One bit of a weight, of a running mean and of a velocity."""
    model = trainer.train_step.model
    mean = next(
        running_statistics(x)[0] for x in model.sublayers() if isinstance(x, paddle.nn.BatchNorm2D)
    )
    velocity = next(iter(trainer.train_step.optimizer.optimizer.state_dict().values()))
    for tensor in (model.parameters()[3], mean, velocity):
        array = np.array(tensor.numpy())
        array.view(np.int32).ravel()[0] ^= 1 << 22
        paddle.assign(paddle.to_tensor(array), tensor)


def two_ranks(argument):
    """Every scenario in one pair of processes, because each start takes seconds."""
    init_cpu()
    shapes, top, me = argument["shapes"], Path(argument["folder"]), comm.rank()
    found = {}

    def run(name, *overrides, before=lambda trainer: None, of=1, **options):
        trainer = alone(
            shapes,
            top / name,
            *overrides,
            before=lambda trainer: (freeze(trainer), before(trainer) if of in (me, None) else None),
            **options,
        )
        ours = np.concatenate([p.numpy().ravel() for p in trainer.train_step.model.parameters()])
        found[name] = [
            float(ours.sum(dtype="float64")),
            trainer.batch_source.parts,
            trainer.state.rollbacks,
        ]

    run("whole")
    # Step 2, and then steps 5 to 7, are not finite on rank 1; step 6 is to be saved amid them, step
    # 3 was before.
    run("nan", before=lambda trainer: spoil(trainer, (1, 4, 5, 6)), of=1)
    short = "train.max_steps=6"
    run("memory", short, before=lambda t: at_step(t, 4, lambda: out_of_memory(t, 2)))
    run(
        "memory in backward",
        short,
        before=lambda t: at_step(t, 4, lambda: out_of_memory(t, 3, False)),
    )
    # Once more when it is made again: then both stay where they are.
    often = "distributed.check_weights_every=2"
    run("flip", short, often, before=lambda t: at_step(t, 4, lambda: flip(t), times=2))
    run("evaluation", short, evaluate=True, of=None, before=break_evaluations)
    return found


def break_evaluations(trainer):
    """That after step 2 once, on rank 1; that after step 4 twice, on rank 0."""
    if comm.rank() == 1:
        hook = trainer.evaluations.model.register_forward_pre_hook(
            lambda *_: (hook.remove(), 1 / 0)
        )
        return
    inner = trainer.evaluations.evaluator.measure

    def measure(found):
        assert trainer.state.step != 4
        return inner(found)

    trainer.evaluations.evaluator.measure = measure


@pytest.fixture(scope="module")
def ranks(shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    argument = {"shapes": str(shapes), "folder": str(folder)}
    first, second = run_on_ranks(
        2, "tests.unit.engine.test_run_policy:two_ranks", argument, seconds=600
    )
    assert first == second  # not a bit apart, after everything
    return folder, first


def log_of(ranks, name):
    return said(ranks[0] / name)


def test_nan_step_is_skipped_and_several_roll_back(ranks):
    folder, found = ranks
    assert found["nan"][2] == 1 and found["whole"][2] == 0
    text = log_of(ranks, "nan")
    bad = records(folder / "nan", "bad_steps.jsonl")
    named = [(line["step"], line["rank"], line["loss"], line["not_finite"]) for line in bad]
    assert named == [(step, 1, "nan", ["loss"]) for step in (2, 5, 6, 7)]
    assert text.count("loss on rank 1") == 4
    assert all(Path(path).is_file() for line in bad for path in line["images"])
    assert "held other weights" not in text  # no rank applied what another left out
    # Nothing was saved amid the bad steps, from which a killed run would go on.
    assert not (folder / "nan" / "checkpoints-old-1").exists()
    rates, whole = (
        [(record["step"], record["lr"]) for record in records(folder / name)
         if "lr" in record]
        for name in ("nan", "whole")
    )  # fmt: skip
    assert rates == whole[:3] + [(step, rate / 2) for step, rate in whole[3:]]
    state = json.loads((folder / "nan/checkpoints/last/state.json").read_text())
    assert (state["step"], state["returns"], state["bad_steps"]) == (8, 1, 0)
    assert all(np.isfinite(value).all() for value in weights(folder / "nan").values())


def test_out_of_memory_rank_splits_steps_on_all(ranks):
    folder, found = ranks
    for name, parts in (("memory", 4), ("memory in backward", 2)):
        assert found[name][1] == parts
        # The same images in the same steps, dealt out otherwise: rounding is all that differs.
        whole = weights(folder / "whole", link="step-00000006")
        for key, value in weights(folder / name).items():
            np.testing.assert_allclose(value, whole[key], rtol=1e-4, atol=1e-5, err_msg=key)
        made = [[*losses(folder / run).values()] for run in ("whole", name)]
        assert made[1] == pytest.approx(made[0][:6], rel=1e-5) and len(made[1]) == 6
        assert made[1][:4] == made[0][:4]
    text = log_of(ranks, "memory")
    assert "step 5: rank 1" in text
    state = json.loads((folder / "memory/checkpoints/last/state.json").read_text())
    assert state["most_images"] == 1


def test_unequal_replicas_are_named_and_roll_back(ranks):
    text = log_of(ranks, "flip")
    assert "step 6: rank 1" in text
    assert text.count("held other weights") == 2  # velocity, too, is then the same
    found = records(ranks[0] / "flip")
    (returned,) = [record for record in found if "returned_from_step" in record]
    assert (returned["step"], returned["returned_from_step"]) == (3, 6)
    assert returned["reason"] == "ranks held different weights"
    assert "held other weights" not in log_of(ranks, "whole")


def test_evaluation_failing_on_one_rank_is_retried(ranks):
    text = log_of(ranks, "evaluation")
    assert "failed, retrying: rank 1" in text
    assert "ZeroDivisionError: division by zero" in text


def test_training_skips_evaluation_that_fails_twice(ranks):
    folder, _ = ranks
    text = log_of(ranks, "evaluation")
    assert text.count("failed, retrying: ") == 2
    assert "skipping this evaluation" in text
    evaluated = [r["step"] for r in records(folder / "evaluation") if "mAP" in r]
    assert evaluated == [2, 6]
    assert_same_checkpoint(folder / "evaluation", folder / "whole", link="step-00000006")


@pytest.mark.slow
def test_rollback_sets_later_best_aside_and_logs_it(shapes, tmp_path):
    def rising(trainer):
        spoil(trainer, (5, 6, 7))
        inner = trainer.evaluations.evaluator.evaluate

        def evaluate(*arguments):
            return {**inner(*arguments), "mAP": float(trainer.state.step)}

        trainer.evaluations.evaluator.evaluate = evaluate
        at_step(
            trainer, 6, trainer.saving.writer.finish
        )  # what still waits to be written is dropped

    short = ("train.max_steps=8", "checkpoint.every_steps=5")
    alone(shapes, tmp_path, *short, before=rising, evaluate=True)
    assert (tmp_path / "checkpoints-old-1" / "best").resolve().name == "step-00000006"
    found = records(tmp_path)
    assert [r["step"] for r in found if "loss" in r] == [*range(1, 9)]
    assert [r["step"] for r in found if "mAP" in r] == [3, 6, 8]


@pytest.mark.slow
def test_vain_rollback_ends_run_and_names_images(shapes, tmp_path):
    with raises("training_diverged") as caught:
        alone(
            shapes, tmp_path, "train.bad_steps_limit=2", before=lambda t: spoil(t, (3, 4), times=9)
        )
    assert "optimizer.lr" in caught.value.fix
    assert len(records(tmp_path, "bad_steps.jsonl")) == 8
    assert json.loads((tmp_path / "checkpoints/last/state.json").read_text())["step"] == 3


def test_a_gradient_that_is_not_finite_does_not_blame_the_rate(shapes, tmp_path, monkeypatch):
    """The loss is finite: which gradient is not, is said instead."""
    monkeypatch.setattr(rollback, "MAX_ROLLBACKS", 0)
    names = []

    def poison(trainer):
        name, parameter = next(iter(trainer.train_step.model.named_parameters()))
        names.append(f"gradient of {name}")
        parameter.register_hook(lambda gradient: gradient * math.nan)

    with raises("training_diverged") as caught:
        alone(shapes, tmp_path, "train.bad_steps_limit=1", before=poison)
    assert "optimizer.lr" not in caught.value.fix and names[0] in str(caught.value)
    (line,) = records(tmp_path, "bad_steps.jsonl")
    assert line["not_finite"] == names and math.isfinite(line["loss"]) and len(line["images"]) == 4


def test_non_finite_images_leave_running_stats_equal(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(Precision, "loss_scale", 0.5)

    def poison(trainer):
        inner = trainer.train_step.model.normalize

        def normalize(images_B3HW):
            factor = math.nan if trainer.state.step == 1 else 1.0
            return inner(images_B3HW) * factor

        trainer.train_step.model.normalize = normalize

    alone(shapes, tmp_path, "train.max_steps=3", before=poison)
    for group in ("model", "ema"):
        assert all(np.isfinite(value).all() for value in weights(tmp_path, group).values())
    assert "train.amp.dtype" in said(tmp_path)


def test_skipped_step_keeps_weights(shapes, tmp_path, monkeypatch):
    alone(shapes, tmp_path / "two", "train.max_steps=2")
    monkeypatch.setenv(SKIP_STEP_VARIABLE, "3")
    trainer = alone(shapes, tmp_path / "three", "train.max_steps=3", evaluate=True)
    left_out = trainer.batch_source.images_of(2, None)
    assert_same_checkpoint(tmp_path / "two", tmp_path / "three")
    (line,) = records(tmp_path / "three", "bad_steps.jsonl")
    assert (line["step"], line["why"], len(line["images"])) == (3, "left out", len(left_out))
    assert (tmp_path / "three/checkpoints/step-00000003").is_dir()  # saved and evaluated as due
    assert [r["step"] for r in records(tmp_path / "three") if "mAP" in r] == [3]


def test_single_image_out_of_memory_is_user_error(shapes, tmp_path):
    with raises("no_image_fits", "1: rank 0"):
        alone(shapes, tmp_path, before=lambda trainer: out_of_memory(trainer, 1))


@pytest.mark.slow
def test_resume_keeps_split_and_takes_smaller_batch(shapes, tmp_path):
    alone(shapes, tmp_path, "train.max_steps=2", before=lambda t: out_of_memory(t, 3))
    assert alone(shapes, tmp_path, "train.max_steps=4", resume=True).batch_source.parts == 2
    smaller = ("train.batch_size_per_card=1", "train.accumulate_steps=4", "train.max_steps=6")
    with raises("resume_batch_differs"):
        alone(shapes, tmp_path, *smaller, resume=True)
    assert alone(shapes, tmp_path, *smaller, resume=True, changed=True).batch_source.parts == 1


def test_gpu_rank_failing_alone_leaves_it_to_restart(shapes, tmp_path, monkeypatch):
    """Within a collective of GPUs, where nobody knows which meetings it missed."""

    def run_out(trainer):
        def call(*arguments):
            raise OSError("(External) CUDNN error(4), CUDNN_STATUS_ALLOC_FAILED")

        trainer.train_step.loss.prepare = call

    job = tmp_path / "job"  # fleetrun's, on this host, from one attempt to the next
    job.mkdir()
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(job))
    alone_it_says = r"step 1: rank 0 \(.*\) ran out of memory; fleetrun --max_restart .* 2 im"
    with pytest.raises(MemoryError, match=alone_it_says):
        recovered_parts(shapes, tmp_path, run_out)
    assert recovered_parts(shapes, tmp_path) == 2
    (log,) = tmp_path.glob("**/train.log")
    assert "in 2 parts" in log.read_text()
    monkeypatch.delenv(JOB_DIR_VARIABLE)  # another job, of someone who has read the message
    assert recovered_parts(shapes, tmp_path) == 1


def recovered_parts(shapes, folder, before=lambda trainer: None):
    return alone(shapes, folder, "train.max_steps=1", before=before).batch_source.parts


def test_what_counts_as_too_little_memory():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(
        OSError("CUBLAS_STATUS_ALLOC_FAILED")
    )
    assert not is_out_of_memory(OSError("No such file")) and not is_out_of_memory(ValueError())
    with pytest.raises(MemoryError):
        paddle.empty([10**14])
    sizes = [count_parts(12, most) for most in (None, 12, 11, 6, 5, 1)]
    assert sizes == [1, 1, 2, 2, 4, 16]


@pytest.mark.parametrize(
    "groups, finite, right, sure",
    [
        ([[0], [1, 2]], [True, True, True], [1, 2], True),  # more than half
        ([[0], [1]], [False, True], [1], True),  # alone finite
        ([[0], [1]], [True, True], [0], False),  # then the lowest rank
        ([[0], [1]], [False, False], [0], False),
        ([[0, 3], [1, 2]], [True] * 4, [0, 3], False),
        ([[0], [1, 2], [3]], [True] * 4, [1, 2], False),
    ],
)
def test_which_of_several_weights_are_taken_for_right(groups, finite, right, sure):
    assert find_trusted_ranks(groups, finite) == (right, sure)


WAYS = {
    "shares of AdamW": ["distributed.shard_optimizer=true", "optimizer={name: adamw, lr: 0.001}"],
    "local SGD": ["distributed.local_sgd_steps=2"],
    "low rank": ["distributed.gradient_rank=2"],
}


def go_back_in_every_way(argument):
    """As test_going_back..., on two ranks and for all that they keep besides weights."""
    init_cpu()
    shapes, top = argument["shapes"], Path(argument["folder"])
    later, first = (
        lambda trainer, steps=steps: spoil(trainer, steps * comm.rank())
        for steps in ((4, 5, 6), (0, 1, 2))
    )  # rank 0 has none of them
    for name, overrides in WAYS.items():
        alone(shapes, top / name / "back", *overrides, before=later)
        alone(shapes, top / name / "resumed", *overrides, "train.max_steps=3")
        alone(shapes, top / name / "resumed", *overrides, before=halve, resume=True)
        alone(shapes, top / name / "start", *overrides, before=first)
        alone(shapes, top / name / "halved", *overrides, before=halve)


def halve(trainer):
    trainer.state.rollbacks = 1


@pytest.mark.slow
def test_going_back_is_resuming_for_all_that_ranks_keep(shapes, tmp_path):
    argument = {"shapes": str(shapes), "folder": str(tmp_path)}
    run_on_ranks(2, "tests.unit.engine.test_run_policy:go_back_in_every_way", argument, seconds=900)
    for name in WAYS:
        assert_same_checkpoint(tmp_path / name / "back", tmp_path / name / "resumed")
        assert_same_checkpoint(tmp_path / name / "start", tmp_path / name / "halved")


@pytest.mark.parametrize("text", ["abc", "0", "3,,4", "-1", "3;4"])
def test_non_numeric_skip_steps_are_user_error(text, shapes, tmp_path, monkeypatch):
    monkeypatch.setenv(SKIP_STEP_VARIABLE, text)
    with raises("skip_step_invalid", "PPDIST_SKIP_STEP=", text):
        alone(shapes, tmp_path)
