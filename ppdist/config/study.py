"""StudyConfig: the trainings of a study, and what compares them.

config: configs/examples/bccd_ppyoloe.yml     what all trials have in common
overrides: [train.epochs=20]
metric: mAP
sampler: grid                                 each of variants x space x seeds once
variants: {plain: [], cosine: [schedule.name=cosine]}
seeds: [0, 1, 2]

sampler: tpe                                  or random: `trials` points of the space
trials: 30
space:
  optimizer.lr: {from: 1e-4, to: 1e-2, log: true}
  train.ema.decay: {choices: [0.99, 0.998]}
pruner: {name: halving, first_epochs: 4, factor: 3}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ppdist.common.errors import ConfigError
from ppdist.config.experiment import load_config
from ppdist.config.parse import Document, parse_config
from ppdist.config.section import Section
from ppdist.config.shipped import find_config
from ppdist.config.yaml import Node, Place, Problem, Reader, problems_error

_MOST_VALUES = 1000  # values of a key in a grid; each is first checked on the experiment


class Dimension(Section):
    """Values of one key: a range of numbers, or choices."""

    low: int | float | None = Field(default=None, alias="from", description="Least value.")
    high: int | float | None = Field(default=None, alias="to", description="Largest value.")
    log: bool = Field(default=False, description="Equal factors are equally likely.")
    step: int | float | None = Field(default=None, gt=0, description="Only low + k * step.")
    choices: tuple[Any, ...] | None = Field(default=None, description="Any values of YAML.")

    @model_validator(mode="after")
    def _check_range(self) -> "Dimension":
        """Refuses dimensions that are neither a range nor choices, or both."""
        ends = (self.low, self.high)
        if self.choices is not None:
            if not self.choices or ends != (None, None) or self.log or self.step:
                raise ValueError("choices: needs at least one value, and no other key")
            return self
        if self.low is None or self.high is None:
            raise ValueError("expected {from: A, to: B} or {choices: [...]}")
        if self.low > self.high:
            raise ValueError(f"from: {self.low} is greater than to: {self.high}")
        if self.log and (self.low <= 0 or self.step):
            raise ValueError("log: needs from > 0, and no step")
        return self

    @property
    def is_integer(self) -> bool:
        """Returns True if all its numbers are integers."""
        numbers = (self.low, self.high, *([self.step] if self.step else []))
        return all(isinstance(number, int) for number in numbers)

    def examples(self, in_grid: bool) -> list[Any]:
        """Returns values to check: all of a grid, else the choices or the ends of the range.

        Raises: ValueError: see `values`.
        """
        if in_grid:
            return self.values()
        return [self.low, self.high] if self.choices is None else list(self.choices)

    def values(self) -> list[Any]:
        """Returns all values, for a grid.

        Raises: ValueError: there are infinitely many, or too many.
        """
        if self.choices is not None:
            return list(self.choices)
        assert self.low is not None and self.high is not None
        step = self.step or (1 if self.is_integer and not self.log else None)
        if step is None:
            raise ValueError("a grid needs {choices: [...]}, or from and to with a step")
        count = int((self.high - self.low) / step + 1e-9) + 1
        if count > _MOST_VALUES:
            raise ValueError(f"{count} values are too many for a grid")
        # 0.1 + 2 * 0.1 is a little more than 0.3.
        numbers = [min(self.low + index * step, self.high) for index in range(count)]
        return [n if isinstance(n, int) else float(f"{n:.12g}") for n in numbers]


class PrunerConfig(Section):
    """Rule by which trials without prospects end early."""

    name: Literal["none", "halving", "median"] = Field(
        default="none",
        description="halving: at first_epochs, first_epochs * factor, ... only the best 1/factor "
        "of those that came so far go on (ASHA, arXiv:1810.05934); median: a trial whose best so "
        "far is worse than the median of the others at the same epoch ends.",
    )
    first_epochs: int = Field(default=1, ge=1, description="No trial ends before this epoch.")
    factor: int = Field(
        default=3, ge=2, description="halving: the share that ends is 1 - 1/factor."
    )
    startup_trials: int = Field(
        default=5, ge=1, description="median: number of trials that first run to their end."
    )


class StudyConfig(Document):
    """A study: what a YAML file of configs/studies/ describes."""

    name: str | None = Field(default=None, description="In tables; null: the name of the file.")
    config: str = Field(
        description="The experiment, relative to the working directory or else to the study's file."
    )
    overrides: tuple[str, ...] = Field(default=(), description="`key=value` of every trial.")
    metric: str = Field(
        default="mAP", description="A number of the evaluation; larger is better, but of val_loss."
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        default="grid",
        description="grid: everything once; tpe: near what did well so far.",
    )
    pruner: PrunerConfig = Field(default=PrunerConfig(), description="Ends hopeless trials.")
    seed: int = Field(default=0, ge=0, description="Of the sampler; training has its own.")
    trials: int | None = Field(
        default=None, gt=0, description="How many; null (grid only): all there are."
    )
    space: dict[str, Dimension] = Field(default={}, description="Keys of the experiment.")
    variants: dict[str, tuple[str, ...]] = Field(
        default={}, description="Name -> overrides that are tried together."
    )
    seeds: tuple[int, ...] = Field(default=(), description="Of training; empty: the config's own.")
    workers: int = Field(default=1, gt=0, description="Trials at a time on one machine.")
    processes: int = Field(default=1, gt=0, description="Of each trial, on a CPU.")

    @classmethod
    def complete(cls, tree: Node) -> Node:
        """Expands `pruner: median`, short for `pruner: {name: median}`."""
        pruner = tree.child("pruner")
        if pruner is None or not isinstance(pruner.value, str) or not isinstance(tree.value, dict):
            return tree
        full = Node({"name": pruner}, pruner.place, pruner.key_place)
        return Node({**tree.value, "pruner": full}, tree.place, tree.key_place)

    @model_validator(mode="after")
    def _check_sampler(self) -> "StudyConfig":
        """Refuses keys that do not go with the sampler."""
        if self.sampler == "grid":
            if not (self.variants or self.space or self.seeds):
                raise ValueError("sampler: grid: needs variants, space or seeds")
            return self
        if not self.space or not self.trials:
            raise ValueError(f"sampler: {self.sampler}: needs space, and trials: how many")
        if self.variants or self.seeds:
            raise ValueError(
                f"variants and seeds go with sampler: grid, not {self.sampler}, whose trials are "
                "all different"
            )
        return self

    @property
    def lower_is_better(self) -> bool:
        """Returns True if a lower metric is better, as for losses."""
        return self.metric.endswith("loss")


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """Reads a study, and checks all its values against the experiment.

    Args:
        path: path of a file, or name of a shipped study.
        overrides: from the command line; they apply after those of the file and before variants.
    Returns: the study, with its final name, experiment path and overrides.
    Raises: ConfigError: everything that is wrong, with file and line.
    """
    path = Path(find_config(str(path)))
    study = parse_config(path, (), StudyConfig)
    study = study.model_copy(
        update={
            "name": study.name or path.stem,
            "config": _find_experiment(study, path),
            "overrides": (*study.overrides, *overrides),
        }
    )
    load_config(study.config, study.overrides)
    reader = Reader()
    problems = list(_find_problems(study, reader.read_file(str(path))))
    if problems:
        raise problems_error(problems)
    return study


def _find_experiment(study: StudyConfig, path: Path) -> str:
    """Returns the experiment's path: as given, or beside the study's file if it is only there."""
    beside = path.parent / study.config
    return str(beside) if beside.exists() and not Path(study.config).exists() else study.config


def _find_problems(study: StudyConfig, tree: Node) -> Iterator[Problem]:
    """Yields the variants and values of the space that the experiment refuses."""
    bases: list[tuple[str, ...]] = []  # overrides of the variants, to which the space adds
    for name, items in study.variants.items():
        place, refusal = _place(tree, "variants", name), _refusal(study, items)
        if refusal:
            yield Problem(place, f"variants.{name}: {refusal}", "bad_variant")
        else:
            bases.append(items)
    for key, dimension in study.space.items():
        place, name = _place(tree, "space", key), f"space.{key}"
        try:
            values = dimension.examples(study.sampler == "grid")
        except ValueError as error:
            yield Problem(place, f"{name}: {error}", "bad_space")
            continue
        # Lazily, because each value is a configuration to check and the first refusal is enough.
        refusals = (_refusal(study, (*b, item_of(key, v))) for v in values for b in bases or [()])
        refusal = next(filter(None, refusals), "")
        if refusal:
            yield Problem(place, f"{name}: {refusal}", "bad_space")


def _refusal(study: StudyConfig, items: tuple[str, ...]) -> str:
    """Returns the message with which the experiment refuses overrides; "": it accepts them."""
    try:
        load_config(study.config, (*study.overrides, *items))
    except ConfigError as error:
        return str(error)
    return ""


def _place(tree: Node, *keys: str) -> Place:
    """Returns the position of the deepest key of a path that exists in the tree."""
    node = tree
    for key in keys:
        node = node.child(key) or node
    return node.key_place


def item_of(key: str, value: Any) -> str:
    """Formats `key=value` for -o; a JSON value is valid YAML."""
    return f"{key}={json.dumps(value)}"
