"""Ranks whose memory does not hold a micro-batch: how it shows, and what the next attempt knows."""

import contextlib
import json
import math
import os
from pathlib import Path

from ppdist import dist
from ppdist.errors import JOB_DIR_VARIABLE, ConfigError

_FILE = "out_of_memory.json"


def parts_of(batch_size: int, most_images: int | None) -> int:
    """In how many parts micro-batches must come so that none has more than `most_images`; None: 1.

    A power of two, so that halving again halves the parts there are.
    """
    parts = 1
    while most_images is not None and math.ceil(batch_size / parts) > max(1, most_images):
        parts *= 2
    return parts


def halved(batch_size: int, parts: int, step: int, ranks: str) -> int:
    """The most images of a micro-batch from now on, where some rank has no memory for them all.

    Args:
        step: for the message, from 1.
        ranks: who had none, for the message.
    Raises: ConfigError: it has one image already.
    """
    images = math.ceil(batch_size / parts)
    if images == 1:
        raise ConfigError(
            f"{ranks} ran out of memory with one image at a time",
            code="no_image_fits",
            where=f"step {step}",
            fix=(
                "lower model.image_size (or train.multi_scale), data.workers, or take a smaller "
                "model"
            ),
        )
    return math.ceil(images / 2)


def note(most_images: int) -> None:
    """Leaves for the next attempt of this job that micro-batches must be smaller.

    For a rank that ran out of memory where it cannot tell the others any more.
    """
    folder = os.environ.get(JOB_DIR_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):  # then the next attempt finds out for itself
            text = json.dumps({"most_images": most_images})
            (Path(folder) / _FILE).write_text(text, encoding="utf-8")


def noted() -> int | None:
    """What an attempt of this job before left by `note`, on any host; None: nothing.

    Every rank calls it.
    """
    found, folder = None, os.environ.get(JOB_DIR_VARIABLE)
    if folder:
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = (Path(folder) / _FILE).read_text(encoding="utf-8")
            found = int(json.loads(text)["most_images"])
    return min((most for most in dist.exchange(found) if most is not None), default=None)
