"""metrics.jsonl as whoever shows a run reads it: by kind of record, without what was taken back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


@dataclass
class RunRecords:
    """Records by kind, each in the order in which it was written.

    Attributes:
        steps: means over some training steps.
        evaluations: of the whole validation set.
        ranks: seconds of each rank over the same steps as in `steps`.
        starts: with what the run derived; more than one after restarts.
        returns: to earlier weights.
        bad_images: how many images were replaced so far.
        finished: why the run ended; "": it has not, or was started again since.
    """

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    ranks: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    returns: list[Record] = field(default_factory=list)
    bad_images: list[Record] = field(default_factory=list)
    finished: str = ""

    @classmethod
    def of(cls, records: Sequence[Record]) -> "RunRecords":
        """Sorts them; those without a step, or of no known kind, are left out.

        A return to earlier weights takes back what stands before it and lies beyond its step.
        """
        found = cls()
        for record in records:
            if _is_number(record.get("step")):
                found._take(record)
        return found

    def _take(self, record: Record) -> None:
        if isinstance(record.get("derived"), Mapping):
            self.starts.append(record)
            self.finished = ""
        elif isinstance(record.get("finished"), str):
            self.finished = record["finished"]
        elif _is_number(record.get("returned_from_step")):
            self.returns.append(record)
            for kind in (self.steps, self.evaluations, self.ranks):
                kind[:] = [each for each in kind if each["step"] <= record["step"]]
        elif "eval_seconds" in record:
            self.evaluations.append(record)
        elif "rank_step_seconds" in record:
            self.ranks.append(record)
        elif "bad_images" in record:
            self.bad_images.append(record)
        elif "loss" in record:
            self.steps.append(record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; lines cut short by a crash or a full disk are left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also of too many digits, and too deep
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
