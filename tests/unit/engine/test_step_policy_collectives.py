"""Every collective is reached by every rank, whatever a policy does and whichever rank fails."""

import math
import shutil
from pathlib import Path

import paddle
import pytest

from ppdist.common import retry
from ppdist.common.errors import StorageError
from ppdist.common.job import SKIP_STEP_VARIABLE
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import collectives, comm, gathering, store
from ppdist.engine.build import build_training
from ppdist.engine.callbacks import Callback
from ppdist.engine.time_budget import TimeBudget
from tests.distributed import run_on_ranks
from tests.unit.engine.runs import at_step, spoil
from tests.unit.engine.tiny import FASTEST, tiny_config

COLLECTIVES = (
    "all_reduce_sum", "sum_tensors", "mean_tensors", "broadcast_tensors", "all_gather",
    "all_gather_rows", "all_gather_large_object", "all_gather_object", "barrier", "run_on_main",
    "run_on_all_ranks",
)  # fmt: skip


class Steps(Callback):
    """Notes in a record of collectives where a step begins."""

    def __init__(self, record):
        self.record = record

    def on_step_begin(self, step):
        self.record.append(["step", step])


def described(argument):
    """(dtype, shape) of a tensor, or of each of several."""
    tensors = argument if isinstance(argument, list | tuple) else [argument]
    return [[f"{x.dtype}", x.shape] for x in tensors if isinstance(x, paddle.Tensor)]


def watch(patch, record):
    for name in COLLECTIVES:
        modules = [
            module for module in (collectives, gathering, store, comm) if hasattr(module, name)
        ]
        inner = getattr(modules[0], name)

        def call(*arguments, name=name, inner=inner):
            record.append([name, described(arguments[0]) if arguments else []])
            return inner(*arguments)

        for module in modules:
            patch.setattr(module, name, call)


def no_memory(trainer):
    def fail(*_):
        hook.remove()
        raise MemoryError("(ResourceExhausted) Fail to alloc memory")

    hook = trainer.train_step.model.register_forward_pre_hook(fail)


def broken_gradient(trainer):
    parameter = next(p for p in trainer.train_step.model.parameters() if not p.stop_gradient)
    hooks = [parameter.register_hook(lambda gradient: gradient * math.inf)]
    at_step(trainer, trainer.state.step + 1, lambda: hooks.pop().remove())


@paddle.no_grad()
def flip(trainer):
    weight = next(p for p in trainer.train_step.model.parameters() if not p.stop_gradient)
    paddle.assign(weight + 1.0, weight)


def stop(trainer):
    trainer.stop.made = True


def take_images(trainer):
    trainer.saving.output_dir.parent.joinpath(f"data{comm.rank()}", "images").rename(
        trainer.saving.output_dir.parent / f"away{comm.rank()}"
    )


# What rank 1 meets in step 3, which the others do not; and how the run is configured.
CASES = {
    "nothing": (None, []),
    "restarted average": (None, ["train.ema.restart_decay=0.5", "data.augment.plain_epochs=1"]),
    "no memory": (no_memory, []),
    "no memory, local SGD": (no_memory, ["distributed.local_sgd_steps=2"]),
    "a loss that is not finite": (lambda trainer: spoil(trainer, (2,)), []),
    "the same, low rank": (lambda trainer: spoil(trainer, (2,)), ["distributed.gradient_rank=2"]),
    "the same, SyncBN": (lambda trainer: spoil(trainer, (2,)), ["train.sync_bn=true"]),
    "a gradient that is not finite": (broken_gradient, ["train.sync_bn=true"]),
    "rollback": (lambda trainer: spoil(trainer, (2, 3)), ["train.bad_steps_limit=2"]),
    "rollback, sharded": (
        lambda trainer: spoil(trainer, (2, 3)),
        ["train.bad_steps_limit=2", "distributed.shard_optimizer=true"],
    ),
    "other weights": (flip, ["distributed.check_weights_every=3"]),
    "a request to stop": (stop, ["distributed.local_sgd_steps=2", "train.epochs=3"]),
    "no time": (None, ["train.hours=1"]),
    "a step left out": (None, []),
    "no images": (take_images, ["data.workers=0"]),
}


def record_of(name, shapes, folder):
    fault, overrides = CASES[name]
    record, data = [], folder / f"data{comm.rank()}"
    shutil.copytree(shapes, data)
    common = ["train.batch_size_per_card=2", "train.accumulate_steps=2", "train.epochs=2"]
    config = tiny_config(data, [*common, "checkpoint.every_steps=2", *overrides], FASTEST)
    with pytest.MonkeyPatch.context() as patch:
        if name == "a step left out":
            patch.setenv(SKIP_STEP_VARIABLE, "3")
        if name == "no time":
            asked = []
            patch.setattr(TimeBudget, "is_over", lambda *_: asked.append(1) or len(asked) > 2)
        patch.setattr(store, "_timeout", 0.1 if name == "no images" else 60.0)
        patch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.05)
        watch(patch, record)
        experiment = build_training(
            config, output_dir=folder / "output", evaluate=False, command=["test"],
            callbacks=[Steps(record)],
        )  # fmt: skip
        trainer = experiment.trainer
        if fault is not None and comm.rank() == 1:
            at_step(trainer, 2, lambda: fault(trainer))
        try:
            with experiment.log:
                ended = trainer.fit()
        except StorageError as error:
            ended = error.code
    return [*record, ["ended", ended], ["step", trainer.state.step, trainer.state.rollbacks]]


def records(argument):
    comm.init("cpu", DistributedConfig())
    found = {}
    for name in CASES:
        folder = Path(argument["folder"]) / name
        folder.mkdir(exist_ok=True)
        comm.barrier()
        found[name] = record_of(name, Path(argument["shapes"]), folder)
    return found


@pytest.fixture(scope="module")
def ranks(shapes, tmp_path_factory):
    argument = {"shapes": str(shapes), "folder": str(tmp_path_factory.mktemp("collectives"))}
    return run_on_ranks(2, f"{__name__}:records", argument, seconds=300, hosts=1)


@pytest.mark.parametrize("name", CASES)
def test_ranks_reach_the_same_collectives(ranks, name):
    first, second = (rank[name] for rank in ranks)
    assert first == second and len(first) > 20


# How often a step begins, how the run ends, its last step, and its rollbacks.
OUTCOMES = {
    "nothing": (4, 0, 4, 0),
    "no memory": (5, 0, 4, 0),
    "a loss that is not finite": (4, 0, 4, 0),
    "rollback": (6, 0, 4, 1),
    "other weights": (5, 0, 4, 0),
    "a request to stop": (4, 75, 4, 0),
    "no time": (3, 0, 3, 0),
    "no images": (3, "storage_unreachable", 2, 0),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_becomes_of_a_run(ranks, name):
    *record, (_, ended), (_, step, rollbacks) = ranks[0][name]
    begun = sum(entry[0] == "step" for entry in record)
    assert (begun, ended, step, rollbacks) == OUTCOMES[name]
