"""Runs of a tiny model from a configuration to the end, and what they leave."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from ppdist.config.distributed import DistributedConfig
from ppdist.cpu.precision import BFLOAT16
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.callbacks import Callback
from ppdist.engine.continuation import Continuation
from tests.unit.engine.tiny import tiny_config


def build_run(
    data,
    output_dir,
    *overrides,
    model="ppyoloe",
    resume=False,
    changed=False,
    extends=False,
    evaluate=False,
    callbacks=(),
    device="cpu",
    kernels=BFLOAT16,
):
    """The experiment of a tiny model; resume may be True (from output_dir) or a path."""
    comm.init(device, DistributedConfig())
    return build_training(
        tiny_config(Path(data), overrides, model),
        output_dir=Path(output_dir),
        evaluate=evaluate,
        resume=Continuation(output_dir if resume is True else resume or None, changed, extends),
        command=["test"],
        callbacks=callbacks,
        kernels=kernels,
    )


def run_to_end(data, output_dir, *overrides, **options):
    """Trains; returns the experiment once it is over."""
    experiment = build_run(data, output_dir, *overrides, **options)
    with experiment.log:
        assert experiment.trainer.fit() == 0
    return experiment


def train(data, output_dir, *overrides, before=lambda trainer: None, **options):
    """Trains, after `before` got the trainer; returns the exit code and the trainer."""
    experiment = build_run(data, output_dir, *overrides, **options)
    with experiment.log:
        before(experiment.trainer)
        return experiment.trainer.fit(), experiment.trainer


class AtStep(Callback):
    """Calls `action` when a step (from 0) begins, the first so many times."""

    def __init__(self, number, action, times=1):
        self.number, self.action, self.left = number, action, times

    def on_step_begin(self, step):
        if step == self.number + 1 and self.left:
            self.left -= 1
            self.action()


def at_step(trainer, number, action, times=1):
    """Adds an AtStep."""
    trainer.callbacks.append(AtStep(number, action, times))


def spoil(trainer, steps, times=1, factor=math.nan):
    """Multiplies the loss of steps (from 0), each so many times."""
    seen = dict.fromkeys(steps, 0)

    def poisoned(loss, arguments, output):
        step = arguments[4]
        if seen.get(step, times) < times:
            seen[step] += 1
            return type(output)(output.total * factor, *output[1:])
        return output

    trainer.train_step.loss.register_forward_post_hook(poisoned)


def weights(output_dir, group="model", link="last"):
    """Arrays of one file of a checkpoint."""
    return load_file(Path(output_dir) / "checkpoints" / link / f"{group}.safetensors")


def records(output_dir, name="metrics.jsonl"):
    """What each line of a file holds."""
    return [json.loads(line) for line in (Path(output_dir) / name).read_text().splitlines()]


def losses(output_dir):
    """The loss by step."""
    return {record["step"]: record["loss"] for record in records(output_dir) if "loss" in record}


def said(output_dir):
    """What a run has told."""
    return (Path(output_dir) / "train.log").read_text(encoding="utf-8")


def assert_same_checkpoint(*folders, link="last"):
    for group in ("model", "ema", "optimizer"):
        first, second = (weights(folder, group, link) for folder in folders)
        assert first.keys() == second.keys()
        assert [key for key in first if not np.array_equal(first[key], second[key])] == []
