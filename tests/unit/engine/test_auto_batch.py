"""`train.batch_size_per_card: auto` and `train.total_batch`: real processes, real limits, all ranks
agree, and a run that goes on takes what it had.
"""

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppdist.common.errors import UserError
from ppdist.common.machine import process_memory
from ppdist.config.augment import AugmentConfig
from ppdist.config.train import MicroBatches
from ppdist.distributed import comm
from ppdist.engine import auto_batch
from ppdist.engine.auto_batch import (
    free_memory,
    max_objects,
    shared_batch,
)
from ppdist.engine.build import build_schedule_setup
from ppdist.engine.changes import Change
from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.continuation import ANEW, Continuation
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.resume import Start, resumed_micro_batches
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.runs import losses, run_to_end, said
from tests.unit.engine.tiny import init_cpu, tiny_config

NEW = Start(ANEW, None, Path(), OutputDirs(Path()))
HERE = "tests.unit.engine.test_auto_batch"
AUTO = (
    "train.batch_size_per_card=auto", "log.every_steps=1", "checkpoint.every_steps=1",
)  # fmt: skip


def train(folder, output, *overrides, resume=False):
    return run_to_end(folder, output, *AUTO, *overrides, resume=resume)


def settled(output):
    return yaml.safe_load((Path(output) / "config.yml").read_text())["train"]


@pytest.mark.slow
def test_auto_batch_is_trained_and_kept_on_resume(shapes, tmp_path, monkeypatch):
    small = ("train.auto_batch_most=3", "train.max_steps=4")
    first = train(shapes, tmp_path / "whole", *small)
    assert first.trainer.schedule.batch_size_per_card == 3
    assert first.trainer.schedule.total_batch == 3
    assert settled(tmp_path / "whole")["batch_size_per_card"] == 3
    assert "auto is 3: " in said(tmp_path / "whole")

    def never(*_, **__):
        raise AssertionError("looked for a batch")

    monkeypatch.setattr(auto_batch, "search", never)
    number = "train.batch_size_per_card=3"
    train(shapes, tmp_path / "parts", number, "train.max_steps=2")
    again = train(shapes, tmp_path / "parts", "train.max_steps=4", resume=True)
    assert again.trainer.schedule.batch_size_per_card == 3
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert "auto is 3, " in said(tmp_path / "parts")
    with raises("resume_batch_differs"):
        train(shapes, tmp_path / "parts", "train.total_batch=9", resume=True)


def under_limits(argument):
    """A run with two steps under an address space of this rank's own; its numbers."""
    init_cpu()

    def limited(ranks_on_host):
        limit = process_memory()["VmSize"] + (argument["MiB"][comm.rank()] << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        auto_batch.free_memory = free_memory
        free = free_memory(ranks_on_host)  # less, so that the real limit stays far
        return {kind: share * 3 // 4 for kind, share in free.items()}

    auto_batch.free_memory = limited
    try:
        found = train(argument["shapes"], argument["output"], *argument["overrides"])
    except UserError as error:
        return f"{error}"
    schedule = found.trainer.schedule
    return [schedule.batch_size_per_card, schedule.batches.images, schedule.total_batch]


def on_two(shapes, output, megabytes, *overrides):
    argument = {
        "shapes": f"{shapes}",
        "output": f"{output}",
        "MiB": megabytes,
        "overrides": [*overrides, "train.max_steps=2", "train.auto_batch_most=2"],
    }
    return run_on_ranks(2, f"{HERE}:under_limits", argument, seconds=300)


@pytest.mark.slow
def test_ranks_train_with_smallest_fitting_batch(shapes, tmp_path):
    more = ("model.image_size=[384,384]", "train.sync_bn=true")
    wide, narrow = on_two(shapes, tmp_path, [8192, 640], *more)
    assert wide == narrow == [1, 2, 2], f"{wide}, {narrow}"
    assert "address space (ulimit -v)" in said(tmp_path)
    assert "of rank 1 (host " in said(tmp_path)
    assert len(losses(tmp_path)) == 2


def test_batch_above_the_set_is_the_set(tmp_path):
    config = tiny_config(tmp_path, ("train.batch_size_per_card=500", "train.accumulate_steps=2"))
    settled, batches, said = auto_batch.resolve_batch_size(config, [], 41, NEW)
    assert settled.train.batch_size_per_card == 21
    assert batches == MicroBatches(42, 21, spread=False)
    assert len(said) == 1 and "21, not 500" in said[0]
    assert auto_batch.resolve_batch_size(settled, [], 41, NEW) == (settled, batches, [])


@pytest.mark.parametrize("batch", [3, "auto"])
def test_hosts_that_go_before_the_first_checkpoint_change_no_step(batch, tmp_path):
    """Of a job that began on 3 ranks and goes on alone."""
    config = tiny_config(tmp_path, [f"train.batch_size_per_card={batch}"])
    begun = {"total_batch": 9, "batch_size_per_card": 3, "micro_batch": 3, "sync_bn": False}
    start = replace(NEW, job="the run", begun=begun | {"world": 3}, notes=[])
    settled, batches, _ = auto_batch.resolve_batch_size(config, [], 41, start)
    assert batches == MicroBatches(9, 3, spread=False)
    assert settled.train.batch_size_per_card == 3
    assert len(start.notes) == 1 and start.notes[0].startswith("ranks: 3 then")


def test_ranks_share_the_micro_batches_of_a_total_batch(tmp_path):
    config = tiny_config(tmp_path, ["train.batch_size_per_card=2", "train.total_batch=24"])
    for world in (1, 4, 5):
        assert config.train.micro_batches(world) == MicroBatches(24, 2, spread=False)
    together = config.train.model_copy(update={"sync_bn": True})
    assert [together.micro_batches(world).images for world in (1, 2, 4, 5, 12)] == [2, 4, 8, 8, 24]
    with raises("batch_indivisible", "24", "5 images"):
        config.train.model_copy(update={"batch_size_per_card": 5}).micro_batches(1)
    with raises("batch_indivisible", "24", "5, its"):
        together.model_copy(update={"batch_size_per_card": 5}).micro_batches(1)
    per_card = "train.batch_size_per_card=2"
    plain = tiny_config(tmp_path, [per_card, "train.accumulate_steps=2"])
    total = tiny_config(tmp_path, [per_card, "train.total_batch=4"])
    assert build_schedule_setup(plain, 10) == build_schedule_setup(total, 10)


def test_micro_steps_that_follow_are_not_given(tmp_path):
    with raises("bad_value", "accumulate_steps: 2"):
        tiny_config(tmp_path, ["train.total_batch=8", "train.accumulate_steps=2"])


def test_what_needs_a_number_says_so(tmp_path):
    config = tiny_config(tmp_path, AUTO)
    with raises("auto_outside_training"):
        config.train.images_per_card  # noqa: B018


@pytest.mark.parametrize(
    ("total", "world", "most", "spread", "expected"),
    [
        (64, 4, 20, False, 16),
        (60, 2, 20, False, 15),
        (64, 3, 16, False, 8),  # 24, 24, 16 images; of 16 they would be 32, 16, 16
        (6, 4, 8, False, 2),
        (7, 2, 8, False, 1),
        (2, 4, 8, False, 1),
        (64, 3, 22, True, 22),  # one of 64: 22, 21, 21
        (64, 3, 16, True, 11),  # two of 32
        (7, 2, 2, True, 1),
    ],
)
def test_auto_takes_a_batch_that_ranks_can_share(total, world, most, spread, expected):
    assert shared_batch(total, world, most, spread) == expected


# Of a checkpoint of 2 ranks x 3 images: what the resumed run has on how many ranks, and what was
# typed since; images of a step and of a micro-batch, or those that need --resume-changed.
RESUMED = [
    (False, 1, {}, (6, 3), True),
    (False, 4, {}, (6, 3), True),
    (True, 4, {}, (6, 6), True),
    (False, 1, {"accumulate_steps": 2}, (6, 3), True),
    (False, 5, {"total_batch": 6}, (6, 3), True),
    (False, 5, {"total_batch": 12}, (12, 3), False),
    (False, 2, {"batch_size_per_card": 1, "accumulate_steps": 3}, (6, 1), False),
    (False, 1, {"batch_size_per_card": 6}, (6, 6), False),
    (True, 1, {"batch_size_per_card": 6}, (6, 6), True),
    (True, 3, {"batch_size_per_card": 2}, (6, 6), True),
    (True, 2, {"batch_size_per_card": 1, "accumulate_steps": 3}, (6, 2), False),
    (True, 2, {"accumulate_steps": 2}, (12, 6), False),
]


@pytest.mark.parametrize(("sync_bn", "world", "typed", "expected", "same"), RESUMED)
def test_resumed_run_keeps_its_micro_batches(
    sync_bn, world, typed, expected, same, tmp_path, monkeypatch
):
    monkeypatch.setattr(comm, "world_size", lambda: world)
    items = {"batch_size_per_card": 3, "sync_bn": sync_bn} | typed
    config = tiny_config(tmp_path, [f"train.{key}={json.dumps(items[key])}" for key in items])
    state = {"total_batch": 6, "world": 2, "micro_batch": 6 if sync_bn else 3, "sync_bn": sync_bn}

    def resumed(changed=False, follows=False):
        of_step = [Change(f"train.{key}", "then", "now") for key in typed]
        start = replace(NEW, continuation=Continuation(changed=changed), of_step=of_step, notes=[])
        start.snapshot, start.warnings = Snapshot(4, {}, state), []
        return resumed_micro_batches(start, config.train, follows), start

    now, start = resumed(changed=True)
    assert (now.total_batch, now.images) == expected
    assert len(start.warnings) == (not same)
    if same:
        now, start = resumed()
        assert (now.total_batch, now.images) == expected and not start.warnings
        assert len(start.notes) == (world != 2) + bool(typed)
        return
    with raises("resume_batch_differs"):
        resumed()
    if "total_batch" not in typed:  # auto, say
        assert resumed(follows=True)[0].total_batch == 6


def test_images_put_together_bring_the_objects_of_all():
    plain, objects_N = AugmentConfig(), [1, 2, 3]
    assert max_objects(objects_N, plain) == 3
    assert max_objects(objects_N, plain.model_copy(update={"mosaic": 1.0})) == 12
    both = plain.model_copy(update={"mosaic": 1.0, "mixup": 0.1})
    assert 18 < max_objects(objects_N, both) <= 24
    every = both.model_copy(update={"cutmix": 0.1, "copy_paste": 0.1})
    assert 24 < max_objects(objects_N, every) <= 39
    assert max_objects([0, 0], plain) == 1
    many_N = np.random.default_rng(0).poisson(7, 5000)
    drawn = max_objects(many_N.tolist(), plain.model_copy(update={"mosaic": 1.0}))
    assert many_N.max() < drawn < 4 * many_N.max()  # four crowded ones hardly ever meet
