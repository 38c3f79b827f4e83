"""Images and videos from disk, decoded ahead of the prediction in a thread of their own."""

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
from decoder import IMAGE_SUFFIXES, MOST_BYTES, damage, decode, unread_kind, unread_kinds
from predictor import PredictorError

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Frame:
    """One picture to look at."""

    name: str  # path relative to the source; the frames of a video share it
    index: int | None  # number in a video from 0; None: an image
    rate: float  # frames a second of the video; of an image 0
    image_HW3: np.ndarray  # uint8 RGB


def find_sources(source: Path, leave_out: Path, warn: Callable[[str], None]) -> list[Path]:
    """The images and videos a path stands for: itself, or all below it, in name order.

    Args:
        leave_out: a folder whose files do not count (where results are written).
        warn: told of images of kinds that are not read.
    Raises: PredictorError: the path does not exist, or there is nothing to look at.
    """
    known = IMAGE_SUFFIXES + VIDEO_SUFFIXES
    shown = " ".join(sorted(known))
    if source.is_file():
        if source.suffix.lower() not in known:
            kind = unread_kind(source.name)
            what = f"{kind} is not read" if kind else "neither an image nor a video"
            raise PredictorError(f"{source}: {what}; make it one of {shown}")
        return [source]
    if not source.is_dir():
        raise PredictorError(f"{source}: no such image, folder or video")
    files = [
        file
        for file in sorted(source.rglob("*"))
        # What programs put there for themselves: ._a.jpg of macOS, .ipynb_checkpoints/a.jpg.
        if not any(part.startswith(".") for part in file.relative_to(source).parts)
    ]
    found = [
        file
        for file in files
        if file.suffix.lower() in known
        and file.is_file()
        and leave_out.resolve() not in file.resolve().parents
    ]
    unread = unread_kinds(file.name for file in files)
    if unread:
        warn(f"{source}: {unread}")
    if not found:
        raise PredictorError(f"{source}: no image or video in this folder ({shown})")
    return found


def is_video(name: str | Path) -> bool:
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def frames_of(
    files: Sequence[Path], names: Sequence[str], complain: Callable[[str], None]
) -> Iterator[Frame]:
    """The picture of each image file and every frame of each video, in order.

    Args: complain: told of what cannot be read, which is left out.
    """
    for file, name in zip(files, names):
        try:
            if is_video(file):
                yield from _video_frames(file, name)
            else:
                yield Frame(name, None, 0.0, read_image(file))
        except PredictorError as error:
            complain(str(error))


def video_path(file: Path) -> str:
    """A path as OpenCV's videos take it; one that is not UTF-8 would crash it.

    Raises: PredictorError: it is not.
    """
    try:
        return str(file).encode().decode()
    except UnicodeEncodeError as error:
        raise PredictorError(f"{file}: OpenCV wants UTF-8 in a video's path; rename it") from error


def _video_frames(file: Path, name: str) -> Iterator[Frame]:
    capture = cv2.VideoCapture(video_path(file))
    rate = capture.get(cv2.CAP_PROP_FPS) or 25.0
    index = 0
    try:
        while True:
            there, frame_bgr = capture.read()
            if not there:
                break
            yield Frame(name, index, rate, cv2.cvtColor(frame_bgr, cv2.COLOR_BGR2RGB))
            index += 1
    finally:
        capture.release()
    if index == 0:
        raise PredictorError(f"{file}: no frame of this video can be read")


def read_image(file: Path) -> np.ndarray:
    """An image file as uint8 RGB [H, W, 3], turned upright as its EXIF data say; see `decode`.

    Raises: PredictorError: it cannot be read, is no image, cut short, or of too many pixels.
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
    """All bytes of a file that is one: a pipe would be waited for, a device is endless."""
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


def ahead(items: Iterator[Item], most: int) -> Iterator[Item]:
    """The same items, made by a thread that is up to `most` of them ahead.

    What the thread raises is raised here; when the reader goes away, the thread ends.
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
