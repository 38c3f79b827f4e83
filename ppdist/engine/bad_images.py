"""Images that turned out bad during training: counted over all ranks, and bounded."""

import math
from collections.abc import Mapping

from ppdist import dist
from ppdist.data.sample import DetectionSet
from ppdist.errors import DataError

_SHOWN = 20


class BadImages:
    """Which training images could not be used, known alike to every rank.

    Attributes:
        known: position in the set's records -> why.
    """

    def __init__(self, dataset: DetectionSet, limit: float) -> None:
        """
        Args:
            dataset: the training set; what a check found unreadable in it counts.
            limit: `data.bad_images_limit`; one image may be bad whatever it says.
        Raises: DataError: these are too many already.
        """
        self.known = dict(dataset.unreadable)
        self._dataset = dataset
        self._limit = limit
        self._stop_at_too_many()

    def meet(self, found: Mapping[int, str]) -> list[str]:
        """Adds what the ranks found; every rank calls it, after a step in which any found one.

        Args:
            found: position -> why, by this rank.
        Returns: a line for each of them all, the same on every rank.
        Raises: DataError, on every rank: they are too many now.
        """
        new: dict[int, str] = {}
        for of_rank in dist.all_gather_objects([*found.items()]):
            new |= {index: why for index, why in of_rank if index not in self.known}
        self.known |= new
        self._stop_at_too_many()
        return [self._line(index) for index in sorted(new)]

    def _line(self, index: int) -> str:
        return f"{self._dataset.records[index].path}: {self.known[index]}"

    def _stop_at_too_many(self) -> None:
        images = len(self._dataset.records)
        allowed = max(1, math.floor(self._limit * images))
        if len(self.known) <= allowed:
            return
        shown = [f"  {self._line(index)}" for index in sorted(self.known)[:_SHOWN]]
        if len(self.known) > _SHOWN:
            shown.append(f"  and {len(self.known) - _SHOWN} more")
        lines = "\n".join(shown)
        raise DataError(
            f"{len(self.known)} of {images} images cannot be used, more than "
            f"data.bad_images_limit: {self._limit:g} allows ({allowed})",
            code="too_many_bad_images",
            where=f"{self._dataset.source}",
            fix=(
                "`tools/data.py check` lists all, its --fix writes a set without them; or raise "
                f"the limit:\n{lines}"
            ),
        )
