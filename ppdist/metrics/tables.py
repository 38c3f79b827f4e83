"""An evaluation.json as text: the numbers by size and by class, and the kinds of mistakes."""

from collections.abc import Sequence
from typing import Any

from ppdist.errors import printable

_SIZES = ("small", "medium", "large")
_NAME = 24  # characters of a class name


def tables(evaluation: dict[str, Any]) -> str:
    """All tables that it has content for, one below the other.

    Args:
        evaluation: what `analyse` or `analyse_classes` gave.
    """
    parts = [_table("metric", evaluation["metrics"].items())]
    if "errors" in evaluation:
        parts += [_by_size(evaluation["metrics"]), _mistakes(evaluation)]
    parts.append(_per_class(evaluation["per_class"]))
    return "\n".join(parts)


def _table(head: str, rows: Any, columns: Sequence[str] = ("value",)) -> str:
    """Args: rows: (name, value or values)."""
    lines = [(head, *columns)]
    for name, values in rows:
        several = values if isinstance(values, list | tuple) else [values]
        lines.append((printable(str(name)).replace("\n", " ")[:_NAME], *map(_shown, several)))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], ""])


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _by_size(metrics: dict[str, Any]) -> str:
    rows = [("all", [metrics["mAP"], metrics["AR100"]])]
    rows += [(size, [metrics[f"mAP_{size}"], metrics[f"AR_{size}"]]) for size in _SIZES]
    return _table("size", rows, ("mAP", "AR"))


def _mistakes(evaluation: dict[str, Any]) -> str:
    counts, gain = evaluation["errors"]["counts"], evaluation["errors"]["AP50_gain"]
    rows = [(kind, [count, gain.get(kind)]) for kind, count in counts.items()]
    confidence = evaluation["confusion"]["confidence"]
    return _table("kind", rows, (f"count at {confidence:.3f}", "mAP50 gained without"))


def _per_class(rows: list[dict[str, Any]]) -> str:
    columns = [key for key in rows[0] if key != "name"] if rows else []
    values = ((row["name"], [row[column] for column in columns]) for row in rows)
    return _table("class", values, columns)
