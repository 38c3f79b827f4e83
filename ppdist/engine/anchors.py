"""Anchors that fit the boxes of a training set, before a run begins."""

from typing import Any

import numpy as np

from ppdist import dist
from ppdist.config.data import Resize
from ppdist.data.anchors import refit, sizes_in_input
from ppdist.data.sample import DetectionSet
from ppdist.log import RunLog


def better_anchors(
    anchors_LA2: np.ndarray,
    train_set: DetectionSet,
    log: RunLog,
    *,
    image_size: tuple[int, int],
    resize: Resize,
    threshold: float,
    seed: int,
) -> np.ndarray | None:
    """Anchors for boxes that the present ones do not reach, or None; every rank calls it.

    Rank 0 decides for all: the last digit of a logarithm may depend on the processor.

    Args:
        anchors_LA2: the present ones, pixels of an input of `image_size` (height, width).
        resize: `data.resize`.
        threshold: `loss.anchor_threshold`.
    """

    def decide() -> dict[str, Any]:
        wh_N2 = sizes_in_input(train_set, image_size, resize)
        found = refit(wh_N2, anchors_LA2, threshold=threshold, seed=seed)
        better = None if found.anchors_LA2 is None else found.anchors_LA2.tolist()
        return {"anchors": better, "told": found.told}

    decision = dist.on_main(decide)
    log.info(f"anchors: {decision['told']}")
    better = decision["anchors"]
    return None if better is None else np.array(better, np.float32)
