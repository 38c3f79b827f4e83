"""Writes results as JSON, CSV and drawn pictures."""

import csv
import io
import json
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from .decoder import format_of
from .files import replace_file, replacing
from .pictures import FileError, Frame, is_video, video_path

# Colours (red, green, blue) that stay distinct in all common colour blindness: Okabe & Ito 2008,
# "Color Universal Design", https://jfly.uni-koeln.de/color/, black replaced by a mid grey.
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (153, 153, 153),
)
FILES = {"detect": "detections", "classify": "classes"}  # stem of the JSON and CSV, by task
_NOT_UTF8 = "backslashreplace"  # of names; Python's json, at least, reads them back unchanged
_BEST = 5  # classes reported for an image
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_COLUMNS = {
    "detect": ("file_name", "frame", "class", "score", "x1", "y1", "x2", "y2", "track_id"),
    "classify": ("file_name", "frame", "class", "score"),
}


def require_own_folder(out: Path, source: Path, ours: bool) -> None:
    """Refuses an `out` whose files would be overwritten or mistaken for results.

    Args: ours: an earlier run wrote results there; asked only of a folder as source.
    Raises: FileError: pictures would overwrite those of `source`, or files already in it would be
        mistaken for results and skipped.
    """
    folder = (source if source.is_dir() else source.parent).resolve()
    above = folder.parents if source.is_dir() else ()
    if out.resolve() in (folder, *above):
        raise FileError(
            "the pictures of --source are there, or below, and could be overwritten",
            code="out_holds_source",
            where=f"--out {out}",
            fix="choose another folder",
        )
    inside = source.is_dir() and source.resolve() in out.resolve().parents
    if inside and not ours and out.is_dir() and any(out.iterdir()):
        raise FileError(
            "is inside --source and holds files that this program did not write",
            code="out_not_ours",
            where=f"--out {out}",
            fix="choose another folder, or empty it",
        )


def require_no_foreign_files(
    out: Path, names: Iterable[str], ours: Callable[[Path], Collection[str]] = lambda out: ()
) -> None:
    """Refuses names that already exist in `out` and are not ours.

    Args: ours: the names there that earlier runs wrote, looked up only if needed.
    Raises: FileError.
    """
    there = [name for name in names if (out / name).exists()]
    own = ours(out) if there else ()
    taken = [name for name in there if name not in own]
    if taken:
        raise FileError(
            f"the file (one of {len(taken)}) exists, and this program did not write it",
            code="out_not_ours",
            where=str(out / taken[0]),
            fix="choose another --out, or move that file",
        )


class Results:
    """Collects results; `add` each picture in order, then `write`.

    Args:
        out: where all files go.
        spec: the content of infer.yml.
        threshold: boxes with lower scores are dropped.
        pictures: name of a source -> picture to write for it, below `out`; other sources are
            not drawn.

    Attributes:
        detects: True for boxes, False for classes of whole images.
        images, objects: `images` and `annotations` of the JSON file.
    """

    def __init__(
        self, out: Path, spec: dict[str, Any], threshold: float, pictures: dict[str, str]
    ) -> None:
        self.out = out
        self.detects = spec["task"] == "detect"
        self.images: list[dict[str, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self._spec, self._threshold = spec, threshold
        self._writer = Pictures(out, pictures)

    def add(self, frame: Frame, found: np.ndarray) -> str:
        """Records and draws what the predictor found; returns a short summary."""
        height, width = frame.image_HW3.shape[:2]
        image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
        if frame.index is not None:
            image["frame"] = frame.index
        self.images.append({**image, "width": width, "height": height})
        if not self.detects:
            best = self.images[-1]["best"] = self._best_classes(found)
            self._draw(frame, lambda canvas: draw_classes(canvas, best))
            return ", ".join(f"{kind['name']} {kind['score']:.2f}" for kind in best)
        rows_R6 = found[found[:, 1] >= self._threshold]
        self.objects += self._annotations(rows_R6, image["id"])
        names = self._spec["class_names"]
        self._draw(frame, lambda canvas: draw_boxes(canvas, rows_R6, names))
        return f"{len(rows_R6)} objects"

    def _draw(self, frame: Frame, draw: Callable[[np.ndarray], None]) -> None:
        if self._writer.wants(frame):
            canvas_HW3 = frame.image_HW3.copy()
            draw(canvas_HW3)
            self._writer.write(frame, canvas_HW3)

    def total(self) -> str:
        if not self.detects:
            return f"the class of {len(self.images)} images"
        return f"{len(self.objects)} objects in {len(self.images)} images"

    def write(self, as_csv: bool) -> Path:
        """Closes the last video; writes the JSON file, and CSV on request."""
        self._writer.close()
        task = self._spec["task"]
        pairs = zip(self._spec["category_ids"], self._spec["class_names"])
        categories = [{"id": number, "name": name} for number, name in pairs]
        content: dict[str, Any] = {"images": self.images, "categories": categories}
        if self.detects:
            content["annotations"] = self.objects
        file = self.out / f"{FILES[task]}.json"
        with writing(file):
            text = json.dumps(content, ensure_ascii=False)
            replace_file(file, text.encode("utf-8", errors=_NOT_UTF8))
        if as_csv:
            write_table(file.with_suffix(".csv"), content)
        return file

    def _best_classes(self, probabilities_C: np.ndarray) -> list[dict[str, Any]]:
        names = self._spec["class_names"]
        best_K = np.argsort(-probabilities_C, kind="stable")[:_BEST]
        return [
            {"class": label, "name": names[label], "score": round(float(score), 5)}
            for label, score in zip(best_K.tolist(), probabilities_C[best_K])
        ]

    def _annotations(self, rows_R6: np.ndarray, image_id: int) -> Iterator[dict[str, Any]]:
        """COCO annotations, with the score of a COCO result."""
        first = len(self.objects) + 1
        for number, (label, score, x1, y1, x2, y2) in enumerate(rows_R6.tolist(), first):
            yield {
                "id": number,
                "image_id": image_id,
                "category_id": self._spec["category_ids"][int(label)],
                "bbox": [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)],
                "area": round((x2 - x1) * (y2 - y1), 2),
                "iscrowd": 0,
                "score": short_score(score),
            }


def short_score(score: float) -> float:
    """Rounds a score to the fewest digits that keep its float32."""
    return float(str(np.float32(score)))


def write_table(file: Path, content: Mapping[str, Any]) -> None:
    """Writes CSV: a line per object, or per class of an image.

    Every CSV of ppdist is this one, so all have the same columns.

    Args: content: of the JSON file; `annotations` only of a detector.
    Raises: FileError: the file system fails.
    """
    options: dict[str, Any] = {"encoding": "utf-8", "errors": _NOT_UTF8, "newline": ""}
    with writing(file), replacing(file) as draft, io.TextIOWrapper(draft, **options) as opened:
        writer = csv.writer(opened)
        writer.writerow(_COLUMNS["detect" if "annotations" in content else "classify"])
        writer.writerows(_lines(content))


def _lines(content: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = {category["id"]: category["name"] for category in content["categories"]}
    images = {image["id"]: image for image in content["images"]}
    for image in content["images"]:
        for kind in image.get("best", ()):
            yield image["file_name"], image.get("frame", ""), kind["name"], kind["score"]
    for one in content.get("annotations", ()):
        image, (left, top, width, height) = images[one["image_id"]], one["bbox"]
        box = (left, top, round(left + width, 2), round(top + height, 2))
        found = names[one["category_id"]], one["score"], *box, one.get("track_id", "")
        yield image["file_name"], image.get("frame", ""), *found


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
        Raises: FileError: the file system or OpenCV fails.
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
                raise FileError(
                    "this OpenCV cannot write videos", code="video_unwritable", where=str(file)
                )
        self._video.write(cv2.cvtColor(drawn_HW3, cv2.COLOR_RGB2BGR))

    def close(self) -> None:
        """Closes the open video."""
        if self._video is not None:
            self._video.release()
        self._video, self._film = None, ""


def write_picture(file: Path, image_HW3: np.ndarray) -> None:
    """Writes a uint8 RGB image in the format of the suffix.

    Raises: FileError: OpenCV cannot write this format, or the file system fails.
    """
    try:
        # cv2.imwrite crashes on a name that is not UTF-8.
        image_bgr = cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR)
        done, content = cv2.imencode(format_of(file.suffix), image_bgr)
    except cv2.error:
        done = False
    if not done:
        raise FileError("this format cannot hold the image", code="picture_format", where=str(file))
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.tobytes())


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


def draw_boxes(canvas_HW3: np.ndarray, rows_R6: np.ndarray, class_names: list[str]) -> None:
    """Outlines boxes in place, the highest score on top."""
    height, width = canvas_HW3.shape[:2]
    thickness = max(2, round(max(height, width) / 320))
    limits = np.array([width - 1, height - 1, width - 1, height - 1])
    for row in rows_R6[::-1]:
        label = int(row[0])
        colour = PALETTE[label % len(PALETTE)]
        x1, y1, x2, y2 = np.clip(np.rint(row[2:]), 0, limits).astype(int).tolist()
        cv2.rectangle(canvas_HW3, (x1, y1), (x2, y2), colour, thickness)
        text = f"{_readable(class_names[label], label)} {row[1]:.2f}"
        wide, tall = _plate_size(canvas_HW3, text)
        top = y1 - tall if y1 >= tall else y1  # inside the box if there is no room above
        _draw_plate(canvas_HW3, (max(0, min(x1, width - wide)), top), text, colour)


def draw_classes(canvas_HW3: np.ndarray, best: list[dict[str, Any]]) -> None:
    """Writes the best classes that fit into the upper left corner."""
    top = 0
    for kind in best:
        text = f"{_readable(kind['name'], kind['class'])} {kind['score']:.2f}"
        tall = _plate_size(canvas_HW3, text)[1]
        if top and top + tall > canvas_HW3.shape[0]:
            return
        _draw_plate(canvas_HW3, (0, top), text, PALETTE[kind["class"] % len(PALETTE)])
        top += tall


def _readable(name: str, label: int) -> str:
    """The name, or the label's number: OpenCV draws only ASCII."""
    text = name if name.isascii() else without_emoji(name)
    return text if text.isascii() and text else f"#{label}"


def without_emoji(name: str) -> str:
    """Removes emoji and other symbols from a class name, for fonts that lack them."""
    letters = (
        letter
        for letter in name
        if unicodedata.category(letter) not in ("So", "Sk", "Cf", "Me")
        and not "\ufe00" <= letter <= "\ufe0f"  # which form a symbol has
    )
    return " ".join("".join(letters).split())


def _scale(canvas_HW3: np.ndarray) -> float:
    return max(0.4, max(canvas_HW3.shape[:2]) / 1600)


def _plate_size(canvas_HW3: np.ndarray, text: str) -> tuple[int, int]:
    (wide, tall), below = cv2.getTextSize(text, _FONT, _scale(canvas_HW3), 1)
    return wide + 4, tall + below + 2


def _draw_plate(
    canvas_HW3: np.ndarray, corner: tuple[int, int], text: str, colour: tuple[int, int, int]
) -> None:
    """Draws a text on a filled rectangle from its upper left `corner`."""
    left, top = corner
    wide, tall = _plate_size(canvas_HW3, text)
    scale = _scale(canvas_HW3)
    below = cv2.getTextSize(text, _FONT, scale, 1)[1]
    cv2.rectangle(canvas_HW3, corner, (left + wide, top + tall), colour, cv2.FILLED)
    red, green, blue = colour
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    ink = (0, 0, 0) if luminance > 110 else (255, 255, 255)
    origin = (left + 2, top + tall - below)
    cv2.putText(canvas_HW3, text, origin, _FONT, scale, ink, 1, cv2.LINE_AA)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raises: FileError: in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"cannot be written: {error.strerror}",
            code="disk_full" if error.errno in (ENOSPC, EDQUOT) else "file_unwritable",
            where=str(file),
        ) from error
