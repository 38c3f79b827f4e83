"""Runs a model that `ppdist export` wrote.

This file works on its own, wherever you copy it:

    predictor = Predictor("export")                       # the folder that holds infer.yml
    for rows in predictor([image]):                       # images: uint8 RGB [H, W, 3], any size
        for label, score, x1, y1, x2, y2 in rows: ...     # pixels of that image, best first

It needs numpy, opencv-python-headless, and one of onnxruntime, openvino and paddlepaddle.  ppdist
itself uses it, even for models that are not exported.
"""

import functools
import hashlib
import importlib.util
import json
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import cv2
import numpy as np

SPEC_FILE = "infer.yml"
_INTERPOLATIONS = {"cubic": cv2.INTER_CUBIC, "linear": cv2.INTER_LINEAR}
_PACKAGES = {
    "openvino": "openvino", "onnx": "onnxruntime", "paddle": "paddle"
}  # fmt: skip
RUNTIMES = {
    "openvino": "OpenVINO", "onnx": "ONNX Runtime", "paddle": "Paddle Inference",
}  # fmt: skip
_ON_CPU = {  # backends that `auto` tries on a CPU for each number format, the fastest first
    "float32": ("onnx", "openvino", "paddle"),
    "int8": ("openvino", "onnx"),
    "bfloat16": ("openvino",),
}
_CHECKED_OPENVINO = {"float32": "openvino", "int8": "openvino_int8"}  # sections of infer.yml
_GPU_MEMORY_MB = 256  # memory that Paddle reserves at the start
_MOST_SHAPES = 16  # most compiled models that are kept in OpenVINO, one per input shape
_COMPARED_AT_ONCE = 64  # boxes
USUAL_THRESHOLD = 0.25  # confidence threshold, if no evaluation set one
Backend = Literal["auto", "paddle", "onnx", "openvino"]


class PredictorError(ValueError):
    """The error for problems that the user can fix; the message says how."""


class Graph(Protocol):
    """A loaded model with one input; any thread may call it."""

    output_names: tuple[str, ...]

    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Runs the model.

        Args: batch_B3HW: float32, as returned by `Predictor.prepare`.
        Returns: all outputs, in order.
        """


class Predictor:
    """An exported detector or classifier; any threads may call it.

    With Paddle Inference and OpenVINO, calls run one after another, because a model has one set of
    inputs; ONNX Runtime runs several at once.

    Args:
        directory: folder with infer.yml and the files it names.
        backend: auto selects the fastest backend that is installed and with which the export was
            checked, see `chosen_backend`.
        threads: number of CPU threads per prediction.
        device: gpu needs a CUDA build of the package (onnxruntime-gpu, paddlepaddle-gpu).
        int8: True uses the quantised ONNX model of the export instead of the float32 model.
        bfloat16: True lets OpenVINO compute in bfloat16: faster, less exact, only on processors
            with support for it.
    Raises: PredictorError: the folder holds no usable model, or no installed package can run it.

    Attributes:
        spec: the content of infer.yml.
        backend: the runtime of the model: onnx, openvino or paddle; "" for `of_graph`.
        runtime: description of backend, number format and threads.
        doubt: why the runtime may compute wrong results, for the user; "" if there is no doubt.
        class_names: names of class 0, 1, ...
        identity: name and SHA-256 of the model's file, see `identity`; not set by `of_graph`.
    """

    def __init__(
        self,
        directory: str | Path,
        backend: Backend = "auto",
        threads: int = 1,
        device: Literal["cpu", "gpu"] = "cpu",
        int8: bool = False,
        bfloat16: bool = False,
    ) -> None:
        if threads < 1:
            raise PredictorError(f"threads {threads}: expected 1 or more")
        directory = Path(directory)
        self.spec = read_spec(directory)
        kind = "bfloat16" if bfloat16 else "int8" if int8 else "float32"
        if bfloat16 and int8:
            raise PredictorError("int8 and bfloat16: choose one")
        try:
            self.backend = chosen_backend(self.spec, backend, device, kind)
        except PredictorError as error:
            raise PredictorError(f"{directory}: {error}") from None
        self.class_names: tuple[str, ...] = tuple(self.spec["class_names"])
        section = self.spec[_section_of(self.backend, int8)]
        files = [directory / name for name in section["files"]]
        for file in files:
            if not file.is_file():
                raise PredictorError(f"{file}: named by {SPEC_FILE} but not there; export again")
            require_described(file, self.spec.get("sha256", {}))
        self._graph: Graph
        if self.backend == "paddle":
            self._graph = PaddleGraph(*files, device=device, threads=threads)
        elif self.backend == "openvino":
            if bfloat16 and not has_bfloat16():
                raise PredictorError(
                    "bfloat16: this processor has no instructions for it; leave it out"
                )
            self._graph = OpenVinoGraph(files[0], threads, bfloat16)
        else:
            self._graph = OnnxGraph(files[0], threads, onnx_providers(device))
        device_text = "on the card" if device == "gpu" else f"threads: {threads}"
        self.runtime = f"{RUNTIMES[self.backend]}, {kind}, {device_text}"
        self.doubt = doubt_about(self.spec, self.backend, kind)
        self._nms_in_graph: bool = section["nms_in_graph"]
        self.identity = identity(self.spec, files[-1].name)

    @classmethod
    def of_graph(cls, spec: dict[str, Any], graph: Graph, nms_in_graph: bool) -> "Predictor":
        """Creates a predictor for a graph that is already open, in any runtime.

        Args: spec: the content of infer.yml.  nms_in_graph: the graph's outputs are rows and
            counts.
        """
        self = cls.__new__(cls)
        self.spec, self.backend, self.class_names = spec, "", tuple(spec["class_names"])
        self.runtime = self.doubt = ""
        self._graph, self._nms_in_graph = graph, nms_in_graph
        return self

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Predicts on images, all of them as one batch.

        Args: images: uint8 RGB [H, W, 3], upright, each of any size.
        Returns: for each image, float32 rows [R, 6] of class, score, x1, y1, x2, y2 in its pixels
            and inside it, best first; for a classifier, the probabilities [C].
        Raises: PredictorError: an item is not such an image, or the runtime fails.
        """
        if not len(images):
            return []
        batch_B3HW = self.prepare(images)
        sizes = [(image.shape[0], image.shape[1]) for image in images]
        return self.finish(self.run(batch_B3HW), sizes)

    def prepare(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Converts images to the input of the graph: float32 [B, 3, H, W]."""
        description = self.spec["input"]
        height, width = description["size"]
        batch_B3HW = np.empty((len(images), 3, height, width), np.float32)
        for position, image_HW3 in enumerate(images):
            _require_image(image_HW3, position)
            fitted_HW3 = fit(image_HW3, (height, width), self.spec["resize"])
            for channel_HW, plane_HW in zip(batch_B3HW[position], cv2.split(fitted_HW3)):
                channel_HW[:] = plane_HW
        if description.get("normalised"):
            mean_311, std_311 = (
                np.array(description["normalised"][key], np.float32).reshape(3, 1, 1)
                for key in ("mean", "std")
            )
            batch_B3HW /= 255
            batch_B3HW -= mean_311
            batch_B3HW /= std_311
        return batch_B3HW

    def run(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Runs the graph; a graph of fixed batch size runs image by image."""
        if self.spec["input"]["dynamic_batch"] or len(batch_B3HW) == 1:
            return self._graph(batch_B3HW)
        outputs_B = [self._graph(batch_B3HW[index : index + 1]) for index in range(len(batch_B3HW))]
        return tuple(np.concatenate(parts) for parts in zip(*outputs_B))

    def finish(
        self, outputs: Sequence[np.ndarray], sizes: Sequence[tuple[int, int]]
    ) -> list[np.ndarray]:
        """Converts the outputs of the graph to the results of `__call__`.

        Args: sizes: (height, width) of each image.
        """
        if self.spec["task"] == "classify":
            return list(outputs[0])
        if self._nms_in_graph:
            rows_R6, count_B = outputs
            detections = np.split(rows_R6.reshape(-1, 6), np.cumsum(count_B)[:-1])
        else:
            nms = self.spec["nms"]
            detections = [suppress(scores, boxes, nms) for scores, boxes in zip(*outputs)]
        return [self._map_to_image(rows_R6, size) for rows_R6, size in zip(detections, sizes)]

    def _map_to_image(self, rows_R6: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Maps rows from input pixels to pixels of an image of (height, width), best first."""
        rows_R6 = rows_R6[np.argsort(-rows_R6[:, 1], kind="stable")]  # a copy
        height, width = size
        place = placed(size, self.spec["input"]["size"], self.spec["resize"]["mode"])
        axes = (([2, 4], place.left, place.wide, width), ([3, 5], place.top, place.tall, height))
        for columns, start, extent, original in axes:
            moved = (rows_R6[:, columns] - start) * (original / extent)
            rows_R6[:, columns] = moved.clip(0, original)
        return rows_R6


class Place(NamedTuple):
    """The position of an image in the input, in input pixels."""

    left: int
    top: int
    wide: int
    tall: int


def placed(size: tuple[int, int], input_size: tuple[int, int], mode: str) -> Place:
    """Computes the position of an image in the input; sizes are (height, width).

    Args: mode: letterbox or a stretch; infer.yml has the formulas.
    """
    if mode != "letterbox":
        return Place(0, 0, input_size[1], input_size[0])
    scale = min(input_size[0] / size[0], input_size[1] / size[1])
    tall, wide = (
        max(1, min(room, math.floor(side * scale + 0.5))) for room, side in zip(input_size, size)
    )
    return Place((input_size[1] - wide) // 2, (input_size[0] - tall) // 2, wide, tall)


def fit(image_HW3: np.ndarray, size: tuple[int, int], resize: dict[str, Any]) -> np.ndarray:
    """Resizes an image to the (height, width) of the input, as evaluation does."""
    interpolation = resize["interpolation"]
    height, width = size
    if resize["mode"] == "centre_crop":
        return _resize(_centre_crop(image_HW3, size), (width, height), interpolation)
    place = placed((image_HW3.shape[0], image_HW3.shape[1]), size, resize["mode"])
    fitted_HW3 = _resize(image_HW3, (place.wide, place.tall), interpolation)
    if (place.wide, place.tall) == (width, height):
        return fitted_HW3
    below, beside = height - place.top - place.tall, width - place.left - place.wide
    return cv2.copyMakeBorder(
        fitted_HW3, place.top, below, place.left, beside, cv2.BORDER_CONSTANT, value=resize["fill"]
    )


def _resize(image_HW3: np.ndarray, size_wh: tuple[int, int], interpolation: str) -> np.ndarray:
    if (image_HW3.shape[1], image_HW3.shape[0]) == size_wh:
        return image_HW3
    if interpolation == "antialiased":
        return antialiased(image_HW3, size_wh)
    return cv2.resize(image_HW3, size_wh, interpolation=_INTERPOLATIONS[interpolation])


def antialiased(image_HW3: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
    """Resizes a uint8 image as Pillow's bilinear filter does, without Pillow.

    It resizes columns first, then rows.  Pillow 13 begins with the side that shrinks more, which
    changes some values by 1; with the same order the results are equal.
    """
    for length in size_wh:
        image_HW3 = cv2.transpose(image_HW3)
        if len(image_HW3) != length:
            rows_LK = image_HW3.reshape(len(image_HW3), -1)
            image_HW3 = _average_rows(rows_LK, length).reshape(length, -1, 3)
    return image_HW3


def _average_rows(rows_LK: np.ndarray, length: int) -> np.ndarray:
    """Computes `length` rows, each a mean of rows_LK (uint8) weighted by a triangle."""
    means = np.empty((length, rows_LK.shape[1]), np.uint8)
    for row, (first, weight_R) in enumerate(_triangle_weights(len(rows_LK), length)):
        means[row] = weight_R @ rows_LK[first : first + len(weight_R)] + 0.5
    return means


@functools.lru_cache(maxsize=16)
def _triangle_weights(count: int, length: int) -> list[tuple[int, np.ndarray]]:
    """Returns the first row and the weights of each of `length` means of `count` rows.

        weight_i = max(0, 1 - |i + 1/2 - centre| / reach) / sum,  reach = max(1, count / length)

    Weights are rounded to 22 bits as in Pillow's Resample.c, so that sums are exact in float64.
    """
    scale = count / length
    reach = max(1.0, scale)
    result = []
    for row in range(length):
        centre = (row + 0.5) * scale
        first = max(0, int(centre - reach + 0.5))
        last = min(count, int(centre + reach + 0.5))
        distance_R = np.abs(np.arange(first, last) - centre + 0.5)
        weight_R = np.maximum(0, 1 - distance_R * (1 / reach))
        result.append((first, np.floor(weight_R / weight_R.sum() * 2**22 + 0.5) / 2**22))
    return result


def _centre_crop(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crops the largest centred part with the aspect ratio of `size` (height, width)."""
    sides = image_HW3.shape[:2]
    scale = min(sides[0] / size[0], sides[1] / size[1])
    tall, wide = (
        min(side, max(1, math.floor(part * scale + 0.5))) for side, part in zip(sides, size)
    )
    top, left = (sides[0] - tall) // 2, (sides[1] - wide) // 2
    return image_HW3[top : top + tall, left : left + wide]


def suppress(scores_NC: np.ndarray, boxes_N4: np.ndarray, nms: dict[str, Any]) -> np.ndarray:
    """Suppresses non-maximum predictions of one image, as in exported graphs.

    A prediction counts for every class with a score above `score_threshold` (with `multi_label`
    off: for its best class only).  In each class the best `candidates` predictions compete; one is
    dropped if its IoU with a better, kept one of the class is above `iou_threshold`.  The best
    `keep` of all classes are returned.  With `class_agnostic` a prediction counts for its best
    class only, and all compete as if they were of one class; descriptions of earlier versions lack
    it and are per class.  If `iou_threshold` is null, none suppresses another, and `candidates` and
    `class_agnostic` have no effect.

    Returns: rows_R6, float32: class, score, x1, y1, x2, y2; best first, then by lower class (with
        `class_agnostic` in the order of the predictions).
    """
    is_agnostic = nms["iou_threshold"] is not None and nms.get("class_agnostic", False)
    if is_agnostic or not nms["multi_label"]:
        best_N = scores_NC.argmax(axis=1)
        only_N1 = np.take_along_axis(scores_NC, best_N[:, None], axis=1)
        scores_NC = np.where(np.arange(scores_NC.shape[1]) == best_N[:, None], only_N1, 0)
    passes_NC = scores_NC > nms["score_threshold"]
    rank = scores_NC.shape[0] - nms["candidates"]
    if rank > 0 and nms["iou_threshold"] is not None and not is_agnostic:
        # Only the candidates of a class are sorted: a net that has learned little has millions.
        passes_NC &= scores_NC >= np.partition(scores_NC, rank, axis=0)[rank]
    index_P, labels_P = np.nonzero(passes_NC)
    scores_P = scores_NC[index_P, labels_P]
    if nms["iou_threshold"] is None:
        best = np.lexsort((index_P, labels_P, -scores_P))[: nms["keep"]]
        columns = [labels_P[best], scores_P[best], boxes_N4[index_P[best]]]
        return np.column_stack(columns).astype(np.float32)
    # Predictions compete within their group: their class, or all.
    groups_P = np.zeros_like(labels_P) if is_agnostic else labels_P
    order_P = np.lexsort((index_P, -scores_P, groups_P))  # group after group, each best first
    # Rank within the group: the position minus that of the group's first prediction.
    rank_in_group_P = np.arange(len(order_P)) - np.searchsorted(
        groups_P[order_P], groups_P[order_P]
    )
    order_P = order_P[rank_in_group_P < nms["candidates"]]
    labels_P, scores_P, boxes_P4 = labels_P[order_P], scores_P[order_P], boxes_N4[index_P[order_P]]
    groups_P = groups_P[order_P]
    selected = _select_boxes(boxes_P4, groups_P, scores_P, nms["iou_threshold"], nms["keep"])
    return np.column_stack([labels_P[selected], scores_P[selected], boxes_P4[selected]]).astype(
        np.float32
    )


def _select_boxes(
    boxes_P4: np.ndarray,
    groups_P: np.ndarray,
    scores_P: np.ndarray,
    threshold: float,
    max_detections: int,
) -> list[int]:
    """Selects the predictions to keep; returns their indices, best first.

    The predictions are sorted by group, best first; one suppresses those of its group.
    """
    corners_4P = np.ascontiguousarray(boxes_P4.T)
    x1_P, y1_P, x2_P, y2_P = corners_4P
    area_P = np.maximum(x2_P - x1_P, 0) * np.maximum(y2_P - y1_P, 0)

    def suppress_KS(by_S: np.ndarray, candidate_K: np.ndarray) -> np.ndarray:
        x1_S, y1_S, x2_S, y2_S = corners_4P[:, by_S]
        x1_K1, y1_K1, x2_K1, y2_K1 = corners_4P[:, candidate_K, None]
        width_KS = np.minimum(x2_K1, x2_S) - np.maximum(x1_K1, x1_S)
        height_KS = np.minimum(y2_K1, y2_S) - np.maximum(y1_K1, y1_S)
        intersection_KS = width_KS * height_KS
        iou_KS = intersection_KS / (area_P[by_S] + area_P[candidate_K, None] - intersection_KS)
        # Two boxes with zero area at the same position have no IoU; one of them is dropped.
        stays_KS = (iou_KS <= threshold) | (width_KS < 0) | (height_KS < 0)
        return ~stays_KS & (groups_P[candidate_K, None] == groups_P[by_S])

    # Of many thousands, the best are compared with those that are selected already, and among
    # themselves, until enough are selected: most are never looked at.
    best_first_P = np.argsort(-scores_P, kind="stable")
    selected: list[int] = []
    with np.errstate(invalid="ignore", divide="ignore"):
        for first in range(0, len(best_first_P), _COMPARED_AT_ONCE):
            block_K = best_first_P[first : first + _COMPARED_AT_ONCE]
            if selected:
                block_K = block_K[~suppress_KS(np.array(selected), block_K).any(axis=1)]
            suppressed_K, drops_KK = np.zeros(len(block_K), bool), suppress_KS(block_K, block_K)
            for at, prediction in enumerate(block_K.tolist()):
                if suppressed_K[at]:
                    continue
                selected.append(prediction)
                if len(selected) == max_detections:
                    return selected
                suppressed_K |= drops_KK[:, at]
    return selected


def onnx_providers(device: str) -> list[str]:
    """Lists ONNX Runtime's providers for a device, the preferred ones first."""
    return [*["CUDAExecutionProvider"] * (device == "gpu"), "CPUExecutionProvider"]


class OnnxGraph:
    """An ONNX model in ONNX Runtime.

    Args:
        providers: see `onnx_providers`.
        spinning: True lets threads spin while they wait for one another.
    Raises: ImportError: ONNX Runtime is not installed.  PredictorError: it cannot load the file.
    """

    def __init__(
        self,
        file: Path,
        threads: int,
        providers: Sequence[str],
        spinning: bool = True,
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # ONNX Runtime's warnings about unused constants are noise for users.
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "1" if spinning else "0"
        )
        try:
            self._session = onnxruntime.InferenceSession(
                str(file), options, providers=list(providers)
            )
        except Exception as error:
            # ONNX Runtime's exceptions have no narrower common base class.
            raise PredictorError(f"{file}: ONNX Runtime cannot load it: {error}") from error
        # Otherwise ONNX Runtime would silently fall back to the CPU.
        if providers[0] not in self._session.get_providers():
            raise PredictorError(
                "device gpu: ONNX Runtime could not use a GPU; see its messages above"
            )
        self._name = self._session.get_inputs()[0].name
        self.output_names = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        batch_B3HW = np.ascontiguousarray(batch_B3HW, np.float32)
        try:
            return tuple(self._session.run(None, {self._name: batch_B3HW}))
        except Exception as error:
            raise PredictorError(f"ONNX Runtime cannot run this model: {error}") from error


def import_openvino() -> Any:
    """Imports openvino without its report to Google Analytics.

    By default openvino reports its import through a child process, and leaves a file in the home
    folder.  Without openvino_telemetry, which is optional, it does neither.

    Raises: ImportError: openvino is not installed.
    """
    original = sys.modules.get("openvino_telemetry")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules["openvino_telemetry"]
        if original is not None:
            sys.modules["openvino_telemetry"] = original


@functools.cache
def openvino_core() -> Any:
    """Returns the only `openvino.Core` of this process, which lives until the process ends.

    Each Core gives its thread a signal stack and removes it with the last model.  If there are two
    Cores and the first one ends first, the next signal that Python handles crashes the process
    (SIGSEGV).

    Raises: ImportError: OpenVINO is not installed.
    """
    return import_openvino().Core()


def has_bfloat16() -> bool:
    """Returns True if OpenVINO, which must be installed, computes in bfloat16 on this processor."""
    return "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


class OpenVinoGraph:
    """An ONNX model in OpenVINO on the CPU.

    The model is compiled for each input shape: with dynamic shapes OpenVINO (2026.4) takes up to
    twice the time, and the scores of quantised graphs are wrong by 0.3 to 0.5.

    Threads are not pinned to cores: several processes would all use the same first cores.

    Activations in signed integers are computed in float32: OpenVINO's own transformations for low
    precision compute them wrongly (mAP 0.08 instead of 0.50), but unsigned integers correctly.

    Raises: ImportError: it is not installed.  PredictorError: it cannot load the file.
    """

    def __init__(self, file: Path, threads: int, bfloat16: bool = False) -> None:
        # Without this hint OpenVINO may choose bf16 by itself.
        self._settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        try:
            self._model = openvino_core().read_model(str(file))
        except RuntimeError as error:
            raise PredictorError(f"{file}: OpenVINO cannot load it: {error}") from error
        if _has_signed_activations(self._model):
            self._settings["LP_TRANSFORMS_MODE"] = "NO"
        self._requests: dict[tuple[int, ...], Any] = {}  # by shape, the most recently used last
        self._lock = threading.Lock()  # for the request: another call would replace its tensors
        self.output_names = tuple(output.get_any_name() for output in self._model.outputs)

    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        batch_B3HW = np.ascontiguousarray(batch_B3HW, np.float32)
        try:
            with self._lock:
                request = self._find_request(batch_B3HW.shape)
                results = request.infer({0: batch_B3HW}, share_inputs=True)
        except RuntimeError as error:
            raise PredictorError(f"OpenVINO cannot run this model: {error}") from error
        return tuple(results[index] for index in range(len(self.output_names)))

    def _find_request(self, shape: tuple[int, ...]) -> Any:
        """Returns the request for an input shape; compiles the model for a new one."""
        request = self._requests.pop(shape, None)
        if request is None:
            if len(self._requests) == _MOST_SHAPES:
                del self._requests[next(iter(self._requests))]
            self._model.reshape(list(shape))
            compiled = openvino_core().compile_model(self._model, "CPU", self._settings)
            request = compiled.create_infer_request()
        self._requests[shape] = request
        return request


def _has_signed_activations(model: Any) -> bool:
    """Returns True if an openvino.Model rounds activations to int8."""
    return any(
        operation.get_type_name() == "Convert"
        and operation.output(0).get_element_type().get_type_name() == "i8"
        for operation in model.get_ops()
    )


class PaddleGraph:
    """A saved program and its weights in Paddle Inference.

    `enable_memory_optim` is left off: it breaks the predictor of Paddle 3.x.  oneDNN caches kernels
    for every image size that it has seen.

    Args:
        precision: float32; bfloat16 with oneDNN.
    Raises: PredictorError: Paddle cannot load them.
    """

    def __init__(
        self,
        program: Path,
        weights: Path,
        *,
        device: str = "cpu",
        threads: int = 1,
        onednn: bool = True,
        precision: str = "float32",
    ) -> None:
        from paddle import inference

        try:
            config = inference.Config(str(program), str(weights))
            config.disable_glog_info()
            if device == "gpu":
                config.enable_use_gpu(_GPU_MEMORY_MB, 0, inference.PrecisionType.Float32)  # card 0
            else:
                config.disable_gpu()
                config.set_cpu_math_library_num_threads(threads)
                if onednn:
                    config.enable_onednn()
                else:
                    config.disable_onednn()
                if precision == "bfloat16":
                    config.enable_onednn_bfloat16()
            self._predictor = inference.create_predictor(config)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise PredictorError(f"{program}: Paddle cannot load it: {error}") from error
        self._name = self._predictor.get_input_names()[0]
        self.output_names = tuple(self._predictor.get_output_names())
        self._lock = threading.Lock()  # for the handles, which another call would fill

    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        batch_B3HW = np.ascontiguousarray(batch_B3HW, np.float32)
        with self._lock:
            handle = self._predictor.get_input_handle(self._name)
            handle.reshape(batch_B3HW.shape)
            handle.copy_from_cpu(batch_B3HW)
            try:
                self._predictor.run()
            except (RuntimeError, ValueError, IndexError, OSError) as error:
                raise PredictorError(f"Paddle Inference cannot run this model: {error}") from error
            outputs = [self._predictor.get_output_handle(name) for name in self.output_names]
            return tuple(output.copy_to_cpu() for output in outputs)


def read_spec(directory: Path) -> dict[str, Any]:
    """Reads DIR/infer.yml.  Raises: PredictorError: it is missing, or not from an export."""
    file = directory / SPEC_FILE
    try:
        spec = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PredictorError(
            f"{file}: {error.strerror}; expected the folder of an exported model, "
            "which ppdist export makes"
        ) from error
    except ValueError as error:
        raise PredictorError(
            f"{file}: not JSON ({error}); an export of an older version? export again"
        ) from error
    version = spec.get("version") if isinstance(spec, dict) else None
    if version != 1:
        raise PredictorError(f"{file}: version {version}; this program knows version 1")
    missing = {"task", "input", "resize", "class_names", "category_ids"} - set(spec)
    if spec.get("task") == "detect" and not spec.get("nms"):
        missing.add("nms")
    if missing:
        raise PredictorError(f"{file}: {', '.join(sorted(missing))} missing; export again")
    return spec


def digest(file: Path) -> str:
    """Computes the SHA-256 of a file, in hex."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def require_described(file: Path, sha256: Mapping[str, str]) -> None:
    """Checks that a file is the file described in infer.yml.

    Args: sha256: file name -> digest; files without a digest are not checked.
    Raises: PredictorError: the file has another digest.
    """
    expected = sha256.get(file.name)
    if expected is not None and digest(file) != expected:
        raise PredictorError(
            f"{file}: not the file that {SPEC_FILE} describes (its SHA-256 differs); copy the "
            f"export again, or take its sha256 out of {SPEC_FILE} if you changed it on purpose"
        )


def identity(spec: Mapping[str, Any], file: str) -> dict[str, str]:
    """Returns the name of the run that trained a model, and the SHA-256 of the model's file.

    Args: spec: the content of infer.yml.
    """
    lineage = spec.get("lineage") or {}
    name = lineage.get("run") or str(spec.get("model", "")).partition(",")[0]
    return {"name": name, "sha256": spec.get("sha256", {}).get(file, "")}


def default_threshold(spec: dict[str, Any]) -> tuple[float, str]:
    """Returns the default confidence threshold and its origin.

    Args: spec: the content of infer.yml.
    """
    best = spec.get("best_f1_threshold")
    if best is None:
        return USUAL_THRESHOLD, "the usual default: no evaluation has determined a better one"
    return best, "of the best F1 in the last evaluation"


def lost_below(spec: dict[str, Any], threshold: float) -> str:
    """Returns a warning if the model itself drops boxes above the threshold, else ""."""
    score_threshold = spec["nms"]["score_threshold"] if spec.get("nms") else 0.0
    if threshold >= score_threshold:
        return ""
    return (
        f"threshold {threshold:g}: the model itself drops boxes that score {score_threshold:g} or "
        f"less (nms.score_threshold); to keep them, use -o nms.score_threshold={threshold:g} (for "
        "an export: when you export)"
    )


def chosen_backend(spec: dict[str, Any], backend: str, device: str, kind: str) -> str:
    """Returns the requested backend, or the fastest installed and checked one.

    A backend counts as checked if the export compared its outputs with the model's: always for
    Paddle and ONNX Runtime, for OpenVINO if infer.yml has a section `openvino` or `openvino_int8`.
    Which backend is fastest was measured, see docs/dev/performance.md, Predicting.

    Args:
        spec: the content of infer.yml.
        backend: auto, or the only backend to consider.
        kind: number format: float32, bfloat16 or int8.
    Raises: PredictorError: no installed package can run it; the message says why.
    """
    if backend not in ("auto", *_PACKAGES):
        raise PredictorError(f"backend {backend!r}: expected auto, {', '.join(_PACKAGES)}")
    if device not in ("cpu", "gpu"):
        raise PredictorError(f"device {device!r}: expected cpu or gpu")
    candidates: Sequence[str] = (backend,)
    if backend == "auto":
        candidates = ("onnx", "paddle") if device == "gpu" else _ON_CPU[kind]
    reasons = []
    for name in candidates:
        reason = _explain_unusable(name, spec, device, kind)
        section = _CHECKED_OPENVINO.get(kind) if name == "openvino" else None
        is_checked = section is None or spec.get(section)
        if reason is None and backend == "auto" and not is_checked:
            reason = "was not checked in OpenVINO: export where it is installed, or ask for it"
        if reason is None:
            return name
        reasons.append(reason)
    raise PredictorError("; ".join(dict.fromkeys(reasons)))


def doubt_about(spec: Mapping[str, Any], backend: str, kind: str) -> str:
    """Returns a warning if the export did not confirm that a runtime computes the model correctly.

    Args: spec: the content of infer.yml.  backend, kind: as in `chosen_backend`.
    Returns: the warning; "" if the export confirmed it, or the backend needs no such check.
    """
    section = _CHECKED_OPENVINO.get(kind) if backend == "openvino" else None
    if section is None or spec.get(section):
        return ""
    reason = (spec.get("refused") or {}).get(section)
    if reason:
        return f"the export found this model wrong in OpenVINO ({reason}); choose another backend"
    return "the export did not check this model in OpenVINO: export where it is installed"


def _section_of(backend: str, int8: bool) -> str:
    """Returns the section of infer.yml with the files that a backend runs."""
    return "paddle" if backend == "paddle" else "onnx_int8" if int8 else "onnx"


def _explain_unusable(name: str, spec: dict[str, Any], device: str, kind: str) -> str | None:
    """Explains why a backend cannot run an export; None if it can."""
    if kind == "int8" and name == "paddle":
        return "an int8 model runs in ONNX Runtime or OpenVINO only"
    if kind == "bfloat16" and name != "openvino":
        return "bfloat16 is for OpenVINO"
    if name == "openvino" and device == "gpu":
        return "OpenVINO runs on the CPU only"
    if not spec.get(_section_of(name, kind == "int8")):
        format_name = "paddle" if name == "paddle" else "onnx"
        model_kind, flag = ("int8", " --int8") if kind == "int8" else (format_name, "")
        return f"holds no {model_kind} model; export with --format {format_name}{flag}"
    package = _PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        wheel = "paddlepaddle" if package == "paddle" else package
        return f"its {name} model needs {package}, which is not installed: pip install {wheel}"
    if device == "gpu" and not _has_gpu(name):
        return f"device gpu: the {package} that is installed is a build for the CPU"
    return None


def _has_gpu(name: str) -> bool:
    module = importlib.import_module(_PACKAGES[name])
    if name == "paddle":
        return bool(module.is_compiled_with_cuda())
    return onnx_providers("gpu")[0] in module.get_available_providers()


def _require_image(image_HW3: np.ndarray, position: int) -> None:
    shape: tuple[int, ...] = getattr(image_HW3, "shape", ())
    kind = getattr(image_HW3, "dtype", type(image_HW3).__name__)
    if kind != np.uint8 or len(shape) != 3 or shape[2] != 3 or not all(shape):
        raise PredictorError(
            f"image {position}: {kind} {list(shape)}; expected uint8 [height, width, 3], RGB"
        )
