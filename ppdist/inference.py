"""Finding objects in one image after another: what comes in, what runs, what goes out."""

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import paddle

from ppdist.config.data import Resize
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.data.augment.transforms import fitted, resize_for_evaluation
from ppdist.errors import ExportError, WeightsError
from ppdist.infer_spec import SPEC_FILE, InferenceSpec, ModelFileSection, read_spec
from ppdist.models.detector import Detector, ImageModel
from ppdist.models.pretrained import load_weights
from ppdist.postprocess import multiclass_nms
from ppdist.runtime import DEFAULT, Graph, OnnxGraph, PaddleGraph


def load_all_weights(model: ImageModel, path: Path) -> None:
    """As `load_weights`, for a model that is used as it is and not trained any further.

    Raises: WeightsError: also where a layer would keep its random initial values, or start as a
        copy of another.
    """
    report = load_weights(model, path)
    if report.copied:
        raise WeightsError(
            f"{report.copied[0]}: that starts a training, it has not learned to predict without "
            "suppression",
            code="weights_of_other_config",
            where=str(path),
            fix="give the config these weights were trained with",
        )
    fresh = [key for key in report.fresh if not key.startswith(model.training_only)]
    if fresh:
        raise WeightsError(
            f"holds no values for {len(fresh)} tensors ({fresh[0]}, ...): {report.reason}",
            code="weights_of_other_config",
            where=str(path),
            fix="give the config these weights were trained with",
        )


class Predictor(Protocol):
    """Images in, kept boxes out."""

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        """Args: float32 RGB 0..255.  Returns: per image rows_R6 (class, score, xyxy input px)."""


class EagerPredictor:
    """The dygraph model as it stands; it is put into eval mode."""

    def __init__(self, model: Detector, nms: NMSConfig) -> None:
        self.model, self.nms = model, nms
        model.eval()

    @paddle.no_grad()
    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        scores_BNC, boxes_BN4 = self.model.predict(paddle.to_tensor(images_B3HW))
        return suppress(scores_BNC, boxes_BN4, self.nms)


class ExportedPredictor:
    """An exported detector.

    Args:
        directory: holds infer.yml and the files it names.
        options: the runtime, and so which of the files; how it runs.
    Raises: ExportError: no exported model there, or not the one of these options.
    """

    def __init__(self, directory: Path, options: RuntimeOptions = DEFAULT) -> None:
        self.spec, self.form, self.graph = open_exported(directory, "detect", options)

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        first, second = self.graph(graph_input(images_B3HW, self.spec))
        if self.form.nms_in_graph:
            return split_rows(first, second)
        assert self.spec.nms is not None
        with paddle.no_grad():
            return suppress(paddle.to_tensor(first), paddle.to_tensor(second), self.spec.nms)


def open_exported(
    directory: Path, task: Literal["detect", "classify"], options: RuntimeOptions
) -> tuple[InferenceSpec, ModelFileSection, Graph]:
    """The description of an export, and of it the file that runs with these options, ready to.

    Raises: ExportError: no exported model there, of another task, without that file, or the
        runtime refuses it.
    """
    spec = read_spec(directory)
    if spec.task != task:
        raise ExportError(
            f"made to {spec.task}, not to {task}",
            code="export_of_other_task",
            where=str(directory),
            fix="take another export",
        )
    form, name, remedy = {
        ("paddle", False): (spec.paddle, "Paddle", "--format paddle"),
        ("onnx", False): (spec.onnx, "ONNX", "--format onnx"),
        ("onnx", True): (spec.onnx_int8, "int8 ONNX", "--format onnx --int8"),
    }[options.backend, options.precision == "int8"]
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
                f"named by {SPEC_FILE} but not there",
                code="export_incomplete",
                where=str(file),
                fix="export again",
            )
    if options.backend == "onnx":
        return spec, form, OnnxGraph(files[0], options)
    return spec, form, PaddleGraph(files[0], files[1], options)


def graph_input(images_B3HW: np.ndarray, spec: InferenceSpec) -> np.ndarray:
    """Images as the graph takes them: 0..255 as they are, or normalised where infer.yml says so."""
    if spec.input.normalised is None:
        return images_B3HW
    mean, std = spec.input.normalised.mean, spec.input.normalised.std
    mean_311, std_311 = (np.reshape(np.array(x, np.float32), (3, 1, 1)) for x in (mean, std))
    return (images_B3HW / np.float32(255) - mean_311) / std_311


def suppress(
    scores_BNC: paddle.Tensor, boxes_BN4: paddle.Tensor, nms: NMSConfig
) -> list[np.ndarray]:
    """Non-maximum suppression; per image rows_R6 (class, score, x1, y1, x2, y2)."""
    rows_R6, count_B = multiclass_nms(scores_BNC, boxes_BN4, nms)
    return split_rows(rows_R6.numpy(), count_B.numpy())


def split_rows(rows_R6: np.ndarray, count_B: np.ndarray) -> list[np.ndarray]:
    """The rows of a batch, image by image."""
    return np.split(rows_R6.reshape(-1, 6), np.cumsum(count_B)[:-1])


def prepare(image_HW3: np.ndarray, size: tuple[int, int], resize: Resize = "stretch") -> np.ndarray:
    """Resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_for_evaluation(image_HW3, size, resize).transpose(2, 0, 1).astype(np.float32)


def detect(
    predict: Predictor,
    image_HW3: np.ndarray,
    size: tuple[int, int],
    resize: Resize = "stretch",
) -> np.ndarray:
    """Objects in one image.

    Args:
        image_HW3: uint8 RGB, any size.
        size: height and width the model gets.
        resize: how the image is brought to it (`resize.mode` of infer.yml).
    Returns: rows_R6 (class, score, x1, y1, x2, y2), pixels of the image, inside it, best first.
    """
    rows_R6 = predict(prepare(image_HW3, size, resize)[None])[0].copy()
    height, width = image_HW3.shape[:2]
    left, top, right, bottom = fitted(width, height, size, resize).target
    axes = (([2, 4], left, right, width), ([3, 5], top, bottom, height))
    for columns, start, end, extent in axes:
        rows_R6[:, columns] = (rows_R6[:, columns] - start) * (extent / (end - start))
        rows_R6[:, columns] = rows_R6[:, columns].clip(0, extent)
    return rows_R6[np.argsort(-rows_R6[:, 1], kind="stable")]
