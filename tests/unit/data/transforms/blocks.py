"""Samples of a small set."""

from pathlib import Path

from ppdist.data.datasets.build import read_split
from ppdist.data.transforms.pipeline import TrainSamples, reductions
from tests.unit.data.sets import coco_config

STILL = {"distort": 0, "expand": 0, "crop": 0, "flip": 0, "random_interpolation": False}


def samples(root: Path, augment: dict, resize="letterbox", epochs=None, seed=0) -> TrainSamples:
    config = coco_config(root, augment=augment, resize=resize)
    dataset = read_split(config, "train")
    return TrainSamples(
        dataset,
        "skip",
        config.augment,
        seed,
        resize=resize,
        epochs=epochs,
        reductions_N=reductions(dataset, config.augment, (128, 128), resize),
    )
