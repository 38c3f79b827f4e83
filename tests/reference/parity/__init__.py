"""Are our numbers those of the original implementations?

A folder of references holds, per model, one .npz with outputs, losses, assignments and gradient
norms of the original; lists of state-dict keys with shapes; and `parity_weights.py`, the formulas
of weights, images and targets.  This package builds our model with the same weights and measures
how far every number is off.  Which model a file is about it learns from the file, so references of
other sizes need no change here.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ppdist.common.errors import DataError
from ppdist.models.base import ImageModel
from tests.reference.parity import ppyoloe, yolov5, yolov5_cls
from tests.reference.parity.measure import Measurement
from tests.reference.parity.reference import (
    Reference,
    official_shape,
    official_state,
    read_formulas,
    read_key_list,
    read_reference,
)
from tests.reference.parity.report import ModelReport

__all__ = ["Measurement", "ModelReport", "Reference", "compare", "compare_keys", "verify"]

FAMILIES = (ppyoloe, yolov5, yolov5_cls)
COUNTER = ".num_batches_tracked"  # torch's; nothing is computed with it


def family_of(name: str) -> ModuleType:
    """The module that compares the model of a name such as `yolov5n6`.

    Raises: DataError: no family knows it.
    """
    for family in FAMILIES:
        if family.NAME.fullmatch(name):
            return family
    known = "; ".join(family.NAMES for family in FAMILIES)
    raise DataError(f"{name!r} is no model known here; expected {known}", code="unknown_model")


def verify(folder: Path, keys: bool = True) -> Iterator[ModelReport]:
    """One report per reference file, then one per model of which only the keys are listed.

    A file that cannot be understood gives a report with an error.  Runs the folder's
    parity_weights.py, so trust the folder.

    Args:
        keys: whether to compare with the key lists too.

    Raises: DataError: no folder, no formulas, or no reference in it.
    """
    formulas = read_formulas(folder)
    lists: dict[str, dict[str, list[int]]] = {}
    paths, key_paths = sorted(folder.glob("*.npz")), sorted(folder.glob("*_keys.json"))
    if not paths and not (keys and key_paths):
        raise DataError("no reference (.npz) in it", code="no_references", where=str(folder))
    for path in key_paths if keys else ():
        try:
            lists |= read_key_list(path)
        except DataError as error:
            yield ModelReport(path.stem, error=str(error))
    compared = set()
    for path in paths:
        report = ModelReport(path.stem)
        try:
            reference = read_reference(path, formulas)
            compared.add(reference.model)
            for measurement in compare(reference, lists.get(reference.model)):
                report.measurements.append(measurement)
            report.unread = reference.values.unread()
        except DataError as error:
            report.error = f"{path}: {error}"
        except Exception as error:
            # An array or setting of a form nobody foresaw, or our own bug: the place tells which,
            # and the other files are still to be compared.
            report.error = f"{path}: {type(error).__name__} at {_place(error)}: {error}"
        yield report
    for name, shapes in lists.items():
        if name not in compared:
            report = ModelReport(name)
            try:
                model = family_of(name).build(name, keys=shapes)
                report.measurements.append(compare_keys(model, shapes))
            except DataError as error:
                report.error = f"{folder}: key lists: {error}"
            yield report


def compare(
    reference: Reference, shapes: dict[str, list[int]] | None = None
) -> Iterator[Measurement]:
    """Everything the reference has values for.

    Args:
        shapes: the original's state-dict keys and shapes, if they are listed.

    Raises: DataError: the reference is about no known model, or lacks an array.
    """
    family = family_of(reference.model)
    model = family.rebuild(reference)
    if shapes is not None:
        yield compare_keys(model, shapes)
    yield from family.compare(model, reference)


def compare_keys(model: ImageModel, shapes: dict[str, list[int]]) -> Measurement:
    """How many of our state-dict keys and shapes differ from the original's."""
    ours = {key: official_shape(value) for key, value in official_state(model).items()}
    theirs = {key: shape for key, shape in shapes.items() if not key.endswith(COUNTER)}
    different = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    detail = ", ".join(
        f"{key}: ours {ours.get(key)}, theirs {theirs.get(key)}" for key in different[:3]
    )
    return Measurement("keys", "keys and shapes", len(different), 0, detail)


def _place(error: Exception) -> str:
    """file:line of this package that an exception went through last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
