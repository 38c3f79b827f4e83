"""Plots of a study: what its settings measured over time, and what decides about the value."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ppdist.plots.style import COLOURS, DASHES, as_written, legend

_MOST_NAMED = 12  # settings; of more, as in a search, each is a thin line without a name
_POINTS = 50


def curves(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The metric of each setting over its run: the mean of its seeds, and between least and most.

    Runs of unequal length are drawn over their share that is done, because studies of equal time
    give fast settings more epochs.
    """
    settings: dict[str, list[np.ndarray]] = {}
    for row in rows:
        if row["state"] != "fail" and len(row["curve"]) > 1:
            settings.setdefault(row["setting"], []).append(np.array(row["curve"], np.float64))
    if not settings:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    named = len(settings) <= _MOST_NAMED
    lengths = {round(curve[-1, 0], 3) for found in settings.values() for curve in found}
    in_shares = len(lengths) > 1 and named
    styles = cycle([(colour, dash) for dash in DASHES for colour in COLOURS])
    for (name, found), (colour, dash) in zip(settings.items(), styles):
        if not named:
            for curve in found:
                axes.plot(curve[:, 0], curve[:, 1], color=COLOURS[0], alpha=0.4, linewidth=0.8)
            continue
        x, values = _over_run(found, in_shares)
        axes.plot(x, values.mean(0), dash, color=colour, label=f"{name} ({len(found)})")
        if len(found) > 1:
            axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15)
    axes.set_xlabel("share of the run" if in_shares else "epoch")
    axes.set_ylabel(str(rows[0]["metric"]))
    axes.grid(alpha=0.25)
    legend(axes, fontsize="small")
    as_written(axes.set_title(str(rows[0]["study"])))
    return figure


def _over_run(found: Sequence[np.ndarray], in_shares: bool) -> tuple[np.ndarray, np.ndarray]:
    """Places, and the values of each curve there, between its first and its last evaluation."""
    placed = [curve[:, 0] / (curve[-1, 0] if in_shares else 1.0) for curve in found]
    first, last = max(each[0] for each in placed), min(each[-1] for each in placed)
    x = np.linspace(min(first, last), last, _POINTS)
    return x, np.stack([np.interp(x, at, curve[:, 1]) for at, curve in zip(placed, found)])


def importance(importances: Mapping[str, float]) -> Figure | None:
    """How much each key decides, the most important above."""
    if not importances:
        return None
    ordered = sorted(importances.items(), key=lambda item: item[1])
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(ordered)), [value for _, value in ordered], color=COLOURS[0])
    axes.set_yticks(range(len(ordered)), [key for key, _ in ordered])
    as_written(*axes.get_yticklabels())
    axes.set_xlabel("importance for the best tenth of the complete trials (PED-ANOVA)")
    axes.grid(axis="x", alpha=0.25)
    return figure
