"""Finds objects in images and videos with an exported model.

    python -m ppdist_runtime --model DIR --source IMAGE|DIR|VIDEO --out DIR

OUT gets every picture with its boxes drawn, and detections.json: a COCO data set of what was found
(`annotations` is also a COCO result list).  A classifier draws its five surest classes instead, and
writes them to classes.json.
"""

import argparse
import io
import itertools
import os
import re
import signal
import sys
from pathlib import Path
from typing import TextIO

from .pictures import ahead, find_sources, frames_of, predictions
from .predictor import (
    USUAL_THRESHOLD,
    Predictor,
    PredictorError,
    default_threshold,
    lost_below,
)
from .results import (
    FILES,
    Results,
    picture_names,
    require_no_foreign_files,
    require_own_folder,
)

# Characters that move a terminal's cursor, change its title or reverse the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="predictor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="an exported model")
    add("--source", required=True, type=Path, metavar="IMAGE|DIR|VIDEO",
        help="what to look at; a folder is searched to its depth")  # fmt: skip
    add("--out", required=True, type=Path, metavar="DIR", help="where to write")
    add("--threshold", type=float,
        help="lowest score of a box that counts, 0..1 (default: that of the best F1, where "
        f"infer.yml says it, else {USUAL_THRESHOLD})")  # fmt: skip
    add("--backend", default="auto", choices=("auto", "onnx", "openvino", "paddle", "tensorrt"),
        help="what runs the model (default: the fastest that is installed and that the export was "
        "checked in); tensorrt: through ONNX Runtime on a card, never run by us")  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "gpu"))
    add("--threads", type=int, default=1, help="CPU threads of one prediction (default: 1)")
    add("--int8", action="store_true", help="the quantised model of the export")
    add("--bfloat16", action="store_true",
        help="OpenVINO computes in it, where the processor can; less exact")  # fmt: skip
    add("--batch", type=int, default=1, help="images at once (default: 1)")
    add("--csv", action="store_true", help="write what was found as a table, too")
    add("--no-pictures", action="store_true", help="draw nothing, which is faster")
    return parser.parse_args()


def main() -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may hold bytes of any encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return run(parse())
    except KeyboardInterrupt:
        return interrupted()
    except PredictorError as error:
        say(f"predictor: error: {error}", sys.stderr)
        return 2
    except BrokenPipeError:  # the reader is gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line; control characters, as in file names, become JSON's escapes."""
    print(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text), file=stream)


def warn(text: str) -> None:
    say(f"predictor: warning: {text}", sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if arguments.batch < 1:
        raise PredictorError(f"--batch {arguments.batch}: expected 1 or more")
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise PredictorError(f"--threshold {arguments.threshold:g}: expected 0..1")
    ours = holds_results(out)
    require_own_folder(out, arguments.source, ours)
    sources = find_sources(arguments.source, out, warn)
    root = arguments.source if arguments.source.is_dir() else arguments.source.parent
    names = [str(file.relative_to(root)) for file in sources]
    pictures = {} if arguments.no_pictures else dict(zip(names, picture_names(names)))
    if not ours:
        require_no_foreign_files(out, pictures.values())
    predictor = Predictor(
        arguments.model, arguments.backend, arguments.threads, arguments.device, arguments.int8,
        arguments.bfloat16,
    )  # fmt: skip
    say(f"predictor: {predictor.runtime}", sys.stderr)
    if predictor.doubt:
        warn(predictor.doubt)
    if arguments.threshold is not None and predictor.spec["task"] == "classify":
        raise PredictorError("--threshold is for boxes, and a classifier has none; leave it out")
    threshold, whence = default_threshold(predictor.spec)
    if arguments.threshold is not None:
        threshold = arguments.threshold
        if lost := lost_below(predictor.spec, threshold):
            warn(lost)
    elif predictor.spec["task"] == "detect":
        say(f"predictor: threshold {threshold:g}, {whence}", sys.stderr)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PredictorError(f"{out}: cannot be made: {error.strerror}") from error
    results = Results(out, predictor.spec, threshold, pictures)
    unreadable: list[str] = []

    def complain(reason: str) -> None:
        unreadable.append(reason)
        warn(f"{reason}; skipped")

    frames = ahead(frames_of(sources, names, complain), 2 * arguments.batch)
    found_in = predictions(predictor, frames, arguments.batch)
    stopped = False
    try:
        for name, pairs in itertools.groupby(found_in, key=lambda pair: pair[0].name):
            before = len(results.objects)
            said = [results.add(frame, found) for frame, found in pairs]
            if len(said) > 1:
                objects = f"{len(results.objects) - before} objects in " if results.detects else ""
                said = [f"{objects}{len(said)} frames"]
            say(f"{name}: {said[0]}")
    except KeyboardInterrupt:  # what was found so far is written
        if not results.images:
            raise
        stopped = True
    if unreadable:
        warn(f"{len(unreadable)} of {len(sources)} files could not be read, or not whole")
    if not results.images:
        raise PredictorError(f"{arguments.source}: no image or video there could be read")
    written = results.write(arguments.csv)
    say(f"{results.total()}; see {written}")
    return interrupted() if stopped else 0


def interrupted() -> int:
    """Prints that Ctrl-C ended the program; returns the exit code."""
    say("\npredictor: stopped by Ctrl-C", sys.stderr)
    return 128 + signal.SIGINT


def holds_results(out: Path) -> bool:
    return any((out / f"{stem}.json").is_file() for stem in FILES.values())
