"""TensorBoard event files; what an event holds is made by tensorboardX, an optional package.

Its SummaryWriter is not used: seen in release 2.6.5, a thread of it takes what is to be written out
of a queue of ten; when a write fails the thread ends, and the eleventh point waits for ever, so a
full disk would stop a training.  Here everything is written directly and in the calling thread.

A file is a row of `uint64 length, uint32 masked crc32c of it, protobuf message Event, uint32 masked
crc32c of that`, little-endian.  Where a run is resumed or goes back, later events are taken out of
its files, and a new file begins with an event that says from which step on earlier points do not
count: a TensorBoard that has read them already drops them then, all but precision-recall curves.

Source: github.com/tensorflow/tensorboard 2.21, backend/event_processing/event_accumulator.py.
"""

import io
import itertools
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.errors import ConfigError
from ppdist.points import Histogram, PRCurve
from ppdist.visualdl_file import append_whole, jpeg

_PREFIX, _SUFFIX = "events.out.tfevents.", ".ppdist"
_OVERHEAD = 16  # bytes of a length and two checksums
_THRESHOLDS_K = np.linspace(0, 1, 101)  # the page writes k / (K - 1) beside the k-th point


def require_tensorboardx() -> None:
    """Raises: ConfigError: it is not installed."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "log.tensorboard: true needs the package tensorboardX, which cannot be imported here "
            f"({error}): pip install 'ppdist[tensorboard]', or set log.tensorboard: false",
            code="package_missing",
        ) from error


class TensorBoardFile:
    """Appends to event files of a folder; a `CurveFile`.  Needs tensorboardX."""

    def __init__(self, folder: Path, keep_until_step: int | None) -> None:
        """Begins a file.

        Args:
            folder: made when it is missing.
            keep_until_step: points after this step are dropped; None drops every earlier point.
        Raises: OSError: the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._open(keep_until_step)

    def go_back(self, step: int) -> None:
        """Drops the points after a step."""
        self._file.close()
        self._open(step)

    def _open(self, keep_until_step: int | None) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        for file in self._folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            if keep_until_step is None:
                file.unlink()
            else:
                _cut(file, keep_until_step)
        # TensorBoard reads them in the order of their names.
        for number in itertools.count():
            path = self._folder / f"{_PREFIX}{time.time():.0f}.{number:04d}{_SUFFIX}"
            if not path.exists():
                break
        self._file = io.FileIO(path, "ab")
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2")])
        if keep_until_step is not None:
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=keep_until_step + 1, session_log=start)
            self._write([event])

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        """Says what run this is; see `VisualDLFile.describe`."""
        from tensorboardX import summary

        # The third says that the run has ended, which nobody knows here.
        experiment, session, _ = summary.hparams(
            dict(hyper_parameters), dict.fromkeys(metrics, 0.0)
        )
        # Indented by four a text is taken as it is, else as Markdown.
        shown = [summary.text(f"config/{name}", f"    {text}") for name, text in texts.items()]
        self._add(0, [experiment, session, *shown])

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each tag's curve."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step, [Summary(value=points)])

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        """Adds uint8 RGB images as JPEG under `tag/0`, `tag/1`, ...; sizes may differ."""
        from tensorboardX.proto.summary_pb2 import Summary

        shown = []
        for index, image_HW3 in enumerate(images_HW3):
            height, width, channels = image_HW3.shape
            image = Summary.Image(
                height=height,
                width=width,
                colorspace=channels,
                encoded_image_string=jpeg(image_HW3),
            )
            shown.append(Summary(value=[Summary.Value(tag=f"{tag}/{index}", image=image)]))
        self._add(step, shown)

    def add_histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
        """Adds one row to each tag's picture."""
        from tensorboardX import summary

        self._add(
            step,
            [
                summary.histogram_raw(
                    tag,
                    min=float(each.edges_K1[0]),
                    max=float(each.edges_K1[-1]),
                    num=float(each.counts_K.sum()),
                    sum=each.total,
                    sum_squares=each.total_of_squares,
                    bucket_limits=each.edges_K1[1:].tolist(),
                    bucket_counts=each.counts_K.tolist(),
                )
                for tag, each in values.items()
            ],
        )

    def add_pr_curves(self, step: int, curves: Mapping[str, PRCurve]) -> None:
        """Adds precision over recall; rightly not finding a box has no meaning, so TN is 0."""
        from tensorboardX import summary

        shown = []
        for tag, curve in curves.items():
            at = curve.at(_THRESHOLDS_K)
            shown.append(
                summary.pr_curve_raw(
                    tag,
                    at.true_positives_K,
                    at.false_positives_K,
                    np.zeros(len(_THRESHOLDS_K)),
                    at.false_negatives_K,
                    at.precision_K,
                    at.recall_K,
                    num_thresholds=len(_THRESHOLDS_K),
                )
            )
        self._add(step, shown)

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, summaries: list[Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event

        now = time.time()
        self._write([Event(wall_time=now, step=step, summary=each) for each in summaries])

    def _write(self, events: Iterable[Any]) -> None:
        append_whole(self._file, b"".join(_framed(each.SerializeToString()) for each in events))


def _cut(file: Path, step: int) -> None:
    """Takes the events after a step out of a file, and whatever a crash has cut short."""
    from tensorboardX.proto.event_pb2 import Event

    data, position, kept = file.read_bytes(), 0, []
    while position + _OVERHEAD <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        end = position + length + _OVERHEAD
        if end > len(data):
            break
        if Event.FromString(data[position + 12 : end - 4]).step <= step:
            kept.append(data[position:end])
        position = end
    draft = file.with_suffix(".tmp")
    draft.write_bytes(b"".join(kept))
    draft.replace(file)


def _framed(event: bytes) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(event))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, event)]
    return length + checks[0] + event + checks[1]
