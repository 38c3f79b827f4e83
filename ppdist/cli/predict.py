"""Finds objects in images, videos and cameras.

ppdist predict [-c cfg.yml] -w WEIGHTS --source X [X ...] [--out DIR]

Without -c the configuration is the one in the checkpoint or its model card.
With `--model DIR` instead of -w an exported model runs, in ONNX Runtime, OpenVINO or Paddle
Inference; all give the same boxes.  --out gets every picture with its boxes drawn, and
detections.json: a COCO data set of what was found (`annotations` is also a COCO result list).  A
classifier draws its five surest classes instead, and writes them to classes.json.  Of a camera or a
stream, Ctrl-C ends the recording; what was found is written.
"""

import argparse
import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdist.cli import (
    OR_OF_WEIGHTS,
    add_config,
    default_folder,
    load_config_of,
    make_parser,
    print_commands,
    weights_words,
)
from ppdist.common import errors, process
from ppdist.common.arguments import at_least
from ppdist.common.signals import INTERRUPTED, forget_interrupt

if TYPE_CHECKING:
    from ppdist.predict.detections import Detection
    from ppdist.predict.model import LoadedModel, Precision, Predict, Wanted
    from ppdist.predict.results import Results
    from ppdist.predict.sources import Frame

FORMATS = ("coco", "yolo", "voc", "csv", "crops")
_WEIGHTS = (".pt", ".pth", ".pdparams", ".safetensors", ".npz")
_BATCH, _OVERLAP, _SMALLEST_SLICE = 8, 0.2, 32


def parse() -> argparse.Namespace:
    parser = make_parser("predict", __doc__)
    add_config(parser, required=False, config=OR_OF_WEIGHTS)
    parser.add_argument("-w", "--weights", help="weight file, checkpoint, or published name")
    parser.add_argument("--model", type=Path, metavar="DIR",
                        help="an exported model, or the one file of it that is to run, instead of "
                        "-c and -w")  # fmt: skip
    parser.add_argument("--backend", type=known_runtime, choices=["paddle", "onnx", "openvino"],
                        help="what runs --model (default: on the CPU the fastest that is installed "
                        "and that the export was checked in)")  # fmt: skip
    parser.add_argument("--bfloat16", action="store_true",
                        help="--model: OpenVINO computes in it, faster and less exact, where the "
                        "processor can")  # fmt: skip
    parser.add_argument("--int8", action="store_true", help="--model: its quantised ONNX file")
    parser.add_argument("--threads", type=int, help="CPU threads of --model (default: 1)")
    parser.add_argument("--source", required=True, nargs="+", metavar="X",
                        help="image, video, folder (searched recursively), pattern (quoted: "
                        "'a/**/*.jpg'), http(s) or rtsp address, number of a camera, a .txt with "
                        "one of these a line, or - for an image on standard input")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where to write (RUN/predictions, or "
                        "output/NAME_predictions)")  # fmt: skip
    parser.add_argument("--threshold", type=float,
                        help="confidence threshold, 0..1 (default: that of the best F1 in the last "
                        "evaluation if the weights store it, else 0.25)")  # fmt: skip
    parser.add_argument("--classes", nargs="+", metavar="NAME",
                        help="only these, by name or number from 0 (default: all)")  # fmt: skip
    parser.add_argument("--iou", type=float,
                        help="IoU threshold of non-maximum suppression, 0..1 (default: that of the "
                        "weights)")  # fmt: skip
    parser.add_argument("--agnostic", action="store_true",
                        help="boxes suppress those of other classes, too "
                        "(nms.class_agnostic)")  # fmt: skip
    parser.add_argument("--augment", nargs="*", type=float, metavar="SCALE",
                        help="look at mirrored images, too, and at inputs of these scales "
                        "(default: 1), and fuse the boxes; slower by that factor")  # fmt: skip
    parser.add_argument("--format", default="coco", metavar="LIST",
                        help="of coco, yolo (labels/, with scores), voc (annotations/), csv, crops "
                        "(crops/CLASS/): what is written; coco always is")  # fmt: skip
    parser.add_argument("--no-pictures", action="store_true", help="draw nothing, which is faster")
    parser.add_argument("--batch", type=at_least(1), default=_BATCH, metavar="N",
                        help=f"images at once (default: {_BATCH}; of cameras and streams "
                        "1)")  # fmt: skip
    parser.add_argument("--slice", type=at_least(_SMALLEST_SLICE), metavar="PIXELS",
                        help="also look at overlapping squares of this side, for small objects in "
                        "large images")  # fmt: skip
    parser.add_argument("--overlap", type=float, metavar="PART",
                        help=f"of these squares, 0..1 (default: {_OVERLAP})")  # fmt: skip
    parser.add_argument("--track", action="store_true",
                        help="follow objects through the frames of videos (ByteTrack); needs "
                        "ppdist[track]")  # fmt: skip
    return parser.parse_args()


def known_runtime(word: str) -> str:
    """Checks the name of a runtime for exports; used as `type=` of an option."""
    if word == "tensorrt":
        raise argparse.ArgumentTypeError(
            "tensorrt is no longer run: give model.onnx to `trtexec` (docs/deploy.md)"
        )
    return word


def main() -> int:
    arguments = parse()
    # Whatever can be rejected is rejected before Paddle is imported and the model is loaded.
    formats = formats_of(arguments)
    require_valid_options(arguments)
    if arguments.out is None:
        model_path = Path(arguments.model or arguments.weights or "")
        arguments.out = default_folder(model_path, "predictions")
    from ppdist.common.files import make_folder
    from ppdist.predict.results import (
        FILES,
        FOLDERS,
        TABLE,
        Classes,
        Objects,
        Pictures,
        picture_names,
        require_no_foreign_files,
        require_own_folder,
    )
    from ppdist.predict.sources import expand, frames_of, predictions, root_of
    from ppdist.predict.tracking import require_tracker

    for root in map(root_of, arguments.source):
        if root is not None:
            require_own_folder(arguments.out, root)
    sources = expand(arguments.source, leave_out=arguments.out)
    names = [source.name for source in sources]
    videos = [source.name for source in sources if source.is_video]
    pictures = [] if arguments.no_pictures else picture_names(names, videos)
    result_paths = {**FOLDERS, "csv": TABLE}
    written_paths = [result_paths[kind] for kind in formats if kind in result_paths]
    require_no_foreign_files(arguments.out, [*pictures, *written_paths])
    if arguments.track:
        require_videos(arguments, videos)
        require_tracker()
    model = load_from_weights(arguments) if arguments.model is None else load_from_export(arguments)
    spec = model.spec
    if spec.task == "classify":
        refuse_box_options(arguments, formats)
    predict = with_options(model, arguments)
    choice = None if spec.task == "classify" else choose_boxes(model, arguments)
    require_no_foreign_files(arguments.out, [FILES[spec.task]])
    make_folder(arguments.out)
    picture_writer = Pictures(arguments.out, dict(zip(names, pictures)))
    unreadable: list[str] = []

    def complain(reason: str) -> None:
        unreadable.append(reason)
        process.warn(f"{reason}; skipped")

    def frames() -> Iterator["Frame"]:
        for source in sources:
            yield from frames_of(source, complain)

    # With a camera, the first frame of a batch would be shown only after the last has arrived.
    is_live = any(source.is_live for source in sources)
    frame_predictions = predictions(predict, frames(), 1 if is_live else arguments.batch)
    results: Results
    if spec.task == "classify":
        results = Classes(arguments.out, spec, picture_writer)
    else:
        results = Objects(arguments.out, spec, picture_writer, formats)
    add, describe = make_recorder(results, choice, arguments.track)
    stopped = False
    try:
        for name, pairs in itertools.groupby(frame_predictions, key=lambda pair: pair[0].name):
            summary = describe([add(frame, rows) for frame, rows in pairs])
            if summary:
                print(process.printable(f"{name}: {summary}"), flush=True)
    except KeyboardInterrupt:
        stopped = not is_live  # a camera ends only when interrupted
        if stopped and not results.images:
            raise
        forget_interrupt()  # then write the detections so far
    if unreadable:
        process.warn(f"{len(unreadable)} of {len(sources)} files could not be read, or not whole")
    if not results.images:
        raise errors.DataError(
            "no image or video there could be read",
            code="no_good_image",
            where=" ".join(arguments.source),
        )
    written = results.write()
    files = [*(["pictures"] if pictures else []), written.name, *written_paths]
    listing = " and ".join(filter(None, (", ".join(files[:-1]), files[-1])))
    print(f"{results.total()}; {listing} in {arguments.out}")
    if choice is not None and (hint := results.hint(choice.threshold)):
        print(process.printable(hint))
    if not stopped:
        print_commands(following_commands(arguments))
    return INTERRUPTED if stopped else 0


def following_commands(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Lists commands to run after a prediction: export for -w, benchmark for --model."""
    from ppdist.common.records import next_commands
    from ppdist.predict.model import export_folder

    if arguments.model is None:
        return next_commands(weights_words(arguments))[-1:]
    folder = export_folder(arguments.model) or arguments.model
    return [("speed", shlex.join(["ppdist", "benchmark", "infer", "--model", str(folder)]))]


def make_recorder(
    results: "Results", choice: "Wanted | None", track: bool
) -> "tuple[Callable[[Frame, Any], Any], Callable[[list[Any]], str]]":
    """Returns a function that adds the detections of a frame to the results, and one that
    summarises the detections of a source in a line.
    """
    from ppdist.predict.model import detections
    from ppdist.predict.results import Classes, Objects
    from ppdist.predict.tracking import make_follower

    if isinstance(results, Classes):
        return results.add, results.summary
    assert isinstance(results, Objects)
    assert choice is not None
    follow = make_follower(choice.threshold) if track else lambda frame, detected: detected

    def add(frame: "Frame", rows_R6: Any) -> "list[Detection]":
        results.record_highest(frame, choice.of_classes(rows_R6))
        detected = detections(frame, choice.of(rows_R6), results.spec)
        detected = follow(frame, detected)
        results.add(frame, detected)
        return list(detected)

    return add, results.summary


def choose_boxes(model: "LoadedModel", arguments: argparse.Namespace) -> "Wanted":
    """Decides which boxes to keep; prints the threshold if it is a default."""
    from ppdist.predict.model import wanted

    choice = wanted(model.spec, arguments.threshold, arguments.classes, process.warn)
    if choice.whence:
        process.say(f"ppdist: threshold {choice.threshold:g}, {choice.whence}")
    return choice


def with_options(model: "LoadedModel", arguments: argparse.Namespace) -> "Predict":
    """Wraps the model so that it applies --iou, --agnostic, --augment and --slice."""
    from ppdist.lab.ensemble.views import SCALES, with_views
    from ppdist.predict.model import with_suppression
    from ppdist.predict.slicing import with_slices

    if model.spec.nms is None:  # a classifier
        return model
    iou, agnostic = arguments.iou, arguments.agnostic or model.spec.nms.class_agnostic
    if arguments.augment is None:
        predict = with_suppression(model, iou, agnostic=arguments.agnostic)
    else:
        scales = arguments.augment or SCALES
        predict = with_views(model, scales, iou=iou, agnostic=agnostic)
    if not arguments.slice:
        return predict
    overlap = _OVERLAP if arguments.overlap is None else arguments.overlap
    return with_slices(predict, arguments.slice, overlap, arguments.batch, agnostic)


def formats_of(arguments: argparse.Namespace) -> Sequence[str]:
    formats = [word.strip() for word in arguments.format.split(",")]
    for word in formats:
        if word not in FORMATS:
            raise errors.ConfigError(
                f"{word!r}: expected one of {', '.join(FORMATS)}",
                code="option_invalid",
                where="--format",
            )
    return formats


def require_valid_options(arguments: argparse.Namespace) -> None:
    """Checks that the options are valid and compatible.

    Raises: ConfigError: a value is out of range, or two options exclude each other.
    """
    for name, value in (("threshold", arguments.threshold), ("iou", arguments.iou)):
        if value is not None and not 0 <= value <= 1:
            raise errors.ConfigError(
                "expected 0..1", code="option_invalid", where=f"--{name} {value:g}"
            )
    for scale in arguments.augment or ():
        if not 0.1 <= scale <= 10:
            raise errors.ConfigError(
                "expected scales of the input from 0.1 to 10",
                code="option_invalid",
                where=f"--augment {scale:g}",
            )
    if arguments.overlap is not None and not arguments.slice:
        raise errors.ConfigError(
            "--overlap needs --slice", code="option_missing", fix="add --slice, or leave both out"
        )
    if arguments.overlap is not None and not 0 <= arguments.overlap < 1:
        raise errors.ConfigError(
            "expected 0 to below 1", code="option_invalid", where=f"--overlap {arguments.overlap:g}"
        )


def require_videos(arguments: argparse.Namespace, videos: Sequence[str]) -> None:
    """Checks that --track has a video to follow objects through.

    Raises: ConfigError: no source is a video.
    """
    if not videos:
        raise errors.ConfigError(
            "--track follows objects through the frames of a video; none is in --source",
            code="options_conflict",
            where=" ".join(arguments.source),
            fix="leave it out, or make a video of the images: ffmpeg -i a/%05d.jpg a.mp4, say",
        )


def refuse_box_options(arguments: argparse.Namespace, formats: Sequence[str]) -> None:
    """Checks that no option is set that a classifier does not support.

    Raises: ConfigError: such an option is set.
    """
    is_given_by_option = {
        "--threshold": arguments.threshold is not None,
        "--classes": arguments.classes is not None,
        "--iou": arguments.iou is not None,
        "--agnostic": arguments.agnostic,
        "--augment": arguments.augment is not None,
        "--slice": bool(arguments.slice),
        "--track": arguments.track,
        f"--format {arguments.format}": bool({*formats} - {"coco"}),
    }
    for option, is_given in is_given_by_option.items():
        if is_given:
            raise errors.ConfigError(
                f"{option} only applies to detectors",
                code="options_conflict",
                fix="leave it out",
            )


def load_from_weights(arguments: argparse.Namespace) -> "LoadedModel":
    """Loads the model of -w for eager execution."""
    if not arguments.weights:
        raise errors.ConfigError(
            "give -w WEIGHTS, or --model DIR (an export)", code="option_missing"
        )
    if arguments.backend or arguments.int8 or arguments.bfloat16:
        raise errors.ConfigError(
            "--backend, --bfloat16 and --int8 are for --model, an exported model",
            code="options_conflict",
        )
    if arguments.threads is not None:
        raise errors.ConfigError(
            "--threads is for --model",
            code="options_conflict",
            fix="without it the environment variable OMP_NUM_THREADS counts",
        )
    from ppdist.distributed import comm
    from ppdist.predict.model import load_weights

    config = load_config_of(arguments)
    if config.model.task == "classify":
        refuse_box_options(arguments, formats_of(arguments))
    comm.init(config.device, config.distributed)
    comm.keep_freed_memory()
    config_of_weights = not arguments.config
    return load_weights(
        config, Path(arguments.weights), process.warn, names_alone=config_of_weights
    )


def is_weights(path: Path) -> bool:
    """Returns True if -w would accept this: a run, checkpoint, weight file or published name."""
    from ppdist.models.weights import checkpoint_of
    from ppdist.models.zoo import is_name

    of_run = (checkpoint_of(path) / "manifest.json").is_file()
    return of_run or path.suffix.lower() in _WEIGHTS or is_name(str(path))


def load_from_export(arguments: argparse.Namespace) -> "LoadedModel":
    """Loads the exported model of --model."""
    if arguments.config or arguments.weights or arguments.override:
        raise errors.ConfigError(
            "--model takes everything from its infer.yml",
            code="options_conflict",
            fix="leave out -c, -w and -o",
        )
    threads = 1 if arguments.threads is None else arguments.threads
    if threads < 1:
        raise errors.ConfigError(
            "expected 1 or more", code="option_invalid", where=f"--threads {threads}"
        )
    if arguments.int8 and arguments.backend == "paddle":
        raise errors.ConfigError(
            "--int8 is an ONNX file: leave out --backend paddle", code="options_conflict"
        )
    if arguments.int8 and arguments.bfloat16:
        raise errors.ConfigError("--int8 and --bfloat16: choose one", code="options_conflict")
    from ppdist.predict.model import export_folder, load_export

    if export_folder(arguments.model) is None and is_weights(arguments.model):
        raise errors.ConfigError(
            "--model takes an export, but these are weights",
            code="weights_not_export",
            where=f"--model {arguments.model}",
            fix=f"use -w {arguments.model}",
        )
    precision: Precision = "float32"
    if arguments.int8 or arguments.bfloat16:
        precision = "int8" if arguments.int8 else "bfloat16"
    model = load_export(arguments.model, arguments.backend, threads, precision)
    if model.spec.task == "classify":
        refuse_box_options(arguments, formats_of(arguments))
    return model
