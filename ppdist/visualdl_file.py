"""A VisualDL record file, written directly and in the calling thread.

VisualDL's own LogWriter is not used, for four reasons seen in release 2.5.3: its writer thread
prints a write error and loses the points without telling the caller; it cannot drop the points
that a resumed run will compute again; importing it makes folders in the user's home and takes
0.3 s; and VisualDL shows only the newest file of a folder, so a second file would hide the first.

A record file is a row of `uint64 little-endian length, protobuf message Record`.  Of VisualDL's
record.proto only this is needed (tests read the files back with VisualDL itself):

    Record { repeated Value values = 1; }
    Value  { int64 id = 1 (the step); string tag = 2; int64 timestamp = 3 (ms);
             oneof { float value = 4; Image image = 5; Histogram histogram = 8;
                     PRCurve pr_curve = 9; MetaData meta_data = 10; Text text = 12;
                     HParam hparam = 13; } }
    Image     { bytes encoded_image_string = 4; }
    Histogram { repeated double hist = 1, bin_edges = 2; }
    PRCurve   { repeated int64 TP = 1, FP = 2, TN = 3, FN = 4;
                repeated double precision = 5, recall = 6; }
    MetaData  { string display_name = 1; }
    Text      { string encoded_text_string = 1; }
    HParam    { repeated Info hparamInfos = 1, metricInfos = 2; string name = 3; }
    Info      { oneof { int64 int_value = 1; double float_value = 2; string string_value = 3; }
                string name = 4; }

It files each tag under the kind of its first record, so no two kinds may share a tag.

Source: github.com/PaddlePaddle/VisualDL 2.5.3, visualdl/proto/record_pb2.py, reader/record_reader.
"""

import errno
import io
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ppdist.points import Histogram, PRCurve

_VARINT, _FLOAT64, _BYTES, _FLOAT32 = 0, 1, 2, 5  # protobuf wire types
_LENGTH = struct.Struct("<Q")
_FILE_NAME = "vdlrecords.ppdist.log"  # VisualDL reads files with `vdlrecords` in the name
_HYPER_PARAMETERS, _CONFIG = "hparam", "config/"  # the first name is VisualDL's
# The page writes k/K beside the k-th point of a curve, whatever its thresholds were.
_THRESHOLDS_K = np.arange(1, 101) / 100


class VisualDLFile:
    """Appends to the one record file of a folder; a `CurveFile`.

    Whatever a call writes is on its way to disk when the call returns.  A write that fails leaves
    the file as it was before that call, so it stays readable.
    """

    def __init__(self, folder: Path, run_name: str, keep_until_step: int | None) -> None:
        """Opens the file, and first cuts it back to what a resumed run has not yet to repeat.

        Args:
            folder: made when it is missing.
            run_name: what the page calls this run.
            keep_until_step: points after this step are dropped; None drops every earlier point.
        Raises: OSError: the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._run_name = folder / _FILE_NAME, run_name
        self._described: list[bytes] = []
        self._open(keep_until_step)

    def go_back(self, step: int) -> None:
        """Drops the points after a step."""
        self._file.close()
        self._open(step)

    def _open(self, keep_until_step: int | None) -> None:
        kept = []
        if keep_until_step is not None and self._path.exists():
            kept = [r for r in _records(self._path.read_bytes()) if _stays(r, keep_until_step)]
        if not kept:
            kept = [_record(0, "meta_data_tag", _field(10, _field(1, self._run_name.encode())))]
        kept += self._described
        draft = self._path.with_suffix(".tmp")
        draft.write_bytes(b"".join(_framed(record) for record in kept))
        draft.replace(self._path)
        self._file = io.FileIO(self._path, "ab")

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """Says what run this is, in the place of what was said where it began before a resume.

        Args:
            hyper_parameters: numbers and texts; a row of the page that compares runs.
            metrics: tags of curves whose last points stand beside them.
            texts: settings by section; the page shows each as one paragraph.
        """
        infos = [_field(1, _info(name, value)) for name, value in hyper_parameters.items()]
        infos += [_field(2, _info(tag, 0.0)) for tag in metrics]
        hparam = b"".join(infos) + _field(3, self._run_name.encode())
        self._described = [_record(0, _HYPER_PARAMETERS, _field(13, hparam))]
        self._described += [
            _record(0, _CONFIG + name, _field(12, _field(1, text.encode())))
            for name, text in texts.items()
        ]
        self._append(self._described)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each tag's curve; `a/b` is shown as curve b in group a."""
        self._append(
            _record(step, tag, _key(4, _FLOAT32) + struct.pack("<f", value))
            for tag, value in values.items()
        )

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images as JPEG under `tag/0`, `tag/1`, ...; sizes may differ."""
        self._append(
            _record(step, f"{tag}/{index}", _field(5, _field(4, jpeg(image_HW3))))
            for index, image_HW3 in enumerate(images_HW3)
        )

    def add_histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        """Adds one row to each tag's picture."""
        self._append(
            _record(step, tag, _field(8, _doubles(1, each.counts_K) + _doubles(2, each.edges_K1)))
            for tag, each in values.items()
        )

    def add_pr_curves(self, step: int, curves: Mapping[str, PRCurve]) -> None:
        """Adds precision over recall; rightly not finding a box has no meaning, so TN is 0."""
        self._append(_record(step, tag, _field(9, _curve(each))) for tag, each in curves.items())

    def close(self) -> None:
        self._file.close()

    def _append(self, records: Iterable[bytes]) -> None:
        append_whole(self._file, b"".join(_framed(record) for record in records))


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Appends all of `data` to an unbuffered file, or, when that fails, nothing.

    Raises: OSError: the disk is full, or the file was removed.
    """
    status = os.fstat(file.fileno())
    if not status.st_nlink:  # the system would take it, and nobody could read it
        raise FileNotFoundError(errno.ENOENT, "it was removed", file.name)
    size = status.st_size
    try:
        while data:  # an unbuffered write may take only a part
            data = data[file.write(data) :]
    except OSError:
        file.truncate(size)
        raise


def jpeg(image_HW3: np.ndarray) -> bytes:
    """Of an uint8 RGB image."""
    done, encoded = cv2.imencode(".jpg", image_HW3[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])
    if not done:
        raise ValueError(f"an image of shape {image_HW3.shape} cannot be encoded as JPEG")
    return encoded.tobytes()


def _curve(curve: PRCurve) -> bytes:
    at = curve.at(_THRESHOLDS_K)
    counts = (
        at.true_positives_K,
        at.false_positives_K,
        np.zeros(len(_THRESHOLDS_K)),
        at.false_negatives_K,
    )
    return (
        b"".join(
            _field(number, b"".join(_varint(int(each)) for each in counts_K))
            for number, counts_K in enumerate(counts, start=1)
        )
        + _doubles(5, at.precision_K)
        + _doubles(6, at.recall_K)
    )


def _info(name: str, value: Any) -> bytes:
    """A hyper-parameter: numbers all as double, so that 1 and 0.5 are of one kind on the page."""
    if isinstance(value, (int, float)):
        content = _key(2, _FLOAT64) + struct.pack("<d", value)
    else:
        content = _field(3, str(value).encode())
    return content + _field(4, name.encode())


def _doubles(number: int, values: np.ndarray) -> bytes:
    return _field(number, values.astype("<f8").tobytes())


def _record(step: int, tag: str, payload: bytes) -> bytes:
    milliseconds = round(time.time() * 1000)
    value = _key(1, _VARINT) + _varint(step) + _field(2, tag.encode())
    return _field(1, value + _key(3, _VARINT) + _varint(milliseconds) + payload)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    """Seven bits a byte, lowest first; the high bit says that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


def _framed(record: bytes) -> bytes:
    return _LENGTH.pack(len(record)) + record


def _records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file; a last one cut short by a crash is left out."""
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > len(data):
            return
        yield data[position : position + length]
        position += length


def _stays(record: bytes, step: int) -> bool:
    """Whether a record that this module wrote is of up to a step, and not of what is said anew."""
    _, position = _read_varint(record, 1)  # over the length of the one Value
    # protobuf leaves out a step of zero, we never do
    own_step, position = _read_varint(record, position + 1)
    length, position = _read_varint(record, position + 1)
    tag = record[position : position + length].decode()
    return own_step <= step and tag != _HYPER_PARAMETERS and not tag.startswith(_CONFIG)
