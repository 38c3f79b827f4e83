"""Images and videos from disk, decoded ahead of the prediction."""

import itertools
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np

from .decoder import IMAGE_SUFFIXES, MOST_BYTES, damage, decode, unread_kind, unread_kinds
from .predictor import PredictorError

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
KNOWN_SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES
USUAL_RATE = 25.0  # frames a second, if a video or camera names none
_MOST_LOST = 1000  # damaged frames in a row; at the end of a video each takes 10 us
_WHOLE = 0.9  # of its time; a video that ends before was cut
Item = TypeVar("Item")


@dataclass(frozen=True)
class Frame:
    """One picture to look at."""

    name: str  # of its source; the frames of a video share it
    index: int | None  # frame number in a video from 0; None: an image
    image_HW3: np.ndarray  # uint8 RGB
    rate: float = 0.0  # frames a second of the video; of an image 0


class FileError(PredictorError):
    """A file that cannot be used; ppdist reports it with `code`."""

    def __init__(self, what: str, *, code: str, where: str, fix: str = "") -> None:
        super().__init__(f"{where}: {what}; {fix}" if fix else f"{where}: {what}")
        self.what, self.code, self.where, self.fix = what, code, where, fix


def find_sources(source: Path, leave_out: Path | None, warn: Callable[[str], None]) -> list[Path]:
    """Images and videos at a path, below a folder in name order.

    Args:
        leave_out: a folder whose files do not count (where results are written).
        warn: called with a line about images in unsupported formats.
    Raises: FileError: the path does not exist, or there is nothing to look at.
    """
    shown = " ".join(sorted(KNOWN_SUFFIXES))
    if source.is_file():
        if source.suffix.lower() not in KNOWN_SUFFIXES:
            kind = unread_kind(source.name)
            raise FileError(
                f"{kind} is not supported" if kind else "neither an image nor a video",
                code="not_a_picture",
                where=str(source),
                fix=f"convert it to one of {shown}",
            )
        return [source]
    if not source.is_dir():
        raise FileError(
            "no such image, folder or video", code="source_not_found", where=str(source)
        )
    files = [
        file
        for file in sorted(source.rglob("*"))
        # Files that programs keep for themselves: ._a.jpg of macOS, .ipynb_checkpoints/a.jpg.
        if not any(part.startswith(".") for part in file.relative_to(source).parts)
    ]
    if unread := unread_kinds(file.name for file in files):
        warn(f"{source}: {unread}")
    found = [file for file in files if is_source(file, leave_out)]
    if not found:
        raise FileError(
            f"no image or video in this folder ({shown})", code="no_images", where=str(source)
        )
    return found


def is_source(file: Path, leave_out: Path | None) -> bool:
    """Whether a file is an image or video outside `leave_out`."""
    return (
        file.suffix.lower() in KNOWN_SUFFIXES
        and file.is_file()
        and (leave_out is None or leave_out.resolve() not in file.resolve().parents)
    )


def is_video(name: str | Path) -> bool:
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def frames_of(
    files: Sequence[Path], names: Sequence[str], complain: Callable[[str], None]
) -> Iterator[Frame]:
    """Yields the images and every frame of the videos, in order.

    Args: complain: called with the reason for each file that cannot be read and is left out.
    """
    for file, name in zip(files, names):
        try:
            if is_video(file):
                yield from video_frames(file, name, complain)
            else:
                yield Frame(name, None, read_image(file))
        except PredictorError as error:
            complain(str(error))


def video_path(file: Path | str) -> str:
    """Path for OpenCV's videos, which crash on one not UTF-8.

    Raises: FileError: it is not UTF-8.
    """
    try:
        return str(file).encode().decode()
    except UnicodeEncodeError as error:
        raise FileError(
            "OpenCV needs a UTF-8 path for a video",
            code="path_not_utf8",
            where=str(file),
            fix="rename it",
        ) from error


def video_frames(
    place: Path | str | int, name: str, complain: Callable[[str], None]
) -> Iterator[Frame]:
    """Yields the frames of a video, a stream or a numbered camera.

    Args: complain: called once with how many frames of a video are damaged; the others keep their
        numbers.
    Raises: FileError: not one frame can be read.
    """
    capture = cv2.VideoCapture(place if isinstance(place, int) else video_path(place))
    rate = capture.get(cv2.CAP_PROP_FPS) or USUAL_RATE
    # A file alone: a camera has no end, and a stream that is lost would be waited for.
    count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if isinstance(place, Path) else 0
    where = name if isinstance(place, int) else str(place)
    good, last, seconds = 0, -1, 0.0
    try:
        for index in itertools.count():
            there, frame_bgr = capture.read()
            if there:
                good, last = good + 1, index
                seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
                yield Frame(name, index, cv2.cvtColor(frame_bgr, cv2.COLOR_BGR2RGB), rate)
            elif index + 1 >= count or index - last > _MOST_LOST:
                break
    finally:
        capture.release()
    # Some containers only estimate how many frames they have.
    is_cut = 0 < seconds + 1 / rate < _WHOLE * count / rate
    total = count if is_cut else last + 1
    if 0 < good < total:
        complain(f"{where}: {total - good} of {total} frames are damaged")
    if not good:
        kind = "video" if isinstance(place, Path) else "camera or stream"
        raise FileError(
            f"no frame of this {kind} can be read", code="video_unreadable", where=where
        )


def read_image(file: Path) -> np.ndarray:
    """Image file as uint8 RGB, upright by EXIF; see `decode`.

    Raises: PredictorError: it cannot be read, is not an image, is truncated, or is too large.
    """
    content = _content(file)
    found = damage(content)
    if found is not None:
        raise PredictorError(f"{file}: {found.text}")
    try:
        image_HW3 = decode(content)
    except cv2.error as error:
        raise PredictorError(f"{file}: OpenCV cannot decode it: {error.err}") from error
    if image_HW3 is None:
        raise PredictorError(f"{file}: not an image, or damaged")
    return image_HW3


def _content(file: Path) -> bytes:
    """Content of a regular file; a pipe or device would block."""
    try:
        with open(file, "rb", opener=_open_at_once) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                raise PredictorError(f"{file}: not a file, or too large for an image")
            return opened.read(status.st_size)
    except OSError as error:
        raise PredictorError(f"{file}: {error.strerror or error}") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def predictions(
    predict: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
    frames: Iterator[Frame],
    batch: int,
) -> Iterator[tuple[Frame, np.ndarray]]:
    """Yields each frame with its predictions, computed in batches."""
    while group := list(itertools.islice(frames, batch)):
        yield from zip(group, predict([frame.image_HW3 for frame in group]))


def ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items, produced ahead by a thread, `most` at most.

    Exceptions of the thread are raised here; it ends when the reader stops reading.
    """
    waiting: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: Item | None, error: BaseException | None = None) -> None:
        while not stopped.is_set():
            try:
                return waiting.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the reader
            put(None, error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
