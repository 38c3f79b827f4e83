"""Sources of images: files, folders, globs, addresses, videos, cameras.

expand            words of a user -> Source, each with a unique name
frames_of         Source -> Frame, Frame, ...
as_image          image in Python (numpy, Pillow) -> uint8 RGB
"""

import functools
import glob
import http.client
import itertools
import logging
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from ppdist.common.errors import DataError
from ppdist.common.machine import suggest_path
from ppdist.data.datasets.annotations import ignore_issue, read_text
from ppdist.data.image import DARK, convert_array, convert_pillow, decode_image, read_content
from ppdist.runtime.decoder import (
    IMAGE_SUFFIXES,
    has_sixteen_bits,
    is_dark,
    unread_kind,
    unread_kinds,
)
from ppdist.storage.files import STORAGE

STDIN = "-"
LIST_SUFFIX = ".txt"  # of a file with one path or URL per line
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
KNOWN_SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES
USUAL_RATE = 25.0  # frames per second of a video or camera that does not state its rate
_FEW_LINES = 5  # of a list, that a message shows
_MOST_LOST = 1000  # damaged frames in a row at most; at the end of a video each takes 10 us
_COMPLETE = 0.9  # a video that ends before this part of its time was cut off
_LOGGER = logging.getLogger("ppdist")
_LIVE = ("rtsp://", "rtsps://", "rtmp://", "rtp://", "udp://", "tcp://")
_WEB = ("http://", "https://")
_MOST_BYTES = 1 << 28  # of an image that is not read from this disk
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Frame:
    """A picture to predict."""

    name: str  # of its source; the frames of a video share it
    index: int | None  # frame number in a video from 0; None: an image
    image_HW3: np.ndarray  # uint8 RGB
    rate: float = 0.0  # frames a second of the video; of an image 0


@dataclass(frozen=True)
class Source:
    """A source of one picture or many.

    place: a file, a URL, the number of a camera, or STDIN.
    name: its name in results, relative to the folder that the user specified.
    """

    place: Path | str | int
    name: str

    @property
    def is_video(self) -> bool:
        """Returns True if it has frames: a video, a camera or a stream."""
        return is_video(self.place)

    @property
    def is_live(self) -> bool:
        """Returns True if it has no end: a camera or a stream."""
        return isinstance(self.place, int) or (
            isinstance(self.place, str) and self.place.startswith(_LIVE)
        )


def is_video(place: Path | str | int) -> bool:
    """Returns True if a place has frames: a video, a camera, a stream."""
    if isinstance(place, int):
        return True
    text = str(place)
    if text.startswith(_LIVE):
        return True
    path = urllib.parse.urlsplit(text).path if text.startswith(_WEB) else text
    return Path(path).suffix.lower() in VIDEO_SUFFIXES


def is_many(place: Path | str | int) -> bool:
    """Returns True if a place may contain several pictures, that is, unless it is a single image.

    Raises: DataError: there is no permission to read it.
    """
    if isinstance(place, str) and (place == STDIN or place.startswith(_WEB)):
        return is_video(place)
    with data_errors(place):
        path = Path(str(place))
        return is_video(place) or path.is_dir() or _is_pattern(place) or _is_list(path)


def expand(words: Sequence[Path | str | int], leave_out: Path | None = None) -> list[Source]:
    """Finds the sources of paths, globs, addresses and cameras, in order, with unique names.

    Args:
        words: file, folder (searched to its depth), pattern such as `a/**/*.jpg`, address (http,
            https: an image, or a video by its suffix; rtsp and its like), number of a camera,
            STDIN for an image on standard input, or a text file with a path or an address a line,
            relative to its folder.
        leave_out: a folder whose files are ignored (where results are written).
    Raises: DataError: a source does not exist, cannot be read, or contains no images or videos.
    """
    sources: list[Source] = []
    for word in words:
        with data_errors(word):
            sources += _expand_word(word, leave_out)
    # The files found for one word have different paths, so their names are unique already.
    if len(words) == 1 and not _is_list(Path(str(words[0]))):
        return sources
    used_names: set[str] = set()
    unique_sources, seen_places = [], set()
    for source in sources:
        key = source.place.resolve() if isinstance(source.place, Path) else source.place
        if key in seen_places:  # a folder, and a file in it
            continue
        seen_places.add(key)
        unique_sources.append(Source(source.place, _unique_name(source.name, used_names)))
    return unique_sources


def root_of(word: Path | str | int) -> Path | None:
    """Returns the file or folder where the search for a word starts, or None.

    Raises: DataError: there is no permission to read it.
    """
    with data_errors(word):
        if _is_pattern(word):
            parts = Path(str(word)).parts
            return Path(*parts[: _magic_part(parts)])
        path = Path(str(word))
        return path if path.exists() else None


@contextmanager
def data_errors(word: Path | str | int) -> Iterator[None]:
    """Converts operating system errors to DataError."""
    try:
        yield
    except OSError as error:
        message, where = error.strerror or str(error), str(error.filename or word)
        raise DataError(message, code="folder_unreadable", where=where) from error


def _magic_part(parts: Sequence[str]) -> int:
    """Returns the position of the first part that is a pattern, not a folder with brackets."""
    return next(
        index
        for index, part in enumerate(parts)
        if glob.has_magic(part) and not Path(*parts[: index + 1]).exists()
    )


def _expand_word(word: Path | str | int, leave_out: Path | None) -> list[Source]:
    text = str(word)
    if isinstance(word, int) or (text.isdecimal() and not Path(text).exists()):
        return [Source(int(text), f"camera{int(text)}")]
    if text == STDIN:
        return [Source(STDIN, "stdin.jpg")]
    if text.startswith((*_LIVE, *_WEB)):
        return [Source(text, _name_of_address(text))]
    if _is_pattern(word):
        parts = Path(text).parts
        # Brackets in the name of an existing folder are not a pattern.
        plain = _magic_part(parts)
        pattern = os.path.join(*map(glob.escape, parts[:plain]), *parts[plain:])
        matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
        chosen = [file for file in matches if is_source(file, leave_out)]
        if not chosen:
            raise DataError("no image or video matches", code="no_images", where=text)
        return [Source(file, str(Path(*file.parts[plain:]))) for file in chosen]
    path = Path(word)
    if _is_list(path):
        return _expand_list(path, leave_out)
    root = path if path.is_dir() else path.parent
    files = find_sources(path, leave_out)
    return [Source(file, str(file.relative_to(root))) for file in files]


def _is_list(path: Path) -> bool:
    return path.suffix.lower() == LIST_SUFFIX and path.is_file()


def _expand_list(file: Path, leave_out: Path | None) -> list[Source]:
    """Finds the sources in a list file: a URL or a path relative to its folder on each line.

    Raises: DataError: the list is empty, or sources are missing; `where` has the number of the
        first such line, and the message those of the next.
    """
    sources: list[Source] = []
    failures: list[tuple[int, str, DataError]] = []
    for number, line in enumerate(read_text(file, ignore_issue).splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        is_address = word.startswith((*_LIVE, *_WEB))
        place = word if is_address else str(file.parent / word)
        try:
            if not is_address and _is_list(Path(place)):
                raise DataError("a list in a list", code="source_of_many", where=place)
            places = _expand_word(place, leave_out)
        except DataError as error:
            failures.append((number, place, error))
            continue
        # The name keeps the folders of the path, so that files with the same name stay distinct.
        is_one = not is_address and not os.path.isabs(word) and Path(place).is_file()
        sources += [Source(places[0].place, _name_in(word))] if is_one else places
    if failures:
        raise _list_error(file, failures)
    if not sources:
        raise DataError("this list has no line", code="no_images", where=str(file))
    return sources


def _list_error(file: Path, failures: Sequence[tuple[int, str, DataError]]) -> DataError:
    """Describes the lines of a list that cannot be used: number, place, and what is wrong."""
    number, place, error = failures[0]
    numbers = [str(line) for line, _, _ in failures[1:]]
    shown = ", ".join(numbers[:_FEW_LINES]) + (", ..." if len(numbers) > _FEW_LINES else "")
    more = f"; so {len(numbers)} more: lines {shown}" if len(numbers) > 1 else ""
    more = f"; line {shown}, too" if len(numbers) == 1 else more
    # The nearest name may be that of the list itself.
    fix = "" if LIST_SUFFIX in error.fix else error.fix
    return DataError(
        f"{place}: {error.what}{more}",
        code=error.code,
        where=f"{file}:{number}",
        fix=fix or "correct the list; paths are relative to its folder",
    )


def _name_in(word: str) -> str:
    """Returns a path from a list without the parts that lead out of the list's folder."""
    parts = [part for part in Path(os.path.normpath(word)).parts if part != os.pardir]
    return str(Path(*parts))


def find_sources(source: Path, leave_out: Path | None) -> list[Path]:
    """Finds the images and videos at a path, below a folder in name order.

    Args: leave_out: a folder whose files are ignored (where results are written).
    Raises: DataError: the path does not exist, or contains no images or videos.
    """
    suffixes = " ".join(sorted(KNOWN_SUFFIXES))
    if source.is_file():
        if source.suffix.lower() not in KNOWN_SUFFIXES:
            kind = unread_kind(source.name)
            raise DataError(
                f"{kind} is not supported" if kind else "neither an image nor a video",
                code="not_a_picture",
                where=str(source),
                fix=f"convert it to one of {suffixes}",
            )
        return [source]
    if not source.is_dir():
        raise DataError(
            "no such image, folder or video",
            code="source_not_found",
            where=str(source),
            fix=suggest_path(source),
        )
    files = [
        file
        for file in sorted(source.rglob("*"))
        # Files that programs create for internal use: ._a.jpg of macOS, .ipynb_checkpoints/a.jpg.
        if not any(part.startswith(".") for part in file.relative_to(source).parts)
    ]
    if unread := unread_kinds(file.name for file in files):
        _LOGGER.warning("%s: %s", source, unread)
    sources = [file for file in files if is_source(file, leave_out)]
    if not sources:
        raise DataError(
            f"no image or video in this folder ({suffixes})", code="no_images", where=str(source)
        )
    return sources


def is_source(file: Path, leave_out: Path | None) -> bool:
    """Returns True if a file is an image or video outside `leave_out`."""
    return (
        file.suffix.lower() in KNOWN_SUFFIXES
        and file.is_file()
        and (leave_out is None or leave_out.resolve() not in file.resolve().parents)
    )


def _is_pattern(word: Path | str | int) -> bool:
    text = str(word)
    return glob.has_magic(text) and not Path(text).exists() and not text.startswith((*_LIVE, *_WEB))


def _name_of_address(text: str) -> str:
    """Returns the file name that an address suggests, never one in another folder."""
    parts = urllib.parse.urlsplit(text)
    name = Path(urllib.parse.unquote(parts.path)).name or parts.hostname or "address"
    name = "".join(letter for letter in name if letter.isprintable() and letter not in '\\:*?"<>|')
    name = name.lstrip(".") or "address"
    return name if Path(name).suffix.lower() in KNOWN_SUFFIXES or is_video(text) else f"{name}.jpg"


def _unique_name(name: str, used_names: set[str]) -> str:
    """Returns a name that no other source has: `a.jpg`, `a_2.jpg`, ..."""
    path, candidate, number = Path(name), name, 1
    while candidate in used_names:
        number += 1
        candidate = str(path.with_name(f"{path.stem}_{number}{path.suffix}"))
    used_names.add(candidate)
    return candidate


# --- sources to frames ----------------------------------------------------------------------------


def frames_of(source: Source, report: Callable[[str], None]) -> Iterator[Frame]:
    """Yields the frames of a source; reports what cannot be read."""
    try:
        yield from readable_frames(source, report)
    except DataError as error:
        report(str(error))


def readable_frames(source: Source, report: Callable[[str], None]) -> Iterator[Frame]:
    """Yields the frames of a source, as `frames_of` does; reports damaged frames only.

    Raises: DataError: the source cannot be reached or read.
    """
    if not source.is_video:
        yield Frame(source.name, None, read_source(source.place))
        return
    yield from video_frames(source.place, source.name, report)


def video_path(file: Path | str) -> str:
    """Returns a path for OpenCV's videos, which crash on one that is not UTF-8.

    Raises: DataError: it is not UTF-8.
    """
    try:
        return str(file).encode().decode()
    except UnicodeEncodeError as error:
        raise DataError(
            "OpenCV needs a UTF-8 path for a video",
            code="path_not_utf8",
            where=str(file),
            fix="rename it",
        ) from error


def video_frames(
    place: Path | str | int, name: str, report: Callable[[str], None]
) -> Iterator[Frame]:
    """Yields the frames of a video, a stream or a numbered camera.

    Args: report: called once with the number of damaged frames in a video; the other frames keep
        their numbers.
    Raises: DataError: no frame can be read.
    """
    capture = cv2.VideoCapture(place if isinstance(place, int) else video_path(place))
    rate = capture.get(cv2.CAP_PROP_FPS) or USUAL_RATE
    # Only a file has a length: a camera has no end, and a lost stream would be awaited forever.
    count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if isinstance(place, Path) else 0
    where = name if isinstance(place, int) else str(place)
    decoded, last_decoded, seconds = 0, -1, 0.0
    try:
        for index in itertools.count():
            is_decoded, frame_bgr = capture.read()
            if is_decoded:
                decoded, last_decoded = decoded + 1, index
                seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
                yield Frame(name, index, cv2.cvtColor(frame_bgr, cv2.COLOR_BGR2RGB), rate)
            elif index + 1 >= count or index - last_decoded > _MOST_LOST:
                break
    finally:
        capture.release()
    # Some containers only estimate how many frames they have.
    is_cut = 0 < seconds + 1 / rate < _COMPLETE * count / rate
    total = count if is_cut else last_decoded + 1
    if 0 < decoded < total:
        report(f"{where}: {total - decoded} of {total} frames are damaged")
    if not decoded:
        kind = "video" if isinstance(place, Path) else "camera or stream"
        raise DataError(
            f"no frame of this {kind} can be read", code="video_unreadable", where=where
        )


def predictions(
    predict: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
    frames: Iterator[Frame],
    batch: int,
) -> Iterator[tuple[Frame, np.ndarray]]:
    """Yields each frame with its predictions, computed in batches."""
    while group := list(itertools.islice(frames, batch)):
        yield from zip(group, predict([frame.image_HW3 for frame in group]))


def read_source(place: Path | str | int) -> np.ndarray:
    """Reads the image of a file, an address or standard input, uint8 RGB.

    Raises: DataError: the image is unavailable, not an image, damaged, or too large.
    """
    text = str(place)
    if text == STDIN:
        return decode_image(_within_limit(sys.stdin.buffer.read(_MOST_BYTES + 1), "stdin"), "stdin")
    if text.startswith(_WEB):
        return decode_image(_download(text), text)
    content = read_content(text, STORAGE)
    return warn_if_dark(decode_image(content, text), has_sixteen_bits(content))


def warn_if_dark(image_HW3: np.ndarray, has_16_bits: bool) -> np.ndarray:
    """Returns the image; warns if it had 16 bits per value, of which few are used."""
    if has_16_bits and is_dark(image_HW3):
        _warn_once(DARK)
    return image_HW3


_warn_once = functools.cache(_LOGGER.warning)


def _download(address: str) -> bytes:
    """Downloads the bytes of an image.

    Raises: DataError: the URL cannot be read, or its content is too large.
    """
    quoted = urllib.parse.quote(address, safe="/:?#[]@!$&'()*+,;=%~")  # blanks, other letters
    request = urllib.request.Request(quoted, headers={"User-Agent": "ppdist"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            content = answer.read(_MOST_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"cannot be downloaded: {reason}", code="image_unreachable", where=address
        ) from error
    return _within_limit(content, address)


def _within_limit(content: bytes, where: str) -> bytes:
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"more than {_MOST_BYTES} bytes, which no image takes that is read from there",
            code="image_unreadable",
            where=where,
        )
    return content


def is_picture(value: Any) -> bool:
    """Returns True for an image in Python that `as_image` takes."""
    image_types = Image.Image | np.ndarray | bytes | bytearray | memoryview
    return isinstance(value, image_types) or hasattr(value, "read")


def as_image(image: Any) -> np.ndarray:
    """Converts an image in Python, or the bytes of a file, to uint8 RGB.

    Raises: DataError: it is neither, or its pixels have another type or shape.
    """
    if isinstance(image, Image.Image):
        return warn_if_dark(convert_pillow(image), image.mode.startswith("I"))
    if isinstance(image, np.ndarray):
        return warn_if_dark(convert_array(image), image.dtype != np.uint8)
    if isinstance(image, bytes | bytearray | memoryview):
        return decode_image(_within_limit(bytes(image), "bytes"), "bytes")
    if hasattr(image, "read"):
        return decode_image(
            _within_limit(image.read(_MOST_BYTES + 1), "a file object"), "a file object"
        )
    raise DataError(
        f"{type(image).__name__} is not an image; expected a path, a URL, uint8 RGB [H, W, 3], a "
        "Pillow image, or the bytes of an image file",
        code="image_array",
        fix="imread returns None for a file that is missing or no image: check its path, or "
        "give the path itself"
        if image is None
        else "",
    )
