"""Reference files: one .npz per model, and the formulas that make its weights and images."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import paddle

from ppdist.common.errors import DataError
from ppdist.models.base import ImageModel

FORMULAS = "parity_weights.py"
NEEDED = ("parity_value", "parity_image", "parity_targets", "EVAL_CASE", "TRAIN_CASE")
VARIANTS = {"full": False, "empty1": True}  # of detectors; name -> the second image has no box
_KINDS = {float: "a number", int: "a whole number from 1 on", list: "a list", dict: "an object"}
STATISTICS = ("._mean", "._variance", ".running_mean", ".running_var")


class Values(dict[str, np.ndarray]):
    """The arrays of a file; remembers which were asked for, and says it when one is missing."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> np.ndarray:
        self.read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> np.ndarray:
        raise DataError(
            f"expected the array {key!r}, which is not in the file", code="reference_invalid"
        )

    def json(self, key: str) -> dict[str, Any]:
        """The settings stored as text under a key."""
        try:
            settings = json.loads(str(self[key]))
        except json.JSONDecodeError as error:
            raise DataError(
                f"expected JSON, found {str(self[key])[:60]!r}", code="reference_invalid", where=key
            ) from error
        if not isinstance(settings, dict):
            raise DataError(
                f"expected a JSON object, found {settings!r}", code="reference_invalid", where=key
            )
        return settings

    def starting(self, prefix: str) -> bool:
        """Whether the file has anything of a group, so that all of the group is to be compared."""
        return any(key.startswith(prefix) for key in self)

    def unread(self) -> list[str]:
        """Arrays nobody asked for: what the file says that was not compared."""
        return sorted(set(self) - self.read)


class Reference(NamedTuple):
    """One file with what is needed to rebuild its model."""

    model: str  # as in `ppyoloe_plus_s`, `yolov5n6`, `yolov5s_cls`
    values: Values
    formulas: ModuleType


def read_formulas(folder: Path) -> ModuleType:
    """Runs the folder's parity_weights.py, so trust the folder.

    Raises: DataError: no such file, or not what it says it is.
    """
    path = folder / FORMULAS
    if not path.is_file():
        raise DataError(
            f"expected a folder of parity references with {FORMULAS} in it",
            code="no_references",
            where=str(folder),
        )
    spec = importlib.util.spec_from_file_location("parity_weights", path)
    assert spec is not None and spec.loader is not None
    formulas = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(formulas)
    except Exception as error:  # the folder's code, not ours
        raise DataError(
            f"{type(error).__name__}: {error}", code="formulas_invalid", where=str(path)
        ) from error
    missing = [name for name in NEEDED if not hasattr(formulas, name)]
    if missing:
        raise DataError(
            f"expected it to define {', '.join(missing)}", code="formulas_invalid", where=str(path)
        )
    return formulas


def read_reference(path: Path, formulas: ModuleType) -> Reference:
    """One .npz; the model is the one its config_json names, otherwise the file's name.

    Raises: DataError: not a file of plain arrays.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DataError(
                "a single array of np.save; expected an .npz, as np.savez writes it",
                code="reference_invalid",
            )
        with archive:
            values = Values({key: archive[key] for key in archive.files})
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have no list of what they raise
        raise DataError(
            f"expected an .npz of plain arrays: {error}", code="reference_invalid"
        ) from error
    model = values.json("config_json").get("model") if "config_json" in values else None
    return Reference(str(model or path.stem), values, formulas)


def setting(settings: dict[str, Any], name: str, kind: type) -> Any:
    """The setting of a dotted name.

    Args:
        kind: float: any number; int: a whole number from 1 on; list or dict.

    Raises: DataError: no such setting, or something else.
    """
    value: Any = settings
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise DataError(
                f"expected {name} among them", code="reference_invalid", where="settings"
            )
        value = value[part]
    if kind is float:
        fits = type(value) in (int, float) and math.isfinite(value)
    else:
        small = type(value) is int and value < 1
        fits = type(value) is kind and not small
    if not fits:
        raise DataError(
            f"expected {_KINDS[kind]}, found {str(value)[:60]!r}",
            code="reference_invalid",
            where=f"settings: {name}",
        )
    return value


def read_key_list(path: Path) -> dict[str, dict[str, list[int]]]:
    """Model -> original state-dict key -> shape, of a *_keys.json file.

    Raises: DataError: a file that is something else.
    """
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"expected JSON: {error}", code="not_json", where=str(path)) from error
    shapes = [shapes for shapes in lists.values()] if isinstance(lists, dict) else [None]
    if not all(isinstance(shape, dict) and all(map(_is_shape, shape.values())) for shape in shapes):
        raise DataError(
            "expected JSON of model -> key -> shape", code="reference_invalid", where=str(path)
        )
    return lists


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(side) is int for side in value)


def official_state(model: ImageModel) -> dict[str, paddle.Tensor]:
    """Our state dict under the original's keys."""
    keys = model.official_keys()
    return {keys[key]: value for key, value in model.state_dict().items()}


def official_shape(tensor: paddle.Tensor) -> list[int]:
    """The original's shape: a 2-D entry is a linear layer's, [in, out] here, [out, in] in torch."""
    return list(tensor.shape[::-1] if tensor.ndim == 2 else tensor.shape)


def set_weights(model: ImageModel, formulas: ModuleType, statistics_only: bool = False) -> None:
    """Sets every weight and statistic to its formula; what has none keeps its value.

    Args:
        statistics_only: only what a training forward changes.
    """
    for key, tensor in official_state(model).items():
        if statistics_only and not key.endswith(STATISTICS):
            continue
        value = formulas.parity_value(key, official_shape(tensor))
        if value is not None:
            tensor.set_value(value.T if tensor.ndim == 2 else value)


def gradients(model: ImageModel) -> dict[str, paddle.Tensor | None]:
    """Gradients of all trainable parameters under the original's keys."""
    keys = model.official_keys()
    return {keys[key]: p.grad for key, p in model.named_parameters() if not p.stop_gradient}


def padded_truth(
    targets: dict[str, np.ndarray],
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """The formulas' targets as boxes_BM4 (xyxy, pixels), labels_BM and mask_BM."""
    return (
        paddle.to_tensor(targets["gt_bbox"]),
        paddle.to_tensor(targets["gt_class"][..., 0].astype("int64")),
        paddle.to_tensor(targets["pad_gt_mask"][..., 0]),
    )
