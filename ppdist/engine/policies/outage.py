"""Images whose storage stays unavailable: the run ends on all ranks and saves what it learned."""

from collections.abc import Mapping, Sequence

from ppdist.common.errors import StorageError
from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.engine.step_policy import StepPolicy, Verdict


class Outage(StepPolicy):
    """The policy that ends the run on all ranks if some have blank batches instead of images."""

    votes = ("missing_images",)

    def __init__(self) -> None:
        self._reason = ""  # of this rank in this step; "": it has its images
        self._missing = False

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        reasons = [batch.missing for batch in batches if batch.missing is not None]
        self._reason = f"{reasons[0]}" if reasons else ""
        return {"missing_images": bool(reasons)}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        self._missing = totals["missing_images"] > 0
        return Verdict.REPEAT if self._missing else Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Ends the run if images are missing.  Collective.

        Raises: StorageError, on every rank: the images of some rank stay unavailable.
        """
        if not self._missing:
            return
        self._missing = False
        reasons_W = comm.all_gather_large_object([self._reason or None, comm.host()])
        missing_ranks = [rank for rank, (reason, _) in enumerate(reasons_W) if reason is not None]
        ranks = comm.ranks_named(missing_ranks, [host for _, host in reasons_W])
        raise StorageError(
            f"{ranks}: {reasons_W[missing_ranks[0]][0]}",
            code="storage_unreachable",
            fix="then start with --resume (--max_restart does it for you)",
        )
