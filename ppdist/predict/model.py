"""Loaded models: weights or exports, ready for images of any size.

    model = load_weights(config, weights)  or  load_export(directory)
    for rows_R6 in model(images):          # class, score, x1, y1, x2, y2 in pixels of each image
    for probabilities_C in model(images):  # of a classifier

Preprocessing and mapping back are those of deploy/python (ppdist/runtime/predictor.py), whatever
computes the outputs.
"""

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
from ppdist.data.datasets.selection import find_class
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
Predict = Callable[[Sequence[np.ndarray]], list[np.ndarray]]  # see LoadedModel.__call__


class EagerGraph:
    """A dygraph model behind the interface of a graph, followed by non-maximum suppression.

    nms: settings of a detector's suppression; None for a classifier.
    """

    output_names: tuple[str, ...] = ()

    def __init__(self, model: ImageModel, nms: NMSConfig | None) -> None:
        self.model, self.nms = model, nms
        model.eval()

    @paddle.no_grad()
    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        outputs = self.model.predict(paddle.to_tensor(batch_B3HW))
        if self.nms is None:
            return (outputs.numpy(),)
        scores_BNC, boxes_BN4 = outputs
        rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, self.nms)
        return rows_R6.numpy(), count_B.numpy()


@dataclass(frozen=True)
class LoadedModel:
    """A detector or classifier with everything that predictions need.

    spec: names, sizes, thresholds.  graph: computes the outputs.  nms_in_graph: the outputs are
    already suppressed.  predictor: runs the model.
    """

    spec: InferenceSpec
    graph: Graph
    nms_in_graph: bool
    predictor: Predictor

    @property
    def size_multiple(self) -> int:
        """Returns the number of pixels that the sides of the input must be a multiple of."""
        if isinstance(self.graph, EagerGraph):
            return self.graph.model.size_multiple
        return self.spec.input.size_multiple

    def resized(self, size: tuple[int, int]) -> "LoadedModel":
        """Returns the same model with an input of another (height, width)."""
        section = self.spec.input.model_copy(update={"size": size})
        spec = self.spec.model_copy(update={"input": section})
        return make_loaded(spec, self.graph, self.nms_in_graph)

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Predicts all images as one batch.

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
    """Loads the model of a config with weights, fused, on the chosen device.

    Args:
        weights: see `models.weights.load_weights`.
        warn: called if placeholder class names had to be used.
        names_alone: do not read the data set if the weights contain class names.
    Raises: WeightsError: the weights do not fit; ConfigError: the names do not fit the model.
    """
    model = build_model(config)
    card = read_card_or_warn(weights, warn, derives=False)
    has_names = card is not None and len(card.class_names) == config.model.num_classes
    dataset = None if names_alone and has_names else validation_set(config, warn, card)
    spec = describe(config, dataset, card)
    if class_note := load_all_weights(model, weights, names_for(weights, spec.class_names)):
        warn(f"{weights}: {class_note}")
    model.fuse()
    return make_loaded(spec, EagerGraph(model, spec.nms), spec.nms is not None)


def load_export(
    path: Path,
    backend: Backend | None = None,
    threads: int = 1,
    precision: Precision = "float32",
    wanted_device: str = "auto",
) -> LoadedModel:
    """Loads an exported model; logs which runtime runs it.

    Args:
        path: its folder; or the file in it to run: Paddle's, .onnx, _int8.onnx.
        backend: None chooses Paddle on a card, otherwise the fastest available backend in which the
            export was checked (`runtime.predictor.chosen_backend`).
        threads: number of CPU threads per prediction.
    Raises: ExportError: there is no exported model, or not the one that these options require.
        ConfigError: the options cannot be combined.
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
    # If the path is a file, that file must run: without this, a card would choose Paddle's file.
    runnable = spec.model_copy(update={"paddle": None}) if suffix == ".onnx" else spec
    options = choose_runtime(runnable, backend, threads, precision, wanted_device)
    form, graph = open_exported(directory, spec, options)
    if warning := doubt_about(spec.model_dump(mode="json"), options.backend, precision):
        _LOGGER.warning("%s: %s", path, warning)
    where = "on the card" if options.device == "gpu" else f"threads: {threads}"
    _LOGGER.info("%s runs in %s, %s, %s", path, RUNTIMES[options.backend], precision, where)
    return make_loaded(spec, graph, form.nms_in_graph)


def choose_runtime(
    spec: InferenceSpec,
    backend: Backend | None,
    threads: int,
    precision: Precision,
    wanted_device: str,
) -> RuntimeOptions:
    """Chooses how an export is run; see `load_export`."""
    has_card = wanted_device != "cpu" and precision == "float32" and "gpu" in device.accelerators()
    if backend is None and has_card and spec.paddle is not None:
        backend = "paddle"
    if backend is None:
        try:
            # The same rule as deploy/python, so that an export runs the same everywhere.
            backend_name = chosen_backend(spec.model_dump(mode="json"), "auto", "cpu", precision)
        except PredictorError as error:
            raise ExportError(str(error), code="export_lacks_format") from None
        backend = cast(Backend, backend_name)
    backends_of = {
        "float32": get_args(Backend),
        "bfloat16": ("openvino",),
        "int8": ("onnx", "openvino"),
    }
    if backend not in backends_of[precision]:
        raise ConfigError(
            f"{precision} is for {' and '.join(backends_of[precision])}, not for {backend}",
            code="options_conflict",
        )
    return RuntimeOptions(
        backend=backend,
        device="gpu" if has_card and backend == "paddle" else "cpu",
        precision=precision,
        threads=threads,
    )


def export_folder(path: Path) -> Path | None:
    """Returns the folder of an export from its path or that of one of its files."""
    if path.is_dir():
        return path if (path / SPEC_FILE).is_file() else None
    is_export_file = path.suffix.lower() in (
        ".onnx",
        ".xml",
        ".pdiparams",
        ".pdmodel",
        ".json",
        ".yml",
    )
    return path.parent if is_export_file and (path.parent / SPEC_FILE).is_file() else None


def with_suppression(
    model: LoadedModel, iou: float | None = None, agnostic: bool = False
) -> Predict:
    """Returns a model with another non-maximum suppression.

    Boxes that an export's graph has suppressed already are suppressed once more.

    Args:
        iou: its IoU threshold; None keeps the model's.
        agnostic: as nms.class_agnostic; False keeps the model's setting.
    Raises: ConfigError: `iou` is out of range; the graph of an export suppresses more boxes than
        `iou` would; or `agnostic` without `iou` for a model without suppression.
    """
    if iou is not None and not 0 <= iou <= 1:
        raise ConfigError("expected 0..1", code="option_invalid", where=f"iou {iou:g}")
    spec, graph = model.spec, model.graph
    assert spec.nms is not None  # a detector's
    configured = spec.nms.iou_threshold
    limit = configured if iou is None else iou
    if limit is None and agnostic:
        raise ConfigError(
            "this model suppresses no boxes, so there is no IoU threshold for agnostic",
            code="option_missing",
            where="agnostic",
            fix=f"give one, too: --iou {NMSConfig().iou_threshold:g}",
        )
    if limit is None:
        return model
    agnostic = agnostic or spec.nms.class_agnostic
    changes = {"iou_threshold": limit, "class_agnostic": agnostic}
    if all(getattr(spec.nms, key) == value for key, value in changes.items()):
        return model
    # Only outputs that are not suppressed yet can take a higher threshold.
    if configured is not None and (isinstance(graph, EagerGraph) or not model.nms_in_graph):
        nms = spec.nms.model_copy(update=changes)
        graph = EagerGraph(graph.model, nms) if isinstance(graph, EagerGraph) else graph
        return make_loaded(spec.model_copy(update={"nms": nms}), graph, model.nms_in_graph)
    if configured is not None and limit > configured:
        raise ConfigError(
            f"the graph of this export suppresses boxes that overlap by more than {configured:g}",
            code="options_conflict",
            where=f"iou {limit:g}",
            fix="use a lower value, the weights, or an export made --without-nms",
        )
    return lambda images: [suppress_rows(rows_R6, limit, agnostic) for rows_R6 in model(images)]


def suppress_rows(rows_R6: np.ndarray, iou: float, agnostic: bool = False) -> np.ndarray:
    """Returns the rows that no row of their class with a higher score overlaps by more than `iou`.

    Args: agnostic: compare rows of all classes.
    """
    if not len(rows_R6):
        return rows_R6
    scores_RC = np.zeros((len(rows_R6), int(rows_R6[:, 0].max()) + 1), np.float32)
    scores_RC[np.arange(len(rows_R6)), rows_R6[:, 0].astype(int)] = rows_R6[:, 1]
    count = len(rows_R6)
    nms = {"score_threshold": 0.0, "iou_threshold": iou, "candidates": count, "keep": count}
    nms |= {"multi_label": False, "class_agnostic": agnostic}
    return suppress(scores_RC, rows_R6[:, 2:], nms)


@dataclass(frozen=True)
class Wanted:
    """The choice of boxes to keep.

    threshold: lowest score.  whence: its origin, in words; "" if the user set it.
    class_ids: None: all classes.
    """

    threshold: float
    whence: str
    class_ids: frozenset[int] | None

    def of_classes(self, rows_R6: np.ndarray) -> np.ndarray:
        """Returns the rows of these classes, regardless of their score."""
        if self.class_ids is None:
            return rows_R6
        return rows_R6[np.isin(rows_R6[:, 0], list(self.class_ids))]

    def of(self, rows_R6: np.ndarray) -> np.ndarray:
        """Returns the rows to keep."""
        return self.of_classes(rows_R6[rows_R6[:, 1] >= self.threshold])


def wanted(
    spec: InferenceSpec,
    threshold: float | None,
    classes: Sequence[str | int] | str | int | None,
    warn: Callable[[str], None],
) -> Wanted:
    """Checks the threshold and classes that the user requests.

    Args:
        threshold: None uses the threshold of the best F1 in the model card, or else 0.25.
        classes: names or numbers from 0; None: all.
        warn: called if the model itself drops requested boxes.
    Raises: ConfigError: the threshold is out of range, or a class is unknown.
    """
    spec_content = spec.model_dump(mode="json")
    if threshold is None:
        threshold, whence = default_threshold(spec_content)
    elif 0 <= threshold <= 1:
        whence = ""
    else:
        raise ConfigError("expected 0..1", code="option_invalid", where=f"threshold {threshold:g}")
    if not whence and (warning := lost_below(spec_content, threshold)):
        warn(warning)
    if classes is None:
        return Wanted(threshold, whence, None)
    names = [classes] if isinstance(classes, str | int) else classes
    numbers = (find_class(name, spec.class_names, "the model", "classes") for name in names)
    return Wanted(threshold, whence, frozenset(numbers))


def make_loaded(spec: InferenceSpec, graph: Graph, nms_in_graph: bool) -> LoadedModel:
    """Builds a model from a graph and its description; see `LoadedModel`."""
    predictor = Predictor.of_graph(spec.model_dump(mode="json"), graph, nms_in_graph)
    return LoadedModel(spec, graph, nms_in_graph, predictor)


def require_task(spec: InferenceSpec, task: str, where: str) -> None:
    """Checks that a model is for this task.

    Raises: ConfigError: it is for another task.
    """
    if spec.task != task:
        raise ConfigError(
            f"this model can only {spec.task}, not {task}",
            code="model_of_other_task",
            where=where,
            fix="run classifiers with `ppdist predict`",
        )


def detections(frame: Frame, rows_R6: np.ndarray, spec: InferenceSpec) -> Detections:
    """Converts the rows of one image to Detections, in the same order."""
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
