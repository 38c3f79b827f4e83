"""Weights from files, without ever running code from them.

.pdparams       Paddle's pickled dict, read by an unpickler that knows numpy arrays and nothing
                else (paddle.load would execute whatever the file says)
.safetensors    as it is
.npz            as it is, pickled entries refused
a directory     one of our checkpoints: its averaged weights, else its raw ones
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
from safetensors.numpy import load_file

from ppdist.errors import WeightsError
from ppdist.models.detector import Detector

SHOWN = 5  # mismatches listed in a message

# What a pickled dict of numpy arrays needs; np.core is the name that numpy 1 wrote.
_HARMLESS = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
}


@dataclass(frozen=True)
class LoadReport:
    """What became of the entries; `str(report)` is the line for the log.

    loaded: model keys that took their value from the file.
    fresh: model keys that keep their initial value (class layers, or all but the backbone).
    ignored: file keys the model has no place for.
    reason: why something is fresh; empty when nothing is.
    """

    source: Path
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        line = f"weights: {len(self.loaded)} tensors from {self.source}"
        if self.fresh:
            line += f"; {len(self.fresh)} start fresh: {self.reason}"
        if self.ignored:
            line += f"; {len(self.ignored)} of the file unused ({', '.join(self.ignored[:3])}"
            line += ", ...)" if len(self.ignored) > 3 else ")"
        return line


def load_weights(model: Detector, path: Path | str) -> LoadReport:
    """Copies weights into the model; every rank calls it and reads the file itself.

    All or nothing: the model is untouched when an error is raised.  Where only the number of
    classes differs, the class layers keep their initial values and the report says so; a file with
    the backbone alone (ImageNet) fills the backbone.  Nothing else may be missing or misshapen.

    Raises: WeightsError: no such file, not readable, unsafe, or not of this model.
    """
    path = Path(path)
    arrays = read_arrays(path)
    state = model.state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    matched, ignored = _match(arrays, shapes)
    if not matched:
        raise WeightsError(
            f"{path}: none of its {len(arrays)} entries belongs to this model; the file has "
            f"{_some(arrays)}, the model expects {_some(shapes)}; is it a weight file of another "
            f"architecture?"
        )
    fresh = [key for key in matched if _class_count_differs(model, matched[key].shape, shapes, key)]
    reason = ""
    if fresh:
        found = matched[fresh[0]].shape[0]
        reason = f"class layers, the file knows {found} classes, the model {model.num_classes}"
    missing = [key for key in shapes if key not in matched]
    if missing and all(key.startswith("backbone.") for key in matched):
        outside = [key for key in missing if not key.startswith("backbone.")]
        if len(outside) == len(missing):
            fresh, reason, missing = outside, "the file holds a backbone alone", []
    _refuse_misfits(path, shapes, matched, missing, set(fresh))
    loaded = [key for key in matched if key not in set(fresh)]
    for key in loaded:
        state[key].set_value(matched[key].reshape(shapes[key]).astype(_dtype(state[key])))
    return LoadReport(path, tuple(loaded), tuple(fresh), tuple(ignored), reason)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a weight file or checkpoint directory, by key.

    Raises: WeightsError: no such file, of an unknown kind, damaged, or it holds more than arrays.
    """
    if not path.exists():
        raise WeightsError(f"{path}: no such weight file or checkpoint directory")
    if path.is_dir():
        return _read_checkpoint(path)
    readers: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
        ".pdparams": _read_pdparams,
        ".safetensors": load_file,
        ".npz": _read_npz,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise WeightsError(
            f"{path}: cannot read weights from {path.suffix or 'a file without an ending'}; "
            f"expected {', '.join(readers)} or a checkpoint directory"
        )
    try:
        arrays = reader(path)
    except WeightsError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        pickle.UnpicklingError,
        AttributeError,
        IndexError,
        TypeError,
        safetensors.SafetensorError,
    ) as error:
        raise WeightsError(f"{path}: damaged or not a {path.suffix} file: {error}") from error
    return {key: _as_float(value) for key, value in arrays.items()}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and plain containers; refuses every other name."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="latin1")  # files of Python 2 keep bytes in strings
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise WeightsError(
                f"{self._path}: refused: it asks to run {module}.{name}, and a weight file needs "
                f"arrays only; do not use this file unless you trust it and convert it yourself"
            )
        return super().find_class(module, name)


def _read_pdparams(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        content = _ArrayUnpickler(file, path).load()
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path}: expected a dict of arrays, found {type(content).__name__}")
    return {
        str(key): value
        for key, value in content.items()
        if isinstance(value, np.ndarray)  # not the `StructuredToParameterName@@` table of names
    }


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def _read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    manifest = path / "manifest.json"
    if not manifest.exists():
        raise WeightsError(
            f"{path}: not a checkpoint: it has no manifest.json; give a directory such as "
            f"output/NAME/checkpoints/best, or a weight file"
        )
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        file = path / next(n for n in ("ema.safetensors", "model.safetensors") if n in files)
        expected = files[file.name]["sha256"]
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise WeightsError(f"{path}: damaged checkpoint: {error!r}") from error
    if found != expected:
        raise WeightsError(f"{file}: damaged: its SHA-256 is not the one in manifest.json")
    return read_arrays(file)


def _as_float(value: np.ndarray) -> np.ndarray:
    """bfloat16, which numpy lacks, is stored as uint16 bit patterns."""
    if value.dtype == np.uint16:
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value


def _match(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Arrays by model key, in model order, and the file keys left over.

    A file key is a model key, or what follows `backbone.` in one (weights of a classifier).
    """
    places = {key: key if key in shapes else f"backbone.{key}" for key in arrays}
    taken = {place: arrays[key] for key, place in places.items() if place in shapes}
    ignored = [key for key, place in places.items() if place not in shapes]
    return {key: taken[key] for key in shapes if key in taken}, ignored


def _class_count_differs(
    model: Detector, found: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], key: str
) -> bool:
    wanted = shapes[key]
    return (
        key.startswith(model.class_layers)
        and len(found) == len(wanted)
        and found[0] != wanted[0]
        and found[1:] == wanted[1:]
    )


def _refuse_misfits(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    matched: Mapping[str, np.ndarray],
    missing: list[str],
    fresh: set[str],
) -> None:
    problems = [f"{key}: {_shape(shapes[key])} in the model, not in the file" for key in missing]
    for key, value in matched.items():
        one_number = value.size == 1 == int(np.prod(shapes[key]))  # shape [1] or []
        if value.shape != shapes[key] and key not in fresh and not one_number:
            problems.append(
                f"{key}: {_shape(shapes[key])} in the model, {_shape(value.shape)} in the file"
            )
    if problems:
        more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightsError(
            f"{path}: does not fit this model (check model.size and model.variant); "
            f"{len(problems)} of {len(shapes)} entries differ:\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
        )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _some(keys: Mapping[str, Any]) -> str:
    return ", ".join(list(keys)[:3]) + (", ..." if len(keys) > 3 else "") or "nothing"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")
