"""bad_steps.jsonl: the images of skipped steps."""

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ppdist.common.files import append
from ppdist.common.run_log import RunLog
from ppdist.distributed import comm
from ppdist.engine.data import BatchSource

_SHOWN = 8  # images, or ranks, in a message
_BAD_STEPS = "bad_steps.jsonl"


class BadSteps:
    """The record of a run's skipped steps in bad_steps.jsonl, for finding their cause."""

    def __init__(self, folder: Path, batch_source: BatchSource, log: RunLog) -> None:
        """Args: folder: output_dir of the run."""
        self._folder = folder
        self._batch_source = batch_source
        self._log = log

    def add(
        self, step: int, reason: str, images: list[int], loss: float, not_finite: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Adds a skipped step with its images.  Collective.

        Records the images of the ranks where a term was not finite, or of all ranks if no rank has
        such a term.

        Args:
            reason: why the step was skipped.
            images: positions in the set of this rank's images.
            loss: this rank's loss, summed over these images.
            not_finite: see `StepResult.own_not_finite`.
        Returns: texts for a message: the first images; the terms that were not finite, with their
            ranks.
        """
        # As text, because JSON has neither NaN nor infinity.
        own_loss = loss if math.isfinite(loss) else f"{loss}"
        images_W = comm.all_gather_large_object([own_loss, images, not_finite, comm.host()])
        lines = [
            {
                "time": round(time.time(), 3),
                "step": step,
                "rank": rank,
                "why": reason,
                "not_finite": terms,
                "loss": loss,
                "images": [self._batch_source.path(index) for index in indices],
            }
            for rank, (loss, indices, terms, _) in enumerate(images_W)
        ]
        lines = [line for line in lines if line["not_finite"]] or lines
        if comm.is_main():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            self._log.put(_BAD_STEPS, partial(append, self._folder / _BAD_STEPS, text.encode()))
        paths = [path for line in lines for path in line["images"]]
        first_images = ", ".join(paths[:_SHOWN]) + (
            f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN)
        )
        return first_images, _describe_terms([(terms, host) for *_, terms, host in images_W])

    @property
    def path(self) -> str:
        """Returns the path of the file; its name contains the host if there are several hosts."""
        several = len({*comm.addresses()}) > 1
        return f"{self._folder / _BAD_STEPS}" + f" on host {comm.host()}" * several


def _describe_terms(terms_W: Sequence[tuple[Sequence[str], str]]) -> str:
    """Describes terms and the ranks where they were not finite: `loss on rank 1 (host a)`.

    Args: terms_W: for each rank, its terms that were not finite, and its host.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, (terms, _) in enumerate(terms_W):
        for term in terms:
            ranks_of.setdefault(term, []).append(rank)
    if not ranks_of:
        return "the norm of the gradient, though each rank's own gradient is finite"
    if len(terms_W) == 1:
        return ", ".join(ranks_of)
    hosts_W = [host for _, host in terms_W]
    return "; ".join(
        f"{term} on {comm.ranks_named(ranks[:_SHOWN], hosts_W)}"
        + f" and {len(ranks) - _SHOWN} more" * (len(ranks) > _SHOWN)
        for term, ranks in ranks_of.items()
    )
