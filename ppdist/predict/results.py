"""Writes result files: JSON, labels, tables, crops, and pictures with boxes drawn."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ppdist.common.errors import ConfigError, DataError
from ppdist.common.files import replacing, write_json, write_text, writing
from ppdist.export.spec import InferenceSpec
from ppdist.metrics.classification import best_classes, rank
from ppdist.predict.detections import Detection, Detections, summarize_names, write_picture
from ppdist.predict.sources import Frame, data_errors, is_video, video_path
from ppdist.viz.draw import draw_classes

FOLDERS = {"yolo": "labels", "voc": "annotations", "crops": "crops"}  # folders below --out
FILES = {"detect": "detections.json", "classify": "classes.json"}  # by task
TABLE = "detections.csv"
_MADE_BY = "found by ppdist predict"  # by which a later run recognises its own results
_NOT_UTF8 = "backslashreplace"  # for names of files; JSON keeps the same name
_COLUMNS = ("file_name", "frame", "class", "score", "x1", "y1", "x2", "y2", "track_id")


def require_own_folder(out: Path, source: Path) -> None:
    """Checks that no files in `out` would be overwritten or mistaken for results.

    Raises: ConfigError: pictures would overwrite those of `source`, or files already in it would be
        mistaken for results and skipped.
    """
    with data_errors(out):
        folder = (source if source.is_dir() else source.parent).resolve()
        parents = folder.parents if source.is_dir() else ()
        is_overwriting = out.resolve() in (folder, *parents)
        is_inside = source.is_dir() and folder in out.resolve().parents
        is_filled = is_inside and out.is_dir() and any(out.iterdir())
    if is_overwriting:
        raise ConfigError(
            "the pictures of --source are there, or below, and could be overwritten",
            code="out_holds_source",
            where=f"--out {out}",
            fix="choose another folder",
        )
    if is_filled and not own_results(out):
        raise ConfigError(
            "is inside --source and holds files that this program did not write",
            code="out_not_ours",
            where=f"--out {out}",
            fix="choose another folder, or empty it",
        )


def require_no_foreign_files(out: Path, names: Iterable[str]) -> None:
    """Checks that `out` has no files with these names, except those that an earlier run wrote.

    Raises: ConfigError: there is such a file.
    """
    with data_errors(out):
        existing = [name for name in names if (out / name).exists()]
    results = own_results(out) if existing else ()
    foreign = [name for name in existing if name not in results]
    if foreign:
        raise ConfigError(
            f"the file (one of {len(foreign)}) exists, and this program did not write it",
            code="out_not_ours",
            where=str(out / foreign[0]),
            fix="choose another --out, or move that file",
        )


def own_results(out: Path) -> set[str]:
    """Lists the files and folders in `out` that earlier runs have written."""
    names: set[str] = set()
    for name in FILES.values():
        try:
            info = json.loads((out / name).read_bytes())["info"]
            if info["description"] == _MADE_BY:
                names |= {name, *info["files"]}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue  # absent, or not ours
    return names


class Pictures:
    """The writer of pictures: an image under its name, a video as one file.

    Creates nothing until the first picture.

    Args:
        out: their folder.
        names: name of a source -> name of its picture, see `picture_names`; no pictures are written
            for other sources.
    """

    def __init__(self, out: Path, names: dict[str, str]) -> None:
        self._out, self._names = out, names
        self._video: cv2.VideoWriter | None = None
        self._open_source = ""  # whose video is open

    @property
    def files(self) -> Iterable[str]:
        """Returns the names of the pictures, relative to the folder."""
        return self._names.values()

    def wants(self, frame: Frame) -> bool:
        """Returns True if a picture of this frame will be written."""
        return frame.name in self._names

    def write(self, frame: Frame, picture_HW3: np.ndarray) -> None:
        """Writes one picture, or the next frame of a video.

        Args: picture_HW3: uint8 RGB; all frames of a video have one size.
        Raises: UserError: the file system or OpenCV fails.
        """
        # Frames come source by source, so only one video is open at a time.
        if frame.name != self._open_source:
            self.close()
        file = self._out / self._names[frame.name]
        if frame.index is None:
            write_picture(file, picture_HW3)
            return
        if self._video is None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)  # OpenCV would write through a link
            self._open_source, codec = frame.name, cv2.VideoWriter.fourcc(*"mp4v")
            size = (picture_HW3.shape[1], picture_HW3.shape[0])
            self._video = cv2.VideoWriter(video_path(file), codec, frame.rate, size)
            if not self._video.isOpened():
                raise DataError(
                    "this OpenCV cannot write videos", code="video_unwritable", where=str(file)
                )
        self._video.write(cv2.cvtColor(picture_HW3, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Closes the open video."""
        if self._video is not None:
            self._video.release()
        self._video, self._open_source = None, ""


def picture_names(names: Sequence[str], videos: Iterable[str] = ()) -> list[str]:
    """Chooses a unique picture name for each source; videos become .mp4.

    Args: videos: which of `names` are videos, regardless of their suffix.
    """
    used_names, videos = set(names), set(videos)
    result = []
    for name in names:
        picture = name
        if (is_video(name) or name in videos) and not name.endswith(".mp4"):
            picture = str(Path(name).with_suffix(".mp4"))
            while picture in used_names:
                name = picture = f"{name}.mp4"
            used_names.add(picture)
        result.append(picture)
    return result


class Results:
    """The results so far; `add` each picture in order, then `write`.

    Attributes: images: entries of the JSON file.
    """

    def __init__(self, out: Path, spec: InferenceSpec, pictures: Pictures) -> None:
        self.out, self.spec, self.pictures = out, spec, pictures
        self.images: list[dict[str, Any]] = []

    def write(self) -> Path:
        """Closes the last video and writes the JSON file.

        Raises: UserError: the file system fails.
        """
        self.pictures.close()
        file = self.out / FILES[self.spec.task]
        files = sorted({*own_results(self.out), *self.files()})
        write_json(file, {"info": {"description": _MADE_BY, "files": files}, **self.content()})
        return file

    def total(self) -> str:
        """Describes all results in a few words."""
        raise NotImplementedError

    def hint(self, threshold: float) -> str:
        """Suggests what to try where nothing was detected; "": nothing."""
        return ""

    def files(self) -> Iterator[str]:
        """Yields the files and folders that are written, relative to the output folder."""
        yield FILES[self.spec.task]
        yield from self.pictures.files

    def content(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        pairs = zip(self.spec.category_ids, self.spec.class_names)
        categories = [{"id": number, "name": name} for number, name in pairs]
        return {"images": self.images, "categories": categories}

    def add_image(self, frame: Frame) -> dict[str, Any]:
        """Adds a picture to the JSON file and returns its entry."""
        height, width = frame.image_HW3.shape[:2]
        image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
        if frame.index is not None:
            image["frame"] = frame.index
        self.images.append({**image, "width": width, "height": height})
        return self.images[-1]


class Objects(Results):
    """The results of a detector.

    Args: formats: any of yolo, voc, csv, crops; COCO's JSON is always written.
    """

    def __init__(
        self, out: Path, spec: InferenceSpec, pictures: Pictures, formats: Sequence[str] = ()
    ) -> None:
        super().__init__(out, spec, pictures)
        self._formats = formats
        self._annotations: list[dict[str, Any]] = []
        self._highest: tuple[float, str] = 0.0, ""  # score of any box, and its source
        self._written: set[Path] = set()

    def add(self, frame: Frame, detections: Detections) -> None:
        """Records the detections of a frame, and writes them in each format."""
        image = self.add_image(frame)
        for entry, detection in zip(detections.to_coco(image["id"]), detections):
            x1, y1, x2, y2 = detection.box_xyxy
            extra = {"area": round((x2 - x1) * (y2 - y1), 2), "iscrowd": 0}
            self._annotations.append({"id": len(self._annotations) + 1, **entry, **extra})
        if self.pictures.wants(frame):
            self.pictures.write(frame, detections.plot())
        if "yolo" in self._formats:
            write_text(self._label_file(frame, "yolo", ".txt"), detections.to_yolo(scores=True))
        if "voc" in self._formats:
            write_text(self._label_file(frame, "voc", ".xml"), detections.to_voc())
        if "crops" in self._formats:
            self._write_crops(frame, detections)

    def record_highest(self, frame: Frame, rows_R6: np.ndarray) -> None:
        """Remembers the highest score for `hint`; rows_R6 has it first."""
        if len(rows_R6) and rows_R6[0, 1] > self._highest[0]:
            self._highest = float(rows_R6[0, 1]), frame.name

    def hint(self, threshold: float) -> str:
        """Suggests what to try where nothing was detected; "": nothing."""
        if self._annotations:
            return ""
        score, name = self._highest
        nothing = f"nothing at or above {threshold:g}"
        if not score:
            return f"{nothing}, nor at any lower score: check the model with `ppdist eval`"
        return (
            f"{nothing}; highest score {score:.2g} in {name}: try --threshold {round_down(score):g}"
        )

    def summary(self, frames: Sequence[Sequence[Detection]]) -> str:
        """Summarizes the objects of one image, or of all frames of a video."""
        objects = [detection for frame in frames for detection in frame]
        if not objects:
            return ""
        if len(frames) == 1:
            return summarize_names(detection.name for detection in objects)
        tracks = {
            detection.track_id: detection.name
            for detection in objects
            if detection.track_id is not None
        }
        if not tracks:
            names = summarize_names(detection.name for detection in objects)
            return f"{names} in {len(frames)} frames"
        return f"{summarize_names(tracks.values())} followed through {len(frames)} frames"

    def write(self) -> Path:
        if "csv" in self._formats:
            write_table(self.out / TABLE, self.content())
        if "yolo" in self._formats:
            names = "".join(f"{name}\n" for name in self.spec.class_names)
            write_text(self.out / FOLDERS["yolo"] / "classes.txt", names)
        return super().write()

    def total(self) -> str:
        objects, images = len(self._annotations), len(self.images)
        empty = images - len({annotation["image_id"] for annotation in self._annotations})
        text = f"{objects} object{'s' * (objects != 1)} in {images} image{'s' * (images != 1)}"
        return f"{text}, nothing in {empty} of them" if 0 < empty < images else text

    def files(self) -> Iterator[str]:
        yield from super().files()
        yield from (
            name for kind, name in {**FOLDERS, "csv": TABLE}.items() if kind in self._formats
        )

    def content(self) -> dict[str, Any]:
        return {**super().content(), "annotations": self._annotations}

    def _label_file(self, frame: Frame, kind: str, suffix: str) -> Path:
        """Returns a unique label file for a frame: `labels/a.txt`, in a video `labels/a_12.txt`."""
        name = Path(frame.name)
        stem = name.with_suffix("") if frame.index is None else f"{name}_{frame.index}"
        file = self.out / FOLDERS[kind] / f"{stem}{suffix}"
        if file in self._written:  # a.jpg beside a.png
            file = self.out / FOLDERS[kind] / f"{name}{suffix}"
        self._written.add(file)
        return file

    def _write_crops(self, frame: Frame, detections: Detections) -> None:
        height, width = frame.image_HW3.shape[:2]
        for number, detection in enumerate(detections):
            x1, y1, x2, y2 = detection.box_xyxy
            left, top = max(0, int(x1)), max(0, int(y1))
            right, bottom = min(width, int(np.ceil(x2))), min(height, int(np.ceil(y2)))
            if right <= left or bottom <= top:
                continue
            name = Path(frame.name)
            frame_suffix = "" if frame.index is None else f"_{frame.index}"
            file = name.with_name(f"{name.name}{frame_suffix}_{number}.jpg")
            folder = self.out / FOLDERS["crops"] / folder_name(detection.name, detection.class_id)
            write_picture(folder / file, frame.image_HW3[top:bottom, left:right])


def round_down(score: float) -> float:
    """Rounds a score down to one digit: 0.12 becomes 0.1."""
    unit = 10.0 ** math.floor(math.log10(score))
    return round(math.floor(score / unit + 1e-9) * unit, 12)


def folder_name(name: str, label: int) -> str:
    """Converts a class name to a folder name, which cannot lead to another folder."""
    safe = "".join(
        letter if letter.isalnum() or letter in " -_+()" else "_" for letter in name
    ).strip()
    return safe[:100] or f"class {label}"


class Classes(Results):
    """The results of a classifier."""

    def add(self, frame: Frame, probabilities_C: np.ndarray) -> dict[str, Any]:
        """Records and draws the five classes with the highest scores; returns their JSON entry."""
        image, names = self.add_image(frame), self.spec.class_names
        ranking = rank(probabilities_C[None], np.zeros(1, np.int64), np.zeros(1, np.int64))
        labels_K, scores_K = ranking.labels_NK[0], ranking.scores_NK[0]
        image["best"] = best_classes(labels_K, scores_K, names)
        if self.pictures.wants(frame):
            picture = draw_classes(frame.image_HW3, labels_K, names, scores_K)
            self.pictures.write(frame, picture)
        return image

    def summary(self, images: Sequence[dict[str, Any]]) -> str:
        """Names the classes of one image, or counts the classes over all frames of a video."""
        if len(images) == 1:
            return ", ".join(f"{kind['name']} {kind['score']:.2f}" for kind in images[0]["best"])
        first = Counter(image["best"][0]["name"] for image in images)
        counts = ", ".join(f"{name} in {number}" for name, number in first.most_common(5))
        return f"of {len(images)} frames {counts}"

    def total(self) -> str:
        return f"the class of {len(self.images)} image{'s' * (len(self.images) != 1)}"


def write_table(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a CSV file with a line for each object.

    Args: content: the content of a detector's JSON file.
    Raises: UserError: the file system fails.
    """
    options: dict[str, Any] = {"encoding": "utf-8", "errors": _NOT_UTF8, "newline": ""}
    with writing(file), replacing(file) as draft, io.TextIOWrapper(draft, **options) as opened:
        writer = csv.writer(opened)
        writer.writerow(_COLUMNS)
        writer.writerows(_table_rows(content))


def _table_rows(content: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = {category["id"]: category["name"] for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    for annotation in content["annotations"]:
        image, (left, top, width, height) = images[annotation["image_id"]], annotation["bbox"]
        box = (left, top, round(left + width, 2), round(top + height, 2))
        columns = (
            names[annotation["category_id"]],
            annotation["score"],
            *box,
            annotation.get("track_id", ""),
        )
        yield image["file_name"], image.get("frame", ""), *columns
