"""Runs eager and exported models on images.

    outputs = graph(images_B3HW)                          open_graph
    rows_R6, ... = predict(images_B3HW)                   EagerPredictor, ExportedPredictor
    rows_R6 = detect(predict, image_HW3, size)            an image of any size, boxes in its pixels

ppdist/predict/ runs them on files, videos and cameras.  docs/dev/performance.md lists the speed-up
from each option of the runtimes.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import paddle

from ppdist.common.errors import ExportError
from ppdist.config.data import Resize
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.data.transforms.classification import resize_centre
from ppdist.data.transforms.geometry import fit_image, resize_for_evaluation
from ppdist.export.spec import SPEC_FILE, InferenceSpec, ModelFileSection, read_spec
from ppdist.losses.nms import multiclass_nms
from ppdist.models.base import Detector
from ppdist.runtime.predictor import (
    RUNTIMES,
    Graph,
    OnnxGraph,
    OpenVinoGraph,
    PaddleGraph,
    PredictorError,
    has_bfloat16,
    onnx_providers,
    require_described,
)

DEFAULT = RuntimeOptions()
_LOGGER = logging.getLogger("ppdist")


def open_graph(files: Sequence[Path], options: RuntimeOptions) -> Graph:
    """Loads the files of a saved model in its runtime.

    Raises: ExportError: the runtime is not installed, lacks the device, or rejects the files.
    """
    backend, is_bfloat16 = options.backend, options.precision == "bfloat16"
    try:
        if backend == "paddle":
            return PaddleGraph(
                *files,
                device=options.device,
                threads=options.threads,
                onednn=options.onednn,
                precision=options.precision,
            )
        if backend == "openvino":
            graph = OpenVinoGraph(files[0], options.threads, is_bfloat16)
            if is_bfloat16 and not has_bfloat16():
                _LOGGER.warning("this processor has no bfloat16: OpenVINO computes in float32")
            return graph
        import onnxruntime

        providers = onnx_providers(options.device)
        provider, available = providers[0], onnxruntime.get_available_providers()
        if provider not in available:
            raise ExportError(
                f"this ONNX Runtime has no {provider}, only {', '.join(available)}",
                code="package_build",
                fix="for a card, install onnxruntime-gpu in place of onnxruntime",
            )
        return OnnxGraph(files[0], options.threads, providers, options.spinning)
    except ImportError as error:
        package = "'ppdist[openvino]'" if backend == "openvino" else "onnxruntime"
        raise ExportError(
            f"{RUNTIMES[backend]}, which is to run it, is not installed",
            code="package_missing",
            where=str(files[0]),
            fix=f"pip install {package}, or choose another backend",
        ) from error
    except PredictorError as error:
        raise ExportError(str(error), code="runtime_load_failed") from error


# --- predictors: images of the input's size in, boxes or probabilities out ------------------------


class Predictor(Protocol):
    """A detector as a function: images in, kept boxes out."""

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        """Predicts the rows_R6 (class, score, xyxy in input pixels) of each image.

        Args: images_B3HW: float32 RGB 0..255.
        """


class EagerPredictor:
    """A dygraph model used directly; it is put into eval mode."""

    def __init__(self, model: Detector, nms: NMSConfig) -> None:
        self.model, self.nms = model, nms
        model.eval()

    @paddle.no_grad()
    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        scores_BNC, boxes_BN4 = self.model.predict(paddle.to_tensor(images_B3HW))
        return suppress(scores_BNC, boxes_BN4, self.nms)


class ExportedPredictor:
    """An exported detector in one of its runtimes.

    Args:
        directory: folder with infer.yml and the files it names.
        options: the runtime, which determines the file to load, and the settings of the runtime.
        spec: the description of the files; None: it is read from infer.yml.
    Raises: ExportError: there is no exported model, it is for another task, or none fits these
        options.
    """

    def __init__(
        self,
        directory: Path,
        options: RuntimeOptions = DEFAULT,
        spec: InferenceSpec | None = None,
    ) -> None:
        self.spec = read_spec(directory) if spec is None else spec
        if self.spec.task != "detect":
            raise ExportError(
                f"made to {self.spec.task}, not to detect",
                code="export_of_other_task",
                where=str(directory),
                fix="use an export of a model to detect",
            )
        self.form, self.graph = open_exported(directory, self.spec, options)

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        first, second = self.graph(graph_input(images_B3HW, self.spec))
        if self.form.nms_in_graph:
            return split_rows(first, second)
        assert self.spec.nms is not None
        with paddle.no_grad():
            return suppress(paddle.to_tensor(first), paddle.to_tensor(second), self.spec.nms)


def open_exported(
    directory: Path, spec: InferenceSpec, options: RuntimeOptions
) -> tuple[ModelFileSection, Graph]:
    """Opens the file of an export that runs with these options.

    Args: spec: the description of the export.
    Returns: the file's description, and its loaded graph.
    Raises: ExportError: the file does not exist, or the runtime rejects it.
    """
    is_int8 = options.precision == "int8"
    form, name, remedy = {
        "paddle": (spec.paddle, "Paddle", "--format paddle"),
        "onnx": (spec.onnx, "ONNX", "--format onnx"),
        "onnx_int8": (spec.onnx_int8, "int8 ONNX", "--format onnx --int8"),
    }["paddle" if options.backend == "paddle" else "onnx_int8" if is_int8 else "onnx"]
    if form is None:
        raise ExportError(
            f"holds no {name} model",
            code="export_lacks_format",
            where=str(directory),
            fix=f"export with {remedy}",
        )
    files = [directory / name for name in form.files]
    for file in files:
        if not file.is_file():
            raise ExportError(
                f"this file, which {SPEC_FILE} lists, is missing",
                code="export_incomplete",
                where=str(file),
                fix="export again",
            )
        try:
            # A file of another export would run, and predict with the wrong class names.
            require_described(file, spec.sha256)
        except PredictorError as error:
            raise ExportError(str(error), code="export_altered") from error
    return form, open_graph(files, options)


def graph_input(images_B3HW: np.ndarray, spec: InferenceSpec) -> np.ndarray:
    """Converts images to graph input: 0..255, or normalised if infer.yml requires it."""
    if spec.input.normalised is None:
        return images_B3HW
    mean, std = spec.input.normalised.mean, spec.input.normalised.std
    mean_311, std_311 = (np.reshape(np.array(x, np.float32), (3, 1, 1)) for x in (mean, std))
    return (images_B3HW / np.float32(255) - mean_311) / std_311


def suppress(
    scores_BNC: paddle.Tensor, boxes_BN4: paddle.Tensor, nms: NMSConfig
) -> list[np.ndarray]:
    """Applies non-maximum suppression; returns rows_R6 (class, score, x1, y1, x2, y2) per image."""
    rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, nms)
    return split_rows(rows_R6.numpy(), count_B.numpy())


def split_rows(rows_R6: np.ndarray, count_B: np.ndarray) -> list[np.ndarray]:
    """Splits the rows of a batch by image."""
    return np.split(rows_R6.reshape(-1, 6), np.cumsum(count_B)[:-1])


# --- one image of any size ------------------------------------------------------------------------


def detect(
    predict: Predictor,
    image_HW3: np.ndarray,
    size: tuple[int, int],
    resize: Resize = "stretch",
) -> np.ndarray:
    """Detects the objects in one image.

    Args:
        image_HW3: uint8 RGB, any size.
        size: height and width of the model's input.
        resize: how the image is resized to that size (`resize.mode` of infer.yml).
    Returns: rows_R6 (class, score, x1, y1, x2, y2), in pixels of the image, clipped to it, best
        first.
    """
    rows_R6 = predict(prepare(image_HW3, size, resize)[None])[0].copy()
    height, width = image_HW3.shape[:2]
    left, top, right, bottom = fit_image(width, height, size, resize).target
    axes = (([2, 4], left, right, width), ([3, 5], top, bottom, height))
    for columns, start, end, extent in axes:
        rows_R6[:, columns] = (rows_R6[:, columns] - start) * (extent / (end - start))
        rows_R6[:, columns] = rows_R6[:, columns].clip(0, extent)
    return rows_R6[np.argsort(-rows_R6[:, 1], kind="stable")]


def prepare(image_HW3: np.ndarray, size: tuple[int, int], resize: Resize = "stretch") -> np.ndarray:
    """Resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_for_evaluation(image_HW3, size, resize).transpose(2, 0, 1).astype(np.float32)


def prepare_centre(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes and centre-crops an RGB image as evaluation does.

    Returns: float32 [3, H, W], 0..255.
    """
    return resize_centre(image_HW3, size).transpose(2, 0, 1).astype(np.float32)
