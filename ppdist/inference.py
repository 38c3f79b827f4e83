"""Finding objects in one image after another: what comes in, what runs, what goes out.

`infer.yml` stands beside every exported model and is the only source of its pre- and
post-processing; the same description is made from a config when the eager model predicts, so
both roads resize, threshold and map back alike.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import paddle
import yaml
from pydantic import Field

from ppdist.config import Section, parse_config
from ppdist.data.dataset import read_split
from ppdist.data.sample import DetectionSet
from ppdist.data.transforms import resize_for_evaluation
from ppdist.errors import ExportError, UserError, WeightsError
from ppdist.models.detector import Detector
from ppdist.models.pretrained import load_weights
from ppdist.postprocess import NMSConfig, multiclass_nms

if TYPE_CHECKING:
    from ppdist.engine.experiment import ExperimentConfig

SPEC_FILE = "infer.yml"
ROW_COLUMNS = ("class", "score", "x1", "y1", "x2", "y2")


class InputSection(Section):
    """The one input: raw pixels; the normalisation is part of the graph."""

    name: str = Field(default="images", description="Name of the input.")
    dtype: Literal["float32"] = Field(default="float32", description="Type of its numbers.")
    layout: Literal["BCHW"] = Field(default="BCHW", description="Order of its axes.")
    colour: Literal["rgb"] = Field(default="rgb", description="Order of the three channels.")
    pixel_range: tuple[float, float] = Field(
        default=(0.0, 255.0), description="Smallest and largest pixel; nothing is subtracted."
    )
    size: tuple[int, int] = Field(description="Height and width to resize to, pixels.")
    size_multiple: int = Field(
        default=32, gt=0, description="Height and width must be multiples of this, pixels."
    )
    dynamic_batch: bool = Field(default=True, description="Any number of images at once.")
    dynamic_size: bool = Field(default=True, description="Any size, not only `size`.")


class ResizeSection(Section):
    """How an image becomes the input, and a box of the output a box of the image."""

    mode: Literal["stretch"] = Field(
        default="stretch", description="Height and width are scaled each on its own; no padding."
    )
    interpolation: Literal["cubic"] = Field(
        default="cubic", description="OpenCV INTER_CUBIC on 8-bit pixels, rounded and clipped."
    )
    orientation: Literal["upright"] = Field(
        default="upright", description="The image turned as its EXIF data say, before the resize."
    )
    map_back: str = Field(
        default="x * image_width / input_width, y * image_height / input_height",
        description="Boxes are in input pixels; this gives pixels of the image.",
    )


class OutputSection(Section):
    """One output of one of the files."""

    name: str = Field(description="Name in the file.")
    shape: str = Field(description="Its axes: B images, N predictions, C classes, R rows kept.")
    meaning: str = Field(description="What the numbers are.")


class ModelFileSection(Section):
    """One exported form of the model."""

    files: tuple[str, ...] = Field(description="File names beside infer.yml.")
    nms_in_graph: bool = Field(description="False: apply `nms` to scores and boxes afterwards.")
    outputs: tuple[OutputSection, ...] = Field(description="In the order the runtime gives them.")
    max_score_error: float = Field(description="Largest difference from eager seen; 0..1.")
    max_box_error: float = Field(description="Largest difference from eager seen, pixels.")


class InferenceSpec(Section):
    """Everything a program needs to use the exported model; the content of infer.yml."""

    version: Literal[1] = Field(default=1, description="Version of this description.")
    model: str = Field(description="What was exported, for the reader.")
    made_with: str = Field(default="", description="Versions of ppdist and Paddle.")
    input: InputSection = Field(description="The input.")
    resize: ResizeSection = Field(default=ResizeSection(), description="Image to input.")
    nms: NMSConfig = Field(description="Thresholds of the non-maximum suppression.")
    class_names: tuple[str, ...] = Field(description="Name of class 0, 1, ...")
    category_ids: tuple[int, ...] = Field(description="What a COCO result calls class 0, 1, ...")
    paddle: ModelFileSection | None = Field(default=None, description="For Paddle Inference.")
    onnx: ModelFileSection | None = Field(default=None, description="For ONNX runtimes.")


def validation_set(config: "ExperimentConfig", warn: Callable[[str], None]) -> DetectionSet | None:
    """The set whose class names a model has; None, and a warning, where it is not at hand."""
    try:
        return read_split(config.data, "val", config.model.num_classes)
    except UserError as error:
        warn(f"class names are not those of the validation set, which cannot be read: {error}")
        return None


def load_all_weights(model: Detector, path: Path) -> None:
    """As `load_weights`, for a model that is used as it is and not trained any further.

    Raises: WeightsError: also where a layer would keep its random initial values.
    """
    report = load_weights(model, path)
    if report.fresh:
        raise WeightsError(
            f"{path}: holds no values for {len(report.fresh)} tensors ({report.fresh[0]}, ...): "
            f"{report.reason}; give the config these weights were trained with"
        )


def describe(config: "ExperimentConfig", dataset: DetectionSet | None) -> InferenceSpec:
    """The description of an experiment's model, as evaluation uses it; nothing exported yet.

    Args: dataset: gives class names and category ids; None: what the config names, and 1, 2, ...
    """
    shown = config.model.model_dump(exclude_none=True, exclude={"pretrained", "image_size"})
    count = config.model.num_classes
    names = config.data.class_names or tuple(f"class {i}" for i in range(count))
    return InferenceSpec(
        model=", ".join(f"{key}: {value}" for key, value in shown.items()),
        input=InputSection(size=config.model.image_size),
        nms=config.nms,
        class_names=dataset.class_names if dataset else names,
        category_ids=dataset.category_ids if dataset else tuple(range(1, count + 1)),
    )


def read_spec(directory: Path) -> InferenceSpec:
    """Reads DIR/infer.yml.  Raises: ExportError: no exported model there; ConfigError: bad file."""
    file = directory / SPEC_FILE
    if not file.is_file():
        raise ExportError(
            f"{directory}: no {SPEC_FILE} here, so this is not an exported model; "
            f"make one with tools/export.py -c CONFIG -w WEIGHTS --out {directory}"
        )
    return parse_config(file, (), InferenceSpec)


def write_spec(directory: Path, spec: InferenceSpec) -> None:
    text = yaml.safe_dump(
        spec.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True
    )
    (directory / SPEC_FILE).write_text(
        "# Pre- and post-processing of the model beside this file; written by tools/export.py.\n"
        + text,
        encoding="utf-8",
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
        images = self.model.normalize(paddle.to_tensor(images_B3HW))
        scores_BNC, boxes_BN4 = self.model.decode(self.model(images))
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
        self.spec = read_spec(directory)
        if self.spec.paddle is None:
            raise ExportError(f"{directory}: holds no Paddle model; export with --format paddle")
        program, weights = (directory / name for name in self.spec.paddle.files)
        for file in (program, weights):
            if not file.is_file():
                raise ExportError(f"{file}: named by {SPEC_FILE} but not there; export again")
        self.nms_in_graph = self.spec.paddle.nms_in_graph
        self.graph = InferenceGraph(program, weights, onednn, threads, device)

    def __call__(self, images_B3HW: np.ndarray) -> list[np.ndarray]:
        first, second = self.graph(images_B3HW)
        if self.nms_in_graph:
            return split_rows(first, second)
        with paddle.no_grad():
            return suppress(paddle.to_tensor(first), paddle.to_tensor(second), self.spec.nms)


def usable_device() -> Literal["cpu", "gpu"]:
    """gpu where this Paddle can use a card."""
    compiled = paddle.device.is_compiled_with_cuda()
    return "gpu" if compiled and paddle.device.cuda.device_count() > 0 else "cpu"


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


def prepare(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_for_evaluation(image_HW3, size).transpose(2, 0, 1).astype(np.float32)


def detect(predict: Predictor, image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Objects in one image.

    Args:
        image_HW3: uint8 RGB, any size.
        size: height and width the model gets.
    Returns: rows_R6 (class, score, x1, y1, x2, y2), pixels of the image, inside it, best first.
    """
    rows_R6 = predict(prepare(image_HW3, size)[None])[0].copy()
    height, width = image_HW3.shape[:2]
    for low, high, extent in ((2, 4, (width, size[1])), (3, 5, (height, size[0]))):
        rows_R6[:, [low, high]] *= extent[0] / extent[1]
        rows_R6[:, [low, high]] = rows_R6[:, [low, high]].clip(0, extent[0])
    return rows_R6[np.argsort(-rows_R6[:, 1], kind="stable")]
