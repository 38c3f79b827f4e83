"""Images that cannot be used: counted on all ranks, named once."""

from collections.abc import Mapping, Sequence

from ppdist.common.run_log import RunLog
from ppdist.data.types import Batch
from ppdist.engine.data import Blocklist
from ppdist.engine.step_policy import StepPolicy, Verdict


class BadImages(StepPolicy):
    """Adds to the blocklist of all ranks what single ranks meet."""

    votes = ("bad_images",)

    def __init__(self, blocklist: Blocklist, log: RunLog) -> None:
        self._blocklist = blocklist
        self._log = log
        self._met: dict[int, str] = {}  # by this rank in this step, and not known
        self._met_somewhere = False

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        known = self._blocklist.known
        self._met = {
            position: reason
            for batch in batches
            for position, reason in batch.bad_images.items()
            if position not in known
        }
        return {"bad_images": len(self._met)}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        self._met_somewhere = totals["bad_images"] > 0
        return Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Names new ones.  Collective; this rank's loader has already warned of its own.

        Raises: DataError, on every rank: too many.
        """
        met, self._met_somewhere = self._met_somewhere, False  # a step left out has no verdict
        if not met:
            return
        for line in self._blocklist.add(self._met):
            self._log.warning(f"unusable image, substituted by another: {line}")
        count = len(self._blocklist.known)
        self._log.metrics({"step": step + 1, "bad_images": count})
