"""Images that cannot be used: all ranks add them to their blocklist, and one line names them."""

from collections.abc import Mapping, Sequence

from ppdist.common.run_log import RunLog
from ppdist.data.types import Batch
from ppdist.engine.data import Blocklist
from ppdist.engine.step_policy import StepPolicy, Verdict


class BadImages(StepPolicy):
    """The policy that adds the unusable images found by any rank to the blocklist of all ranks."""

    votes = ("bad_images",)

    def __init__(self, blocklist: Blocklist, log: RunLog) -> None:
        self._blocklist = blocklist
        self._log = log
        self._met: dict[int, str] = {}  # by this rank in this step, not in the blocklist yet
        self._met_somewhere = False

    def vote(self, batches: Sequence[Batch]) -> Mapping[str, float]:
        reasons = self._blocklist.reasons
        self._met = {
            position: reason
            for batch in batches
            for position, reason in batch.bad_images.items()
            if position not in reasons
        }
        return {"bad_images": len(self._met)}

    def verdict(self, totals: Mapping[str, float]) -> Verdict:
        self._met_somewhere = totals["bad_images"] > 0
        return Verdict.APPLY

    def after_update(self, step: int, verdict: Verdict, synchronised: bool) -> None:
        """Warns of new unusable images.  Collective.

        Raises: DataError, on every rank: there are too many.
        """
        # Reset here, because a skipped step has no vote that would reset it.
        has_new, self._met_somewhere = self._met_somewhere, False
        if not has_new:
            return
        for line in self._blocklist.add(self._met):
            self._log.warning(f"unusable image, substituted by another: {line}")
        count = len(self._blocklist.reasons)
        self._log.metrics({"step": step + 1, "bad_images": count})
