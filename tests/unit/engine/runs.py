"""Runs of nine steps over ten images, and what they leave."""

import numpy as np
from safetensors.numpy import load_file

from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from tests.unit.engine.tiny import tiny_config

# ten images in batches of four: three steps an epoch, nine in all
OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8",
)  # fmt: skip


def build(data, output_dir, *overrides, resume=None, changed=False, evaluate=False):
    comm.init("cpu", DistributedConfig())
    return build_training(
        tiny_config(data, [*OVERRIDES, *overrides]),
        output_dir=output_dir,
        evaluate=evaluate,
        resume=resume,
        command=["test"],
        resume_changed=changed,
    )


def run(*arguments, **options):
    experiment = build(*arguments, **options)
    with experiment.log:
        assert experiment.trainer.fit() == 0


def assert_same_checkpoint(*folders):
    for group in ("model", "ema", "optimizer"):
        first, second = (
            load_file(folder / "checkpoints" / "last" / f"{group}.safetensors")
            for folder in folders
        )
        assert first.keys() == second.keys()
        assert [key for key in first if not np.array_equal(first[key], second[key])] == []
