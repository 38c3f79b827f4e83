"""Cells of a study: a setting and a seed each."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppdist.config.study import StudyConfig, item_of


@dataclass(frozen=True)
class Cell:
    """One training of a study.

    Attributes:
        variant: "" in a study without variants.
        variant_overrides: what it changes; its name alone does not say.
        params: key -> value, as the configuration takes it.
        seed: of training; None: that of the configuration.
    """

    variant: str = ""
    variant_overrides: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def setting(self) -> str:
        """What it is, but for the seed, in words: what calibration and tables go by."""
        values = ", ".join(f"{key}={_short(value)}" for key, value in self.params.items())
        return ": ".join(part for part in (self.variant, values) if part) or "base"

    @property
    def label(self) -> str:
        return self.setting + ("" if self.seed is None else f", seed {self.seed}")

    def key(self) -> str:
        """Tells it from every other trial of a grid."""
        return json.dumps(self.record(), sort_keys=True)

    def overrides(self, study: StudyConfig) -> list[str]:
        """All of `-o` but its length and its folder."""
        items = [*study.overrides, *self.variant_overrides]
        items += [item_of(key, value) for key, value in self.params.items()]
        return items + ([] if self.seed is None else [f"seed={self.seed}"])

    def record(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "variant_overrides": list(self.variant_overrides),
            "params": dict(self.params),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Cell":
        """The cell of such a record."""
        changes = tuple(record["variant_overrides"])
        return cls(record["variant"], changes, record["params"], record["seed"])


def grid(study: StudyConfig) -> list[Cell]:
    """Every cell of a grid, all settings of the first seed first: a study that ends early has
    compared everything."""
    points = itertools.product(*(dimension.values() for dimension in study.space.values()))
    params = [dict(zip(study.space, point)) for point in points]
    return [
        Cell(variant, tuple(changes), point, seed)
        for seed in study.seeds or (None,)
        for variant, changes in (study.variants or {"": ()}).items()
        for point in params
    ]


def baseline(study: StudyConfig, cell: Cell) -> str:
    """The setting that a cell is compared with: the first of a grid, unless `baselines` names
    another variant; "" where nothing is."""
    if study.sampler != "grid":
        return ""
    if cell.variant in study.baselines:
        return Cell(study.baselines[cell.variant], params=cell.params).setting
    return grid(study)[0].setting


def timed_by(study: StudyConfig, cell: Cell) -> str:
    """The setting whose calibration says how long a cell is."""
    return Cell(study.costs_like.get(cell.variant, cell.variant), params=cell.params).setting


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')
