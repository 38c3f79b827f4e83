"""Predictors: eager and exported models on images and videos.

    outputs = graph(images_B3HW)                          PaddleGraph, OnnxGraph: a file as it is
    rows_R6, ... = predict(images_B3HW)                   EagerPredictor, ExportedPredictor
    probabilities_BC = predict(images_B3HW)               EagerClassifier, ExportedClassifier
    rows_R6 = detect(predict, image_HW3, size)            an image of any size, boxes in its pixels
    labels_K, scores_K = best_classes_of(predict, image_HW3, size)

    report = Objects(out, spec, predict, threshold, warn)  or  Classes(out, spec, predict, warn)
    report.look_at(file, name, picture) of each of find_sources(source), then report.write()

docs/dev/performance.md says what each option of the runtimes brought.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import cv2
import numpy as np
import paddle

from ppdist.common.errors import ConfigError, DataError, ExportError
from ppdist.common.files import make_parent, write_json, writing
from ppdist.config.data import Resize
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.data.image import IMAGE_SUFFIXES, read_image
from ppdist.data.transforms.classification import resize_centre
from ppdist.data.transforms.geometry import fitted, resize_for_evaluation
from ppdist.export.spec import SPEC_FILE, InferenceSpec, ModelFileSection, read_spec
from ppdist.losses.nms import multiclass_nms
from ppdist.metrics.classification import best_classes, rank
from ppdist.models.base import Detector, ImageModel
from ppdist.viz.draw import draw_boxes, draw_classes

DEFAULT = RuntimeOptions()


# --- graphs: one saved model in its runtime -------------------------------------------------------


class Graph(Protocol):
    """A static graph with one input, ready to run."""

    output_names: tuple[str, ...]

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Args: float32.  Returns: all outputs, in the order of `output_names`."""


class PaddleGraph:
    """A saved static graph in Paddle Inference.

    `enable_memory_optim` is left off: it breaks the predictor of Paddle 3.x.  oneDNN keeps the
    kernels of every image size it has met.
    """

    def __init__(self, program: Path, weights: Path, options: RuntimeOptions) -> None:
        precision = paddle.inference.PrecisionType
        config = paddle.inference.Config(str(program), str(weights))
        config.disable_glog_info()
        if options.device == "gpu":
            half = options.precision == "float16"
            kind = precision.Half if half else precision.Float32
            config.enable_use_gpu(options.gpu_memory_mb, 0, kind)
        else:
            config.disable_gpu()
            config.set_cpu_math_library_num_threads(options.threads)
            if options.onednn:
                config.enable_onednn()
            else:
                config.disable_onednn()
            if options.precision == "bfloat16":
                config.enable_onednn_bfloat16()
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


class OnnxGraph:
    """An ONNX file in ONNX Runtime.

    Raises: ExportError: ONNX Runtime is not installed, has no such device, or refuses the file.
    """

    def __init__(self, file: Path, options: RuntimeOptions) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ExportError(
                f"{file} needs ONNX Runtime: pip install onnxruntime (on a card: onnxruntime-gpu)",
                code="package_missing",
            ) from error
        providers = _providers(options)
        wanted, there = providers[0][0], onnxruntime.get_available_providers()
        if wanted not in there:
            raise ExportError(
                f"this ONNX Runtime has no {wanted}, only {', '.join(there)}",
                code="package_build",
                fix="on a card it takes onnxruntime-gpu, which replaces onnxruntime",
            )
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # its warnings about unused constants are noise here
        settings.intra_op_num_threads = options.threads
        settings.add_session_config_entry(
            "session.intra_op.allow_spinning", "1" if options.spinning else "0"
        )
        try:
            self._session = onnxruntime.InferenceSession(str(file), settings, providers=providers)
        except Exception as error:  # its exceptions share no narrower base
            raise ExportError(
                f"ONNX Runtime cannot load {file}: {error}", code="runtime_load_failed"
            ) from error
        self.input_name = self._session.get_inputs()[0].name
        self.output_names = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        images = np.ascontiguousarray(images_B3HW, dtype=np.float32)
        return tuple(self._session.run(None, {self.input_name: images}))


def _providers(options: RuntimeOptions) -> list[tuple[str, dict[str, Any]]]:
    """Of kernels, the preferred one first."""
    providers: list[tuple[str, dict[str, Any]]] = [("CPUExecutionProvider", {})]
    if options.device == "gpu":
        providers.insert(0, ("CUDAExecutionProvider", {}))
    if options.tensorrt:
        half = options.precision == "float16"
        providers.insert(0, ("TensorrtExecutionProvider", {"trt_fp16_enable": half}))
    return providers


# --- predictors: images of the input's size in, boxes or probabilities out ------------------------


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


# images_B3HW, float32 RGB 0..255 -> probabilities_BC, float32
Classifier = Callable[[np.ndarray], np.ndarray]


class EagerClassifier:
    """The dygraph model as it stands; it is put into eval mode."""

    def __init__(self, model: ImageModel) -> None:
        self.model = model
        model.eval()

    @paddle.no_grad()
    def __call__(self, images_B3HW: np.ndarray) -> np.ndarray:
        return self.model.predict(paddle.to_tensor(images_B3HW)).numpy()


class ExportedClassifier:
    """An exported classifier; arguments and errors: ExportedPredictor."""

    def __init__(self, directory: Path, options: RuntimeOptions = DEFAULT) -> None:
        self.spec, _, self.graph = open_exported(directory, "classify", options)

    def __call__(self, images_B3HW: np.ndarray) -> np.ndarray:
        (probabilities_BC,) = self.graph(graph_input(images_B3HW, self.spec))
        return probabilities_BC


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


# --- one image of any size ------------------------------------------------------------------------


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


def prepare(image_HW3: np.ndarray, size: tuple[int, int], resize: Resize = "stretch") -> np.ndarray:
    """Resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_for_evaluation(image_HW3, size, resize).transpose(2, 0, 1).astype(np.float32)


def best_classes_of(
    predict: Classifier, image_HW3: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The surest classes of one image, five at most.

    Args:
        image_HW3: uint8 RGB, any size.
        size: height and width the model gets.
    Returns: labels_K int64, best first, and scores_K float32, 0..1.
    """
    probabilities_1C = predict(prepare_centre(image_HW3, size)[None])
    ranking = rank(probabilities_1C, np.zeros(1, np.int64), np.zeros(1, np.int64))
    return ranking.labels_NK[0], ranking.scores_NK[0]


def prepare_centre(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crops and resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_centre(image_HW3, size).transpose(2, 0, 1).astype(np.float32)


# --- files: images and videos in, pictures and one JSON file out ----------------------------------


def require_own_folder(out: Path, source: Path) -> None:
    """Raises: ConfigError: pictures written to `out` would replace those of `source`, or those
    already in it would pass for results and not be looked at."""
    folder = (source if source.is_dir() else source.parent).resolve()
    above = folder.parents if source.is_dir() else ()
    if out.resolve() in (folder, *above):
        raise ConfigError(
            "the pictures of --source are there, or below, and could be overwritten",
            code="out_holds_source",
            where=f"--out {out}",
            fix="choose another folder",
        )
    inside = source.is_dir() and source.resolve() in out.resolve().parents
    if inside and not _holds_results(out) and out.is_dir() and any(out.iterdir()):
        raise ConfigError(
            "lies in --source and holds files that are no results of this tool",
            code="out_not_ours",
            where=f"--out {out}",
            fix="choose another folder, or empty it",
        )


def require_no_foreign_pictures(out: Path, pictures: Iterable[str]) -> None:
    """Raises: ConfigError: one of these is in `out` already, where no run of this tool ended."""
    taken = [] if _holds_results(out) else [name for name in pictures if (out / name).exists()]
    if taken:
        raise ConfigError(
            f"is there already, one of {len(taken)}, and is no result of this tool",
            code="out_not_ours",
            where=str(out / taken[0]),
            fix="choose another --out, or move it away",
        )


def _holds_results(out: Path) -> bool:
    return any((out / kind.file_name).is_file() for kind in (Objects, Classes))


VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")


def find_sources(source: Path, leave_out: Path | None = None) -> list[Path]:
    """The images and videos a path stands for: itself, or all below it, in name order.

    Args:
        leave_out: a folder whose files do not count (where results are written).
    Raises: DataError: the path does not exist, or there is nothing to look at.
    """
    known = IMAGE_SUFFIXES + VIDEO_SUFFIXES
    if source.is_file():
        if source.suffix.lower() not in known:
            raise DataError(
                f"neither an image nor a video ({_listed(known)})",
                code="not_a_picture",
                where=str(source),
            )
        return [source]
    if not source.is_dir():
        raise DataError(
            "no such image, folder or video", code="source_not_found", where=str(source)
        )
    excluded = leave_out.resolve() if leave_out else None
    found = [
        file
        for file in sorted(source.rglob("*"))
        if file.suffix.lower() in known
        and not file.name.startswith(".")  # ._a.jpg of macOS is no image
        and file.is_file()
        and (excluded is None or excluded not in file.resolve().parents)
    ]
    if not found:
        raise DataError(
            f"no image or video in this folder ({_listed(known)})",
            code="no_images",
            where=str(source),
        )
    return found


def _listed(suffixes: tuple[str, ...]) -> str:
    return " ".join(sorted(suffixes))


def picture_names(names: Sequence[str]) -> list[str]:
    """What the pictures of some sources are called, no two alike: videos become .mp4."""
    taken = set(names)
    result = []
    for name in names:
        chosen = name
        if _is_video(name) and not name.endswith(".mp4"):
            chosen = str(Path(name).with_suffix(".mp4"))
            while chosen in taken:
                name = chosen = f"{name}.mp4"
            taken.add(chosen)
        result.append(chosen)
    return result


def _is_video(name: str | Path) -> bool:
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


@dataclass(frozen=True)
class Frame:
    """One picture to look at."""

    name: str  # path relative to the source; the frames of a video share its name
    index: int | None  # frame number in a video from 0, None for an image
    image_HW3: np.ndarray  # uint8 RGB


def frames_of(file: Path, name: str, report: Callable[[str], None]) -> Iterator[Frame]:
    """The picture of an image file, or each frame of a video; what cannot be read is reported."""
    if file.suffix.lower() in IMAGE_SUFFIXES:
        try:
            image_HW3 = read_image(file)
        except DataError as error:
            report(str(error))
        else:
            yield Frame(name, None, image_HW3)
        return
    try:
        capture = cv2.VideoCapture(_video_path(file))
    except DataError as error:
        report(str(error))
        return
    index = 0
    try:
        while True:
            there, frame_bgr = capture.read()
            if not there:
                break
            yield Frame(name, index, cv2.cvtColor(frame_bgr, cv2.COLOR_BGR2RGB))
            index += 1
    finally:
        capture.release()
    if index == 0:
        report(f"{file}: no frame of this video can be read")


def _video_path(file: Path) -> str:
    """A path as OpenCV takes one of a video.  Raises: DataError: not UTF-8, which crashes it."""
    try:
        return str(file).encode().decode()
    except UnicodeEncodeError as error:
        raise DataError(
            "OpenCV wants UTF-8 in a video's path",
            code="path_not_utf8",
            where=str(file),
            fix="rename it",
        ) from error


class Report:
    """What was found so far.

    Attributes:
        images: of the JSON file.
        unreadable: how many files could not be read.
    """

    file_name: str

    def __init__(self, out: Path, spec: InferenceSpec, warn: Callable[[str], None]) -> None:
        """Args: out: where the JSON file and the pictures go; warn: told of unreadable files."""
        self.out, self.spec = out, spec
        self.images: list[dict[str, Any]] = []
        self.unreadable = 0
        self._warn = warn

    def look_at(self, file: Path, name: str, picture: str) -> str:
        """Predicts one image or every frame of a video, and writes it with what was found.

        Args:
            name: of the file, in the JSON.
            picture: of what is written, below `out`.
        Returns: what was found, in a few words; nothing where the file could not be read.
        """
        before = len(self.images)
        with PictureWriter(file, self.out / picture) as writer:
            for frame in frames_of(file, name, self._complain):
                height, width = frame.image_HW3.shape[:2]
                image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
                if frame.index is not None:
                    image["frame"] = frame.index
                self.images.append({**image, "width": width, "height": height})
                writer.write(self._found_in(frame, self.images[-1]))
        return self._said_of(self.images[before:]) if len(self.images) > before else ""

    def write(self) -> Path:
        """Writes the JSON file.  Raises: UserError: it cannot be written."""
        write_json(self.out / self.file_name, self.content())
        return self.out / self.file_name

    def total(self) -> str:
        """What was found in all, in a few words."""
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """Of the JSON file."""
        pairs = zip(self.spec.category_ids, self.spec.class_names)
        categories = [{"id": number, "name": name} for number, name in pairs]
        return {"images": self.images, "categories": categories}

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        """Notes what the model finds, in `image` or beside it; returns the frame with it drawn."""
        raise NotImplementedError

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        """What was found in one image, or in all frames of a video, in a few words."""
        raise NotImplementedError

    def _complain(self, reason: str) -> None:
        self.unreadable += 1
        self._warn(f"{reason}; skipped")


class Objects(Report):
    """Of a detector; boxes whose score is below the threshold do not count."""

    file_name = "detections.json"

    def __init__(
        self,
        out: Path,
        spec: InferenceSpec,
        predict: Predictor,
        threshold: float,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(out, spec, warn)
        self._predict, self._threshold = predict, threshold
        self._annotations: list[dict[str, Any]] = []

    def total(self) -> str:
        return f"{len(self._annotations)} objects in {len(self.images)} images"

    def content(self) -> dict[str, Any]:
        return {**super().content(), "annotations": self._annotations}

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        size, mode = self.spec.input.size, self.spec.resize.mode
        assert mode != "centre_crop"  # of classifiers
        rows_R6 = detect(self._predict, frame.image_HW3, size, mode)
        rows_R6 = rows_R6[rows_R6[:, 1] >= self._threshold]
        for label, score, x1, y1, x2, y2 in rows_R6.tolist():
            self._annotations.append(
                {
                    "id": len(self._annotations) + 1,
                    "image_id": image["id"],
                    "category_id": self.spec.category_ids[int(label)],
                    "bbox": [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)],
                    "area": round((x2 - x1) * (y2 - y1), 2),
                    "iscrowd": 0,
                    "score": round(score, 5),
                }
            )
        labels_R, names = rows_R6[:, 0].astype(int), self.spec.class_names
        return draw_boxes(frame.image_HW3, rows_R6[:, 2:], labels_R, names, rows_R6[:, 1])

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        ids = {image["id"] for image in images}
        objects = sum(entry["image_id"] in ids for entry in self._annotations)
        return f"{objects} objects" + (f" in {len(images)} frames" if len(images) > 1 else "")


class Classes(Report):
    """Of a classifier."""

    file_name = "classes.json"

    def __init__(
        self, out: Path, spec: InferenceSpec, predict: Classifier, warn: Callable[[str], None]
    ) -> None:
        super().__init__(out, spec, warn)
        self._predict = predict

    def total(self) -> str:
        return f"the class of {len(self.images)} images"

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        names = self.spec.class_names
        labels_K, scores_K = best_classes_of(self._predict, frame.image_HW3, self.spec.input.size)
        image["best"] = best_classes(labels_K, scores_K, names)
        return draw_classes(frame.image_HW3, labels_K, names, scores_K)

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        if len(images) == 1:
            return ", ".join(f"{kind['name']} {kind['score']:.2f}" for kind in images[0]["best"])
        first = Counter(image["best"][0]["name"] for image in images)
        counted = ", ".join(f"{name} in {count}" for name, count in first.most_common(5))
        return f"of {len(images)} frames {counted}"


class PictureWriter:
    """Writes what was drawn for one source file: one image, or all frames as one .mp4.

    Nothing is created when nothing is written.  Raises: UserError: the disk or OpenCV refused.

    Args: target: see `picture_names`.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._is_video = _is_video(source)
        self._target = target
        self._video: cv2.VideoWriter | None = None

    def __enter__(self) -> "PictureWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._video is not None:
            self._video.release()

    def write(self, image_HW3: np.ndarray) -> None:
        """Args: uint8 RGB; all frames of a video have one size."""
        image_bgr = cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR)
        make_parent(self._target)
        if self._is_video:
            if self._video is None:
                self._video = self._open_video(image_HW3)
            self._video.write(image_bgr)
            return
        # cv2.imwrite crashes on a name that is not UTF-8.
        done, content = cv2.imencode(self._target.suffix, image_bgr)
        if not done:
            raise DataError(
                "this format cannot hold the image", code="picture_format", where=str(self._target)
            )
        with writing(self._target):
            self._target.write_bytes(content.tobytes())

    def _open_video(self, first_HW3: np.ndarray) -> cv2.VideoWriter:
        height, width = first_HW3.shape[:2]
        capture = cv2.VideoCapture(str(self._source))
        rate = capture.get(cv2.CAP_PROP_FPS) or 25.0
        capture.release()
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        video = cv2.VideoWriter(_video_path(self._target), codec, rate, (width, height))
        if not video.isOpened():
            raise DataError(
                "this OpenCV cannot write videos", code="video_unwritable", where=str(self._target)
            )
        return video
