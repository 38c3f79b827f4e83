"""Images and videos as they come from disk and go back to it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import cv2
import numpy as np

from ppdist.data.images import IMAGE_SUFFIXES, read_image
from ppdist.errors import DataError
from ppdist.files import make_parent, writing

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")


@dataclass(frozen=True)
class Frame:
    """One picture to look at."""

    name: str  # path relative to the source; the frames of a video share its name
    index: int | None  # frame number in a video from 0, None for an image
    image_HW3: np.ndarray  # uint8 RGB


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def _listed(suffixes: tuple[str, ...]) -> str:
    return " ".join(sorted(suffixes))
