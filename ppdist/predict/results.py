"""Result files: JSON, labels, tables, crops, and pictures with boxes drawn."""

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
from ppdist.predict.detections import Detection, Detections, counted, write_picture
from ppdist.predict.sources import Frame, data_errors, is_video, video_path
from ppdist.viz.draw import draw_classes

FOLDERS = {"yolo": "labels", "voc": "annotations", "crops": "crops"}  # below the results
FILES = {"detect": "detections.json", "classify": "classes.json"}  # by task
TABLE = "detections.csv"
_MADE_BY = "found by ppdist predict"  # how a later run knows its own results
_NOT_UTF8 = "backslashreplace"  # of names: to JSON the same name
_COLUMNS = ("file_name", "frame", "class", "score", "x1", "y1", "x2", "y2", "track_id")


def require_own_folder(out: Path, source: Path) -> None:
    """Refuses an `out` whose files would be overwritten or mistaken for results.

    Raises: ConfigError: pictures would overwrite those of `source`, or files already in it would be
        mistaken for results and skipped.
    """
    with data_errors(out):
        folder = (source if source.is_dir() else source.parent).resolve()
        above = folder.parents if source.is_dir() else ()
        overwrites = out.resolve() in (folder, *above)
        inside = source.is_dir() and folder in out.resolve().parents
        filled = inside and out.is_dir() and any(out.iterdir())
    if overwrites:
        raise ConfigError(
            "the pictures of --source are there, or below, and could be overwritten",
            code="out_holds_source",
            where=f"--out {out}",
            fix="choose another folder",
        )
    if filled and not own_results(out):
        raise ConfigError(
            "is inside --source and holds files that this program did not write",
            code="out_not_ours",
            where=f"--out {out}",
            fix="choose another folder, or empty it",
        )


def require_no_foreign_files(out: Path, names: Iterable[str]) -> None:
    """Refuses names that already exist in `out` and that no earlier run wrote.

    Raises: ConfigError.
    """
    with data_errors(out):
        there = [name for name in names if (out / name).exists()]
    own = own_results(out) if there else ()
    taken = [name for name in there if name not in own]
    if taken:
        raise ConfigError(
            f"the file (one of {len(taken)}) exists, and this program did not write it",
            code="out_not_ours",
            where=str(out / taken[0]),
            fix="choose another --out, or move that file",
        )


def own_results(out: Path) -> set[str]:
    """Files and folders in `out` that earlier runs have written."""
    own: set[str] = set()
    for name in FILES.values():
        try:
            info = json.loads((out / name).read_bytes())["info"]
            if info["description"] == _MADE_BY:
                own |= {name, *info["files"]}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue  # absent, or somebody else's
    return own


class Pictures:
    """Writes pictures: an image under its name, a video as one file.

    Creates nothing until the first picture.

    Args:
        out: where they go.
        names: name of a source -> that of its picture, see `picture_names`; others are not written.
    """

    def __init__(self, out: Path, names: dict[str, str]) -> None:
        self._out, self._names = out, names
        self._video: cv2.VideoWriter | None = None
        self._film = ""  # the name of the source whose video is open

    @property
    def files(self) -> Iterable[str]:
        """Names of the pictures, relative to the folder."""
        return self._names.values()

    def wants(self, frame: Frame) -> bool:
        """Whether to write a picture of this frame."""
        return frame.name in self._names

    def write(self, frame: Frame, drawn_HW3: np.ndarray) -> None:
        """Writes one picture, or the next frame of a video.

        Args: drawn_HW3: uint8 RGB; all frames of a video have one size.
        Raises: UserError: the file system or OpenCV fails.
        """
        if frame.name != self._film:
            self.close()
        file = self._out / self._names[frame.name]
        if frame.index is None:
            write_picture(file, drawn_HW3)
            return
        if self._video is None:
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)  # OpenCV would write through a link
            self._film, codec = frame.name, cv2.VideoWriter.fourcc(*"mp4v")
            size = (drawn_HW3.shape[1], drawn_HW3.shape[0])
            self._video = cv2.VideoWriter(video_path(file), codec, frame.rate, size)
            if not self._video.isOpened():
                raise DataError(
                    "this OpenCV cannot write videos", code="video_unwritable", where=str(file)
                )
        self._video.write(cv2.cvtColor(drawn_HW3, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Closes the open video."""
        if self._video is not None:
            self._video.release()
        self._video, self._film = None, ""


def picture_names(names: Sequence[str], films: Iterable[str] = ()) -> list[str]:
    """A unique picture name for each source; videos become .mp4.

    Args: films: those of `names` that are videos, whatever their suffix.
    """
    taken, films = set(names), set(films)
    result = []
    for name in names:
        chosen = name
        if (is_video(name) or name in films) and not name.endswith(".mp4"):
            chosen = str(Path(name).with_suffix(".mp4"))
            while chosen in taken:
                name = chosen = f"{name}.mp4"
            taken.add(chosen)
        result.append(chosen)
    return result


class Results:
    """What was found so far; `add` each picture in order, then `write`.

    Attributes: images: of the JSON file.
    """

    def __init__(self, out: Path, spec: InferenceSpec, pictures: Pictures) -> None:
        self.out, self.spec, self.pictures = out, spec, pictures
        self.images: list[dict[str, Any]] = []

    def write(self) -> Path:
        """Ends the last video and writes the JSON file; raises UserError."""
        self.pictures.close()
        file = self.out / FILES[self.spec.task]
        files = sorted({*own_results(self.out), *self.files()})
        write_json(file, {"info": {"description": _MADE_BY, "files": files}, **self.content()})
        return file

    def total(self) -> str:
        """What was found in all, in a few words."""
        raise NotImplementedError

    def hint(self, threshold: float) -> str:
        """What to try where nothing was found; "": nothing."""
        return ""

    def files(self) -> Iterator[str]:
        """Files and folders that are written, relative to the output folder."""
        yield FILES[self.spec.task]
        yield from self.pictures.files

    def content(self) -> dict[str, Any]:
        """Of the JSON file."""
        pairs = zip(self.spec.category_ids, self.spec.class_names)
        categories = [{"id": number, "name": name} for number, name in pairs]
        return {"images": self.images, "categories": categories}

    def note(self, frame: Frame) -> dict[str, Any]:
        """The entry of a picture in the JSON file."""
        height, width = frame.image_HW3.shape[:2]
        image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
        if frame.index is not None:
            image["frame"] = frame.index
        self.images.append({**image, "width": width, "height": height})
        return self.images[-1]


class Objects(Results):
    """Of a detector.

    Args: formats: of yolo, voc, csv, crops; COCO's JSON is always written.
    """

    def __init__(
        self, out: Path, spec: InferenceSpec, pictures: Pictures, formats: Sequence[str] = ()
    ) -> None:
        super().__init__(out, spec, pictures)
        self._formats = formats
        self._annotations: list[dict[str, Any]] = []
        self._highest: tuple[float, str] = 0.0, ""  # score of all that was seen, and its source
        self._taken: set[Path] = set()

    def add(self, frame: Frame, found: Detections) -> None:
        """Notes what was found, and writes it in each format."""
        image = self.note(frame)
        for entry, one in zip(found.to_coco(image["id"]), found):
            x1, y1, x2, y2 = one.box_xyxy
            rest = {"area": round((x2 - x1) * (y2 - y1), 2), "iscrowd": 0}
            self._annotations.append({"id": len(self._annotations) + 1, **entry, **rest})
        if self.pictures.wants(frame):
            self.pictures.write(frame, found.plot())
        if "yolo" in self._formats:
            write_text(self._file(frame, "yolo", ".txt"), found.to_yolo(scores=True))
        if "voc" in self._formats:
            write_text(self._file(frame, "voc", ".xml"), found.to_voc())
        if "crops" in self._formats:
            self._write_crops(frame, found)

    def note_highest(self, frame: Frame, rows_R6: np.ndarray) -> None:
        """Remembers the highest score for `hint`; rows_R6 has it first."""
        if len(rows_R6) and rows_R6[0, 1] > self._highest[0]:
            self._highest = float(rows_R6[0, 1]), frame.name

    def hint(self, threshold: float) -> str:
        """What to try where nothing was found; "": nothing."""
        if self._annotations:
            return ""
        score, name = self._highest
        nothing = f"nothing at or above {threshold:g}"
        if not score:
            return f"{nothing}, nor at any lower score: check the model with `ppdist eval`"
        return f"{nothing}; highest score {score:.2g} in {name}: try --threshold {below(score):g}"

    def said(self, frames: Sequence[Sequence[Detection]]) -> str:
        """Short summary of one image, or of all frames of a video."""
        objects = [one for frame in frames for one in frame]
        if not objects:
            return ""
        if len(frames) == 1:
            return counted(one.name for one in objects)
        tracks = {one.track_id: one.name for one in objects if one.track_id is not None}
        if not tracks:
            return f"{counted(one.name for one in objects)} in {len(frames)} frames"
        return f"{counted(tracks.values())} followed through {len(frames)} frames"

    def write(self) -> Path:
        if "csv" in self._formats:
            write_table(self.out / TABLE, self.content())
        if "yolo" in self._formats:
            names = "".join(f"{name}\n" for name in self.spec.class_names)
            write_text(self.out / FOLDERS["yolo"] / "classes.txt", names)
        return super().write()

    def total(self) -> str:
        found, seen = len(self._annotations), len(self.images)
        empty = seen - len({one["image_id"] for one in self._annotations})
        told = f"{found} object{'s' * (found != 1)} in {seen} image{'s' * (seen != 1)}"
        return f"{told}, nothing in {empty} of them" if 0 < empty < seen else told

    def files(self) -> Iterator[str]:
        yield from super().files()
        yield from (
            name for kind, name in {**FOLDERS, "csv": TABLE}.items() if kind in self._formats
        )

    def content(self) -> dict[str, Any]:
        return {**super().content(), "annotations": self._annotations}

    def _file(self, frame: Frame, kind: str, suffix: str) -> Path:
        """Of a frame, no two alike: `labels/a.txt`, of a video `labels/a_12.txt`."""
        name = Path(frame.name)
        stem = name.with_suffix("") if frame.index is None else f"{name}_{frame.index}"
        chosen = self.out / FOLDERS[kind] / f"{stem}{suffix}"
        if chosen in self._taken:  # a.jpg beside a.png
            chosen = self.out / FOLDERS[kind] / f"{name}{suffix}"
        self._taken.add(chosen)
        return chosen

    def _write_crops(self, frame: Frame, found: Detections) -> None:
        height, width = frame.image_HW3.shape[:2]
        for number, one in enumerate(found):
            x1, y1, x2, y2 = one.box_xyxy
            left, top = max(0, int(x1)), max(0, int(y1))
            right, bottom = min(width, int(np.ceil(x2))), min(height, int(np.ceil(y2)))
            if right <= left or bottom <= top:
                continue
            name = Path(frame.name)
            at = "" if frame.index is None else f"_{frame.index}"
            file = name.with_name(f"{name.name}{at}_{number}.jpg")
            folder = self.out / FOLDERS["crops"] / folder_name(one.name, one.class_id)
            write_picture(folder / file, frame.image_HW3[top:bottom, left:right])


def below(score: float) -> float:
    """Number of one digit not above a score: 0.1 for 0.12."""
    unit = 10.0 ** math.floor(math.log10(score))
    return round(math.floor(score / unit + 1e-9) * unit, 12)


def folder_name(name: str, label: int) -> str:
    """A class's name as that of a folder, which leads nowhere else."""
    safe = "".join(each if each.isalnum() or each in " -_+()" else "_" for each in name).strip()
    return safe[:100] or f"class {label}"


class Classes(Results):
    """Of a classifier."""

    def add(self, frame: Frame, probabilities_C: np.ndarray) -> dict[str, Any]:
        """Notes and draws the five surest classes; returns their JSON entry."""
        image, names = self.note(frame), self.spec.class_names
        ranking = rank(probabilities_C[None], np.zeros(1, np.int64), np.zeros(1, np.int64))
        labels_K, scores_K = ranking.labels_NK[0], ranking.scores_NK[0]
        image["best"] = best_classes(labels_K, scores_K, names)
        if self.pictures.wants(frame):
            drawn = draw_classes(frame.image_HW3, labels_K, names, scores_K)
            self.pictures.write(frame, drawn)
        return image

    def said(self, images: Sequence[dict[str, Any]]) -> str:
        """Short summary of one image, or of all frames of a video."""
        if len(images) == 1:
            return ", ".join(f"{kind['name']} {kind['score']:.2f}" for kind in images[0]["best"])
        first = Counter(image["best"][0]["name"] for image in images)
        told = ", ".join(f"{name} in {number}" for name, number in first.most_common(5))
        return f"of {len(images)} frames {told}"

    def total(self) -> str:
        return f"the class of {len(self.images)} image{'s' * (len(self.images) != 1)}"


def write_table(file: Path, content: Mapping[str, Any]) -> None:
    """Writes CSV: a line per object.

    Args: content: of the JSON file of a detector.
    Raises: UserError: the file system fails.
    """
    options: dict[str, Any] = {"encoding": "utf-8", "errors": _NOT_UTF8, "newline": ""}
    with writing(file), replacing(file) as draft, io.TextIOWrapper(draft, **options) as opened:
        writer = csv.writer(opened)
        writer.writerow(_COLUMNS)
        writer.writerows(_lines(content))


def _lines(content: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = {category["id"]: category["name"] for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    for one in content["annotations"]:
        image, (left, top, width, height) = images[one["image_id"]], one["bbox"]
        box = (left, top, round(left + width, 2), round(top + height, 2))
        found = names[one["category_id"]], one["score"], *box, one.get("track_id", "")
        yield image["file_name"], image.get("frame", ""), *found
