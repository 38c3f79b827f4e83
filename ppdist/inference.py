"""Finding objects in one image after another: what comes in, what runs, what goes out."""

import time
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import paddle

from ppdist.data.augment.transforms import Resize, fitted, resize_for_evaluation
from ppdist.errors import ExportError, WeightsError
from ppdist.infer_spec import SPEC_FILE, InferenceSpec, read_spec
from ppdist.models.detector import Detector, ImageModel
from ppdist.models.pretrained import load_weights
from ppdist.postprocess import NMSConfig, multiclass_nms


def load_all_weights(model: ImageModel, path: Path) -> None:
    """As `load_weights`, for a model that is used as it is and not trained any further.

    Raises: WeightsError: also where a layer would keep its random initial values.
    """
    report = load_weights(model, path)
    fresh = [key for key in report.fresh if not key.startswith(model.training_only)]
    if fresh:
        raise WeightsError(
            f"{path}: holds no values for {len(fresh)} tensors ({fresh[0]}, ...): "
            f"{report.reason}; give the config these weights were trained with"
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


class PaddlePredictor:
    """An exported model through Paddle Inference.

    Args:
        directory: holds infer.yml and the files it names.
        onednn: use oneDNN kernels (CPU); Paddle 3.x does by default.
        threads: of one prediction on the CPU.
        device: "gpu" needs a CUDA build of Paddle and a card.
    Raises: ExportError: no exported model there, or one of its files is missing.
    """

    def __init__(
        self,
        directory: Path,
        onednn: bool = True,
        threads: int = 1,
        device: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        self.spec, self.graph = open_exported(directory, "detect", onednn, threads, device)

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        first, second = self.graph(images_B3HW)
        assert self.spec.paddle is not None and self.spec.nms is not None
        if self.spec.paddle.nms_in_graph:
            return split_rows(first, second)
        with paddle.no_grad():
            return suppress(paddle.to_tensor(first), paddle.to_tensor(second), self.spec.nms)


def open_exported(
    directory: Path,
    task: Literal["detect", "classify"],
    onednn: bool,
    threads: int,
    device: Literal["cpu", "gpu"],
) -> "tuple[InferenceSpec, InferenceGraph]":
    """The Paddle model of an export and its description.

    Raises: ExportError: no exported model there, of another task, or one of its files is missing.
    """
    spec = read_spec(directory)
    if spec.task != task:
        raise ExportError(f"{directory}: made to {spec.task}, not to {task}; take another export")
    if spec.paddle is None:
        raise ExportError(f"{directory}: holds no Paddle model; export with --format paddle")
    program, weights = (directory / name for name in spec.paddle.files)
    for file in (program, weights):
        if not file.is_file():
            raise ExportError(f"{file}: named by {SPEC_FILE} but not there; export again")
    return spec, InferenceGraph(program, weights, onednn, threads, device)


class InferenceGraph:
    """A saved static graph with one input, in Paddle Inference; gives its outputs in order.

    `enable_memory_optim` is left off: it breaks the predictor of Paddle 3.x.
    """

    def __init__(
        self,
        program: Path,
        weights: Path,
        onednn: bool,
        threads: int,
        device: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        config = paddle.inference.Config(str(program), str(weights))
        config.disable_glog_info()
        if device == "gpu":
            config.enable_use_gpu(256, 0)
        else:
            config.disable_gpu()
            config.set_cpu_math_library_num_threads(threads)
            if onednn:
                config.enable_onednn()
            else:
                config.disable_onednn()
        self._predictor = paddle.inference.create_predictor(config)
        self.input_name = self._predictor.get_input_names()[0]
        self.output_names = tuple(self._predictor.get_output_names())

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        handle = self._predictor.get_input_handle(self.input_name)
        handle.reshape(images_B3HW.shape)
        handle.copy_from_cpu(np.ascontiguousarray(images_B3HW, dtype=np.float32))
        self._predictor.run()
        outputs = (self._predictor.get_output_handle(name) for name in self.output_names)
        return tuple(output.copy_to_cpu() for output in outputs)


def measure_predictor(
    directory: Path,
    image_size: tuple[int, int],
    batch: int,
    threads: int,
    onednn: bool,
    repeats: int = 20,
) -> dict[str, float]:
    """Time of an exported model alone (random pixels in, boxes out) on the CPU.

    Returns: `median_ms` and `p95_ms` of one call, `images_per_second` by the median, `first_ms` of
        the first call (it compiles), and `boxes` kept per image.
    """
    predict = PaddlePredictor(directory, onednn=onednn, threads=threads)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, 3, *image_size)).astype(np.float32)
    milliseconds = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        kept = predict(images)
        milliseconds.append(1000 * (time.perf_counter() - start))
    warm = np.sort(milliseconds[3:])
    median = float(np.median(warm))
    return {
        "median_ms": median,
        "p95_ms": float(np.quantile(warm, 0.95)),
        "images_per_second": 1000 * batch / median,
        "first_ms": milliseconds[0],
        "boxes": sum(len(rows_R6) for rows_R6 in kept) / batch,
    }


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
