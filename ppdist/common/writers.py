"""Metric writers: a run's numbers and pictures for VisualDL and for trackers (trackers.py).

All writers get the same tags, steps and pictures, in the thread that writes the files of a run; one
that fails costs a warning.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import cv2
import numpy as np

from ppdist.common.files import append_whole, bytes_of, open_appended, replace_file, require_no_link
from ppdist.runtime.writer_thread import WriterThread

_FLOAT32_MAX = float(np.finfo(np.float32).max)  # viewers keep a point as float32


class MetricWriter:
    """The base of all writers: a run's numbers and pictures for one program.

    Override the methods for what the program can show.  An error that one raises costs a warning.
    """

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point for each tag, such as `train/loss` or `eval/mAP`."""

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images; sizes may differ."""

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """Describes the run.

        Args:
            hyper_parameters: numbers and texts that runs are compared by.
            metrics: tags whose last values stand beside them.
            texts: settings by section.
        """

    def rollback(self, step: int) -> None:
        """Drops the points after a step, because they are made again."""

    def end(self) -> None:
        """Is called before `close`, when nothing more comes; must not wait."""

    def close(self) -> None:
        """Writes the rest and closes the writer."""


def scalar_points(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record of metrics.jsonl, by tag.

    A record with `eval_seconds` is that of an evaluation.  There a value below 0 means that there
    was nothing to measure, such as no small object, and is left out.
    """
    evaluation = "eval_seconds" in record
    points = {}
    for key, value in record.items():
        if key in ("step", "epoch", "time") or isinstance(value, bool):
            continue
        if not isinstance(value, (int, float, np.number)) or not abs(value) <= _FLOAT32_MAX:
            continue  # NaN too
        tag = _tag(key, evaluation)
        if value >= 0 or not tag.startswith("eval"):
            points[tag] = float(value)
    return points


def _tag(key: str, evaluation: bool) -> str:
    """Returns the tag `group/name` of a metric; the page sorts groups and unfolds the first."""
    group, slash, name = key.partition("/")
    if slash and evaluation:
        return f"eval_per_class/{name}" if group == "AP" else f"eval_per_class_{group}/{name}"
    if slash:
        return key
    # Drawn beside the curve of train/... with the same name.
    if evaluation and key.startswith("val_"):
        return f"val/{key.removeprefix('val_')}"
    if key.endswith(("_seconds", "_per_second", "_mb", "_gb")):
        return f"speed/{key}"
    if evaluation:
        return f"eval/{key}"
    return f"lr/{key}" if key in ("lr", "momentum") else f"train/{key}"


@dataclass
class MetricWriters:
    """The writers of a run: everything goes to all of them, in a thread; failures only warn.

    Attributes: thread: also collects failures, by the name of the program.
    """

    thread: WriterThread
    _writers: dict[str, MetricWriter] = field(default_factory=dict)

    def open(self, program: str, make: Callable[[], MetricWriter]) -> None:
        """Adds a writer; the program's name goes into warnings."""
        try:
            self._writers[program] = make()
        except Exception as error:
            # No curve is worth a run.
            self.thread.failures.append((program, error))

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Writes the numbers of one record of metrics.jsonl; see `scalar_points`."""
        step, points = int(record["step"]), scalar_points(record)
        self._call_writers(lambda writer: writer.add_scalars(step, points))

    def images(self, tag: str, step: int, images_HW3: list[np.ndarray]) -> None:
        """Writes uint8 RGB images under `tag/0`, `tag/1`, ...; sizes may differ."""
        size = sum(image_HW3.nbytes for image_HW3 in images_HW3)
        self._call_writers(lambda writer: writer.add_images(step, tag, images_HW3), size)

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """Writes hyper-parameters for the page that compares runs, and the configuration.

        Args:
            hyper_parameters: numbers and texts.
            metrics: keys of evaluation records, whose last values stand beside them.
            texts: settings by section.
        """
        probe = dict.fromkeys(metrics, 0.0) | {"eval_seconds": 0.0}
        tags = [tag for tag in scalar_points(probe) if not tag.startswith("speed/")]
        tags.append("train/loss")
        self._call_writers(lambda writer: writer.describe(hyper_parameters, tags, texts))

    def rollback(self, step: int, guard: Callable[[Callable[[], object]], object]) -> None:
        """Drops the points after a step, because they are made again.

        Args: guard: calls the function that it gets, after its own checks.
        """
        self._call_writers(lambda writer: guard(partial(writer.rollback, step)))

    def close(self) -> None:
        """Closes all writers, at the same time; the second call does nothing."""
        self._call_writers(lambda writer: writer.end())
        self._call_writers(lambda writer: writer.close())
        self._writers = {}

    def _call_writers(self, write: Callable[[MetricWriter], object], size: int = 0) -> None:
        """Calls `write` for each writer, in the thread.

        Args: size: bytes that wait in the queue; if above 0, the call may be dropped.
        """
        for program, writer in self._writers.items():
            self.thread.put(program, partial(write, writer), size, may_drop=size > 0)


_LENGTH = struct.Struct("<Q")  # before each record


def _split_records(data: bytes) -> Iterator[bytes]:
    """Splits data into records, skipping a last one truncated by a crash."""
    position = 0
    while position + _LENGTH.size <= len(data):
        end = position + _LENGTH.size + _LENGTH.unpack_from(data, position)[0]
        if end > len(data):
            return
        yield data[position:end]
        position = end


def jpeg(image_HW3: np.ndarray) -> bytes:
    """Encodes a uint8 RGB image as JPEG."""
    succeeded, encoded = cv2.imencode(".jpg", image_HW3[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])
    if not succeeded:
        raise ValueError(f"an image of shape {image_HW3.shape} cannot be encoded as JPEG")
    return encoded.tobytes()


_RECORD_FILE = "vdlrecords.ppdist.log"  # VisualDL reads files with `vdlrecords` in the name
_HPARAM_TAG, _CONFIG_TAG = "hparam", "config/"  # the first name is VisualDL's


class VisualDLWriter(MetricWriter):
    """A writer that appends to the only VisualDL record file of a folder.

    A write that fails leaves the file as it was before that call, so it stays readable.

    The messages are VisualDL's own; its LogWriter is not used, for three reasons seen in release
    2.5.3: its writer thread prints a write error and loses the points without telling the caller;
    it cannot drop the points that a resumed run will compute again; and VisualDL shows only the
    newest file of a folder, so a second file would hide the first.

    A record file is a row of `uint64 little-endian length, protobuf message Record`, here with one
    Value each.  VisualDL files each tag under the kind of its first record, so no two kinds may
    share a tag.

    Source: github.com/PaddlePaddle/VisualDL 2.5.3, visualdl/proto/record.proto and
    reader/record_reader.
    """

    def __init__(self, folder: Path, run_name: str, keep_until_step: int | None) -> None:
        """Opens the file; truncates it to the records that a resumed run keeps.

        Args:
            folder: created if it is missing.
            run_name: name of the run on the page.
            keep_until_step: points after this step are dropped; None drops every earlier point.
        Raises: OSError: the folder cannot be made or written; ImportError: VisualDL is not
            installed.
        """
        package = find_spec("visualdl")
        if package is None or not package.submodule_search_locations:
            raise ImportError("visualdl is not installed")
        # Only its generated file: `import visualdl` makes folders in the user's home and takes 0.3
        # s.
        messages = run_path(f"{package.submodule_search_locations[0]}/proto/record_pb2.py")
        self._record_type = messages["Record"]
        require_no_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._run_name = folder / _RECORD_FILE, run_name
        self._described: list[bytes] = []
        self._open(keep_until_step)

    def rollback(self, step: int) -> None:
        """Drops the points after a step."""
        self._file.close()
        self._open(step)

    def _open(self, keep_until_step: int | None) -> None:
        frames = []
        if keep_until_step is not None and self._path.exists():
            old_frames = _split_records(bytes_of(self._path))
            frames = [frame for frame in old_frames if self._is_kept(frame, keep_until_step)]
        if not frames:
            frames = [self._frame(0, "meta_data_tag", meta_data={"display_name": self._run_name})]
        replace_file(self._path, b"".join(frames + self._described))
        self._file = open_appended(self._path)

    def _is_kept(self, frame: bytes, step: int) -> bool:
        """Returns True if a resumed run keeps a record.

        Its step is at most `step`, and `describe` does not write it again.
        """
        (value,) = self._record_type.FromString(frame[_LENGTH.size :]).values
        described = value.tag == _HPARAM_TAG or value.tag.startswith(_CONFIG_TAG)
        return value.id <= step and not described

    def _frame(self, step: int, tag: str, **content: Any) -> bytes:
        """Packs a record with one Value.

        Args: content: the one type-specific field of the Value.
        """
        value = {"id": step, "tag": tag, "timestamp": round(time.time() * 1000), **content}
        record = self._record_type(values=[value]).SerializeToString()
        return _LENGTH.pack(len(record)) + record

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """Writes hyper-parameters and configuration, replacing those before a resume.

        Args:
            hyper_parameters: numbers and texts; a row of the page that compares runs.
            metrics: tags of curves whose last points stand beside them.
            texts: settings by section; the page shows each as one paragraph.
        """
        hparam = {
            "name": self._run_name,
            # All numbers become double, so that 1 and 0.5 are of one kind on the page.
            "hparamInfos": [
                {"name": name, "float_value": value}
                if isinstance(value, (int, float))
                else {"name": name, "string_value": str(value)}
                for name, value in hyper_parameters.items()
            ],
            "metricInfos": [{"name": tag, "float_value": 0.0} for tag in metrics],
        }
        self._described = [self._frame(0, _HPARAM_TAG, hparam=hparam)]
        self._described += [
            self._frame(0, _CONFIG_TAG + name, text={"encoded_text_string": text})
            for name, text in texts.items()
        ]
        append_whole(self._file, b"".join(self._described))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point per tag; `a/b` is curve b in group a."""
        self._add(step, ((tag, {"value": value}) for tag, value in values.items()))

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        """Adds images as JPEG under `tag/0`, `tag/1` and so on.

        uint8 RGB; sizes may differ.
        """
        self._add(
            step,
            (
                (f"{tag}/{index}", {"image": {"encoded_image_string": jpeg(image_HW3)}})
                for index, image_HW3 in enumerate(images_HW3)
            ),
        )

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, contents: Iterable[tuple[str, dict[str, Any]]]) -> None:
        append_whole(
            self._file, b"".join(self._frame(step, tag, **content) for tag, content in contents)
        )
