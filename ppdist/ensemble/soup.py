"""Weights of several checkpoints of one architecture, averaged.

Sources: Izmailov et al. 2018, arXiv:1803.05407 (SWA); Wortsman et al. 2022, arXiv:2203.05482 (model
soups).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppdist.common.errors import ConfigError, WeightsError
from ppdist.distributed import comm
from ppdist.export.predictor import load_all_weights
from ppdist.models.base import ImageModel
from ppdist.models.weights import arrays_of, checkpoint_of


@dataclass(frozen=True)
class ModelSoup:
    """The sum of some checkpoints' entries.

    Entries that are learned or counted (parameters, running statistics) are averaged; constants
    (anchors) have to be the same in all.

    first: the entries of the first.  sums: float64, of what is averaged.  differs: keys of what is
    not the same in all.
    """

    paths: tuple[Path, ...]
    first: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray]
    differs: frozenset[str]

    def plus(self, path: Path, arrays: Mapping[str, np.ndarray]) -> "ModelSoup":
        """With one more.  Raises: WeightsError: its constants are not those of the first."""
        other = {key for key, value in arrays.items() if not np.array_equal(value, self.first[key])}
        for key in sorted(other - set(self.sums)):
            raise WeightsError(
                f"{key} is not that of {self.paths[0]}, and cannot be averaged",
                code="weights_not_alike",
                where=str(path),
                fix=(
                    "give checkpoints of one run, or of runs that started alike (of YOLOv5: "
                    "with the same model.anchors)"
                ),
            )
        return ModelSoup(
            (*self.paths, path),
            self.first,
            {key: total + arrays[key] for key, total in self.sums.items()},
            self.differs | other,
        )

    def mean(self) -> dict[str, np.ndarray]:
        """The average, in the types of the first; of equal numbers exactly that number."""
        means = {key: total / len(self.paths) for key, total in self.sums.items()}
        return {key: means.get(key, value).astype(value.dtype) for key, value in self.first.items()}


def begin(model: ImageModel, path: Path, arrays: Mapping[str, np.ndarray]) -> ModelSoup:
    """A soup of one checkpoint."""
    averaged = {key for key, _ in model.named_parameters()}  # Paddle counts running statistics
    sums = {key: value.astype(np.float64) for key, value in arrays.items() if key in averaged}
    return ModelSoup((path,), arrays, sums, frozenset())


def read(model: ImageModel, path: Path) -> dict[str, np.ndarray]:
    """All entries of a weight file or checkpoint; the model has them, too, afterwards.

    Every rank calls it.  Raises: WeightsError, on every rank: absent, damaged, or of another model.
    """
    comm.run_on_all_ranks(lambda: load_all_weights(model, path))
    return arrays_of(model)


def put(model: ImageModel, arrays: Mapping[str, np.ndarray]) -> None:
    """Gives a model the entries that `arrays_of` made of one like it."""
    for key, value in model.state_dict().items():
        value.set_value(arrays[key])


def require_different(paths: Sequence[Path]) -> None:
    """Raises: ConfigError: fewer than two files, or one of them twice, perhaps through a link."""
    if len(paths) < 2:
        raise ConfigError(
            f"{len(paths)} given, expected two or more to average",
            code="weights_too_few",
            where="--weights",
        )
    seen: dict[Path, Path] = {}
    for path in paths:
        earlier = seen.setdefault(checkpoint_of(path).resolve(), path)
        if earlier is not path:
            raise ConfigError(
                f"{path} is the same as {earlier}",
                code="weights_repeated",
                where="--weights",
                fix="leave one out",
            )


def uniform(model: ImageModel, paths: Sequence[Path]) -> ModelSoup:
    """All of them; every rank calls it."""
    soup = begin(model, paths[0], read(model, paths[0]))
    for path in paths[1:]:
        soup = soup.plus(path, read(model, path))
    return soup


class Tried(NamedTuple):
    """What the greedy recipe decided about a checkpoint.

    alone: its own score; together: that of the soup with it; taken: it stayed in.
    """

    path: Path
    alone: float
    together: float
    taken: bool


def greedy(
    model: ImageModel,
    paths: Sequence[Path],
    score: Callable[[], float],
    renew: Callable[[ModelSoup], None],
) -> tuple[ModelSoup, list[Tried]]:
    """The greedy soup: the best checkpoint, then by falling score each that does not make it worse.

    Every rank calls it.

    Args:
        score: of the model as it stands, larger is better; the same on every rank.
        renew: puts a soup of several into the model and makes its running statistics anew.
    Returns: the soup, which the model may not hold; and what was tried, the best first.
    Source: arXiv:2203.05482, recipe 1.
    """
    alone = []
    for path in paths:
        read(model, path)
        alone.append(score())
    order = sorted(range(len(paths)), key=lambda place: -alone[place])  # of equals the first given
    best = paths[order[0]]
    soup = begin(model, best, read(model, best))
    reached = alone[order[0]]
    tried = [Tried(best, reached, reached, True)]
    for place in order[1:]:
        longer = soup.plus(paths[place], read(model, paths[place]))
        renew(longer)
        found = score()
        tried.append(Tried(paths[place], alone[place], found, found >= reached))
        if found >= reached:
            soup, reached = longer, found
    return soup, tried
