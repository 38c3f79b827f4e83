"""Loaded models: weights or exports, ready for images of any size.

    model = load_weights(config, weights)  or  load_export(directory)
    for rows_R6 in model(images):          # class, score, x1, y1, x2, y2 in pixels of each image
    for probabilities_C in model(images):  # of a classifier

Preprocessing and mapping back are those of deploy/python (ppdist/runtime/predictor.py), whatever
computes the outputs.
"""

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import paddle

from ppdist.common.errors import ConfigError, ExportError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.runtime import Backend, RuntimeOptions
from ppdist.distributed import device
from ppdist.engine.build import build_model
from ppdist.export.predictor import open_exported
from ppdist.export.spec import SPEC_FILE, InferenceSpec, describe, read_spec, validation_set
from ppdist.losses.nms import multiclass_nms
from ppdist.models.base import ImageModel
from ppdist.models.model_card import names_for, read_card_or_warn
from ppdist.models.weights import load_all_weights
from ppdist.predict.detections import Detections
from ppdist.predict.sources import Frame
from ppdist.runtime.predictor import (
    RUNTIMES,
    Graph,
    Predictor,
    PredictorError,
    chosen_backend,
    default_threshold,
    doubt_about,
    lost_below,
    suppress,
)

Precision = Literal["float32", "bfloat16", "int8"]
_LOGGER = logging.getLogger("ppdist")
_FEW_NAMES = 10  # that a message shows
Predict = Callable[[Sequence[np.ndarray]], list[np.ndarray]]  # see LoadedModel.__call__


class EagerGraph:
    """A dygraph model as a graph, with its suppression at the end.

    nms: of a detector.
    """

    output_names: tuple[str, ...] = ()

    def __init__(self, model: ImageModel, nms: NMSConfig | None) -> None:
        self.model, self.nms = model, nms
        model.eval()

    @paddle.no_grad()
    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        found = self.model.predict(paddle.to_tensor(batch_B3HW))
        if self.nms is None:
            return (found.numpy(),)
        scores_BNC, boxes_BN4 = found
        rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, self.nms)
        return rows_R6.numpy(), count_B.numpy()


@dataclass(frozen=True)
class LoadedModel:
    """A detector or classifier with all it needs to be used.

    spec: names, sizes, thresholds.  graph: what computes its outputs.  nms_in_graph: whether these
    are those left after suppression.  predictor: runs the model.
    """

    spec: InferenceSpec
    graph: Graph
    nms_in_graph: bool
    predictor: Predictor

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the model finds in images, all of them as one batch.

        Args: images: uint8 RGB [H, W, 3], upright, each of any size.
        Returns: for each image float32 rows_R6 (class, score, x1, y1, x2, y2 in its pixels and
            inside it), best first; of a classifier probabilities_C.
        Raises: ExportError: the runtime fails.
        """
        try:
            return self.predictor(images)
        except PredictorError as error:
            raise ExportError(str(error), code="runtime_failed") from error


def load_weights(
    config: ExperimentConfig,
    weights: Path,
    warn: Callable[[str], None],
    *,
    names_alone: bool = False,
) -> LoadedModel:
    """Model of a config with weights, fused, on the chosen device.

    Args:
        weights: see `models.weights.load_weights`.
        warn: told where class names are made up.
        names_alone: where the weights name their classes, data are not looked at.
    Raises: WeightsError: they do not fit; ConfigError: names do not fit the model.
    """
    model = build_model(config)
    card = read_card_or_warn(weights, warn, derives=False)
    known = card is not None and len(card.class_names) == config.model.num_classes
    dataset = None if names_alone and known else validation_set(config, warn, card)
    spec = describe(config, dataset, card)
    if class_note := load_all_weights(model, weights, names_for(weights, spec.class_names)):
        warn(f"{weights}: {class_note}")
    model.fuse()
    return _loaded(spec, EagerGraph(model, spec.nms), spec.nms is not None)


def load_export(
    path: Path,
    backend: Backend | None = None,
    threads: int = 1,
    precision: Precision = "float32",
    wanted_device: str = "auto",
) -> LoadedModel:
    """An exported model; the log says what runs it.

    Args:
        path: of its folder; or of a file there, which is then run: Paddle's, .onnx, _int8.onnx.
        backend: None: on a card Paddle, else the fastest here that the export was checked in
            (`runtime.predictor.chosen_backend`).
        threads: CPU threads of one prediction.
    Raises: ExportError: no exported model there, or not the one of these options.
        ConfigError: options that do not go together.
    """
    directory = path if path.is_dir() else path.parent
    suffix = "" if path.is_dir() else path.suffix.lower()
    if suffix == ".xml":
        raise ConfigError(
            "this form of OpenVINO is not read",
            code="options_conflict",
            where=str(path),
            fix="give its folder: OpenVINO reads model.onnx as it is",
        )
    if path.name.endswith("_int8.onnx"):
        precision = "int8"
    elif suffix in (".pdiparams", ".pdmodel", ".json"):
        backend = backend or "paddle"
    if not path.exists():
        raise ExportError("no such file or folder", code="not_an_export", where=str(path))
    spec = read_spec(directory)
    able = spec.model_copy(update={"paddle": None}) if suffix == ".onnx" else spec
    options = runtime_of(able, backend, threads, precision, wanted_device)
    form, graph = open_exported(directory, spec, options)
    if doubt := doubt_about(spec.model_dump(mode="json"), options.backend, precision):
        _LOGGER.warning("%s: %s", path, doubt)
    where = "on the card" if options.device == "gpu" else f"threads: {threads}"
    _LOGGER.info("%s runs in %s, %s, %s", path, RUNTIMES[options.backend], precision, where)
    return _loaded(spec, graph, form.nms_in_graph)


def runtime_of(
    spec: InferenceSpec,
    backend: Backend | None,
    threads: int,
    precision: Precision,
    wanted_device: str,
) -> RuntimeOptions:
    """How an export is run; see `load_export`."""
    card = wanted_device != "cpu" and precision == "float32" and "gpu" in device.accelerators()
    if backend is None and card and spec.paddle is not None:
        backend = "paddle"
    if backend is None:
        try:
            chosen = chosen_backend(spec.model_dump(mode="json"), "auto", "cpu", precision)
        except PredictorError as error:
            raise ExportError(str(error), code="export_lacks_format") from None
        backend = cast(Backend, chosen)
    able = {"float32": get_args(Backend), "bfloat16": ("openvino",), "int8": ("onnx", "openvino")}
    if backend not in able[precision]:
        raise ConfigError(
            f"{precision} is for {' and '.join(able[precision])}, not for {backend}",
            code="options_conflict",
        )
    return RuntimeOptions(
        backend=backend,
        device="gpu" if card and backend == "paddle" else "cpu",
        precision=precision,
        threads=threads,
    )


def export_folder(path: Path) -> Path | None:
    """Folder of an export, given itself or one of its files."""
    if path.is_dir():
        return path if (path / SPEC_FILE).is_file() else None
    beside = path.suffix.lower() in (".onnx", ".xml", ".pdiparams", ".pdmodel", ".json", ".yml")
    return path.parent if beside and (path.parent / SPEC_FILE).is_file() else None


def with_iou(model: LoadedModel, iou: float) -> Predict:
    """A model with another IoU threshold of non-maximum suppression.

    What an export's graph has suppressed already is suppressed once more.
    Raises: ConfigError: no such number, or an export whose graph leaves out more.
    """
    if not 0 <= iou <= 1:
        raise ConfigError("expected 0..1", code="option_invalid", where=f"iou {iou:g}")
    spec, graph = model.spec, model.graph
    assert spec.nms is not None  # a detector's
    written = spec.nms.iou_threshold
    if written is not None and (isinstance(graph, EagerGraph) or not model.nms_in_graph):
        nms = spec.nms.model_copy(update={"iou_threshold": iou})
        graph = EagerGraph(graph.model, nms) if isinstance(graph, EagerGraph) else graph
        return _loaded(spec.model_copy(update={"nms": nms}), graph, model.nms_in_graph)
    if written is not None and iou > written:
        raise ConfigError(
            f"the graph of this export suppresses boxes that overlap by more than {written:g}",
            code="options_conflict",
            where=f"iou {iou:g}",
            fix="use a lower value, the weights, or an export made --without-nms",
        )
    return lambda images: [suppressed(rows_R6, iou) for rows_R6 in model(images)]


def suppressed(rows_R6: np.ndarray, iou: float) -> np.ndarray:
    """Rows that no better one of their class overlaps by more."""
    if not len(rows_R6):
        return rows_R6
    scores_RC = np.zeros((len(rows_R6), int(rows_R6[:, 0].max()) + 1), np.float32)
    scores_RC[np.arange(len(rows_R6)), rows_R6[:, 0].astype(int)] = rows_R6[:, 1]
    count = len(rows_R6)
    nms = {"score_threshold": 0.0, "iou_threshold": iou, "candidates": count, "keep": count}
    return suppress(scores_RC, rows_R6[:, 2:], {**nms, "multi_label": False})


@dataclass(frozen=True)
class Wanted:
    """Which boxes to keep.

    threshold: lowest score.  whence: where it comes from; "": requested.  class_ids: None:
    of all classes.
    """

    threshold: float
    whence: str
    class_ids: frozenset[int] | None

    def of_classes(self, rows_R6: np.ndarray) -> np.ndarray:
        """The rows of these classes, whatever their score."""
        if self.class_ids is None:
            return rows_R6
        return rows_R6[np.isin(rows_R6[:, 0], list(self.class_ids))]

    def of(self, rows_R6: np.ndarray) -> np.ndarray:
        """The rows to keep."""
        return self.of_classes(rows_R6[rows_R6[:, 1] >= self.threshold])


def wanted(
    spec: InferenceSpec,
    threshold: float | None,
    classes: Sequence[str | int] | str | int | None,
    warn: Callable[[str], None],
) -> Wanted:
    """Checks the threshold and classes that a user asks for.

    Args:
        threshold: None: that of the best F1 which the model's card knows, else 0.25.
        classes: names or numbers from 0; None: all.
        warn: called if the model itself drops requested boxes.
    Raises: ConfigError: no such threshold or class.
    """
    known = spec.model_dump(mode="json")
    if threshold is None:
        threshold, whence = default_threshold(known)
    elif 0 <= threshold <= 1:
        whence = ""
    else:
        raise ConfigError("expected 0..1", code="option_invalid", where=f"threshold {threshold:g}")
    if not whence and (lost := lost_below(known, threshold)):
        warn(lost)
    if classes is None:
        return Wanted(threshold, whence, None)
    asked = [classes] if isinstance(classes, str | int) else classes
    return Wanted(threshold, whence, frozenset(_class_id(each, spec) for each in asked))


def _class_id(asked: str | int, spec: InferenceSpec) -> int:
    """Number of the class of this name or number."""
    names = spec.class_names
    if asked in names:
        return names.index(str(asked))
    if str(asked).isdecimal() and int(asked) < len(names):
        return int(asked)
    lower = {name.lower(): name for name in names}
    near = [lower[each] for each in difflib.get_close_matches(f"{asked}".lower(), lower, 1)]
    some = ", ".join(names[:_FEW_NAMES]) + (", ..." if len(names) > _FEW_NAMES else "")
    raise ConfigError(
        f"the model has no class {asked!r}",
        code="class_unknown",
        where="classes",
        fix=f"did you mean {near[0]}?" if near else f"it has classes 0 to {len(names) - 1}: {some}",
    )


def _loaded(spec: InferenceSpec, graph: Graph, nms_in_graph: bool) -> LoadedModel:
    predictor = Predictor.of_graph(spec.model_dump(mode="json"), graph, nms_in_graph)
    return LoadedModel(spec, graph, nms_in_graph, predictor)


def require_task(spec: InferenceSpec, task: str, where: str) -> None:
    """Raises: ConfigError: the model does something else."""
    if spec.task != task:
        raise ConfigError(
            f"this model can only {spec.task}, not {task}",
            code="model_of_other_task",
            where=where,
            fix="run classifiers with `ppdist predict`",
        )


def detections(frame: Frame, rows_R6: np.ndarray, spec: InferenceSpec) -> Detections:
    """Rows of one image as Detections, in their order."""
    return Detections(
        boxes_xyxy=np.ascontiguousarray(rows_R6[:, 2:], np.float32),
        scores=np.ascontiguousarray(rows_R6[:, 1], np.float32),
        class_ids=rows_R6[:, 0].astype(np.int64),
        names=spec.class_names,
        image=frame.image_HW3,
        source=frame.name,
        category_ids=spec.category_ids,
        frame=frame.index,
    )
