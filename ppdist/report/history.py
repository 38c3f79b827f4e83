"""The history of a run: one row an epoch, from its metrics.jsonl."""

import csv
import math
from pathlib import Path
from typing import Any

from ppdist.common.errors import UserError
from ppdist.common.files import writing
from ppdist.common.records import MetricRecords, Record, read_metrics

_NOT_OURS = {"time": 0}  # keys of a record that are no numbers of an epoch


def history(output_dir: Path) -> list[dict[str, Any]]:
    """What is known of each epoch of a run, in order.

    Works on running trainings, too.  Keys: `epoch`, `step` (its last), the means of `loss` and its
    parts, `lr`, `images_per_second`, `seconds`; and of an evaluation at its end `mAP`, `val_loss`
    and the like.  An epoch with only training or only evaluation records has only those keys.
    Raises: UserError: it is not the folder of a run.
    """
    file = output_dir / "metrics.jsonl"
    try:
        found = MetricRecords.of(read_metrics(file))
    except OSError as error:
        raise UserError(
            f"no history: {error.strerror}; expected the output_dir of a training",
            code="run_not_found",
            where=f"{file}",
        ) from error
    rows: dict[int, dict[str, Any]] = {}
    for record in found.epochs:
        numbers = record["epoch_end"]
        if isinstance(numbers.get("epoch"), int):
            own = {"epoch": numbers["epoch"], "step": record["step"], **numbers}
            rows.setdefault(numbers["epoch"], {}).update(own)
    for record in found.evaluations:
        epoch = _epoch_of(record)
        row = rows.setdefault(epoch, {"epoch": epoch, "step": record["step"]})
        row.update({key: value for key, value in record.items() if key not in row | _NOT_OURS})
    return [rows[epoch] for epoch in sorted(rows)]


def write_history(output_dir: Path, file: Path) -> None:
    """Writes the history as CSV with a header; unknown values are empty."""
    rows = history(output_dir)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with writing(file), file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)


def _epoch_of(evaluation: Record) -> int:
    """The epoch at whose end it was made, or was due."""
    return max(1, math.floor(evaluation.get("epoch", 1) + 0.5))
