"""Images and videos from disk, decoded ahead of the prediction in a thread of their own."""

import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from predictor import PredictorError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
_PNG = b"\x89PNG\r\n\x1a\n"
# A JPEG marker that has a length, found as libjpeg finds it: whatever else there is, it skips.
_SEGMENT = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Frame:
    """One picture to look at."""

    name: str  # path relative to the source; the frames of a video share it
    index: int | None  # number in a video from 0; None: an image
    rate: float  # frames a second of the video; of an image 0
    image_HW3: np.ndarray  # uint8 RGB


def find_sources(source: Path, leave_out: Path) -> list[Path]:
    """The images and videos a path stands for: itself, or all below it, in name order.

    Args: leave_out: a folder whose files do not count (where results are written).
    Raises: PredictorError: the path does not exist, or there is nothing to look at.
    """
    known = IMAGE_SUFFIXES + VIDEO_SUFFIXES
    shown = " ".join(sorted(known))
    if source.is_file():
        if source.suffix.lower() not in known:
            raise PredictorError(f"{source}: neither an image nor a video ({shown})")
        return [source]
    if not source.is_dir():
        raise PredictorError(f"{source}: no such image, folder or video")
    found = [
        file
        for file in sorted(source.rglob("*"))
        if file.suffix.lower() in known
        and not file.name.startswith(".")  # ._a.jpg of macOS is no image
        and file.is_file()
        and leave_out.resolve() not in file.resolve().parents
    ]
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
    """An image file as uint8 RGB [H, W, 3], turned upright as its EXIF data say.

    Grey becomes three equal channels, of 16 bits the upper 8 count, transparency is ignored (but a
    TIFF's is blended over black); of several frames the first is taken.

    Raises: PredictorError: it cannot be read, is no image, or is cut short.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise PredictorError(f"{file}: {error.strerror or error}") from error
    if is_cut_short(content):
        raise PredictorError(f"{file}: the data end early (incomplete file)")
    try:
        image_HW3 = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error as error:
        raise PredictorError(f"{file}: OpenCV cannot decode it: {error.err}") from error
    if image_HW3 is None:
        raise PredictorError(f"{file}: not an image, or damaged")
    return image_HW3


def is_cut_short(content: bytes) -> bool:
    """Whether a file is empty, or a JPEG or PNG without its end; OpenCV paints what is missing.

    A JPEG's segments are walked up to its pixels: a thumbnail in one has an end of its own.
    """
    if content.startswith(b"\xff\xd8"):
        position = 2
        while segment := _SEGMENT.search(content, position):
            position = segment.end()
            if segment[0] == b"\xff\xda":
                break
            position += max(2, int.from_bytes(content[position : position + 2], "big"))
        return content.find(b"\xff\xd9", position) < 0
    if content.startswith(_PNG):
        position = 8
        while position + 12 <= len(content):
            kind = content[position + 4 : position + 8]
            position += 12 + int.from_bytes(content[position : position + 4], "big")
            if kind == b"IEND" and position <= len(content):
                return False
        return True
    return not content


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
