"""Compares a short run and an evaluation with ultralytics', where it is installed: CPU seconds.

    python -m benchmarks.beside_ultralytics [--yolo COMMAND] [--repeats 3] [--threads 1]
                                            [--json FILE]

    start        a run of four steps of YOLOv5n from nothing, 8 images of 320 px a step, without
                 plots, and without evaluation; ultralytics evaluates at the end of every run, here
                 on one image
    rectangular  the evaluation of 160 images of five shapes at 640 px, 16 at a time, each batch
                 padded to its own shape: ultralytics' default
    square       the same, every image padded to 640 x 640

Each program evaluates what its run of four steps has learned, as one command of its own, a whole
process from its start to its end.  That is next to nothing, so how many boxes pass the threshold of
0.001, which both have, is a matter of the first weights.  The first round, which is not measured,
counts the boxes that each program gives, at most 300 an image.  If the two numbers differ by more
than a tenth, the report says that the times are not comparable.

ultralytics is AGPL-3.0: it is called as the command `yolo` of an environment of its own, and
nothing here imports it.  Commands take turns.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np

from ppdist.cli import script_words
from ppdist.common.files import write_json
from ppdist.data.datasets.synthetic import CLASS_NAMES, scene
from ppdist.lab.benchmark.step import describe_machine

Report = dict[str, Any]
_BATCH, _STEPS, _SIDE = 8, 4, 320
_EVALUATED, _EVALUATED_BATCH, _EVALUATED_SIDE = 160, 16, 640
_SHAPES = ((640, 480), (480, 640), (640, 427), (640, 360), (500, 500))  # width, height
_ALIKE = 0.9  # smallest ratio of numbers of boxes that makes evaluations comparable
_LICENCE = "ultralytics (AGPL-3.0)"
# `ppdist train`, which has no option against plots, with the imports in its order.
_TRAIN_WITHOUT_PLOTS = f"""
import gc, sys
sys.path[0] = {str(Path(__file__).parents[1])!r}
from ppdist import cli
from ppdist.common.process import quiet_paddle
from ppdist.common.signals import hold_signals
hold_signals()
quiet_paddle()
gc.disable()
from ppdist.engine import run
run._begin_plots = lambda *_: lambda: None
cli.run("train")
"""


def draw_sets(folder: Path) -> tuple[Path, Path]:
    """Draws images with YOLO's labels; returns the data.yaml of the run, and of the evaluation."""
    counts = {"train": _STEPS * _BATCH, "one": 1, "val": _EVALUATED}
    for number, (name, count) in enumerate(counts.items()):
        for kind in ("images", "labels"):
            (folder / kind / name).mkdir(parents=True)
        for index in range(count):
            rgb_HW3, boxes_M4, labels_M = scene(_SIDE, 0, number, index)
            image_HW3 = cv2.resize(rgb_HW3, _SHAPES[index % len(_SHAPES)])
            cv2.imwrite(str(folder / "images" / name / f"{index:05d}.jpg"), image_HW3[:, :, ::-1])
            # Fractions of the image: they stay when it is resized.
            low, high = boxes_M4[:, :2] / _SIDE, boxes_M4[:, 2:] / _SIDE
            rows = np.concatenate([labels_M[:, None], (low + high) / 2, high - low], axis=1)
            np.savetxt(folder / "labels" / name / f"{index:05d}.txt", rows, "%.6g")
    files = []
    for name in ("one", "val"):
        files.append(folder / f"{name}.yaml")
        names = "\n".join(f"  {number}: {text}" for number, text in enumerate(CLASS_NAMES))
        files[-1].write_text(
            f"path: {folder}\ntrain: images/train\nval: images/{name}\nnames:\n{names}\n",
            encoding="utf-8",
        )
    return files[0], files[1]


def commands_of_ultralytics(
    yolo: str, run_set: Path, evaluated_set: Path, out: Path
) -> dict[str, list[str]]:
    """Returns its commands by what is compared.  Args: out: folder for what they write."""
    usual = ["device=cpu", "workers=0", "plots=False", f"project={out}", "exist_ok=True"]
    evaluation = [
        yolo, "val", f"model={out}/start/weights/last.pt", f"data={evaluated_set}", *usual,
        f"imgsz={_EVALUATED_SIDE}", f"batch={_EVALUATED_BATCH}",
    ]  # fmt: skip
    return {
        "start": [
            yolo, "train", "model=yolov5n.yaml", f"data={run_set}", "epochs=1", f"batch={_BATCH}",
            f"imgsz={_SIDE}", "val=False", "amp=False", "name=start", *usual,
        ],
        "rectangular": [*evaluation, "rect=True", "name=rectangular"],
        "square": [*evaluation, "rect=False", "name=square"],
    }  # fmt: skip


def commands_of_ours(run_set: Path, evaluated_set: Path, out: Path) -> dict[str, list[str]]:
    """Returns our commands by what is compared.  Args: as `commands_of_ultralytics`."""
    run = str(out / "start")
    evaluation = [
        sys.executable, *script_words("eval"), str(evaluated_set), "-w", run, "-o",
        "data.workers=0", f"model.image_size=[{_EVALUATED_SIDE},{_EVALUATED_SIDE}]",
        f"evaluate.batch_size_per_card={_EVALUATED_BATCH}",
    ]  # fmt: skip
    return {
        "start": [
            sys.executable, "-c", _TRAIN_WITHOUT_PLOTS, str(run_set), "--model", "yolov5n",
            "--no-eval", "--epochs", "1", "--batch", f"{_BATCH}", "--image-size", f"{_SIDE}",
            "-o", f"output_dir={run}", "model.pretrained=null", "data.workers=0", "log.images=0",
            "train.multi_scale=[]", f"train.max_steps={_STEPS}",
        ],
        # With its half a stride of grey around each image.
        "rectangular": [*evaluation, "evaluate.rectangular=true", "evaluate.rectangular_pad=0.5"],
        "square": [*evaluation, "evaluate.rectangular=false"],
    }  # fmt: skip


def commands_that_count(out: dict[str, Path]) -> dict[str, tuple[list[str], str]]:
    """Returns by program what makes an evaluation write its boxes, and where, as a glob.

    Args: out: folder of each program.
    """
    file = out["ours"] / "detections.json"
    return {
        "ours": (["--save-detections", str(file)], file.name),
        "ultralytics": (["save_json=True"], "*/predictions.json"),
    }


def count_boxes(folder: Path, pattern: str) -> int:
    """Counts the boxes in COCO results, and removes the file."""
    (file,) = folder.glob(pattern)
    boxes = len(json.loads(file.read_text(encoding="utf-8")))
    file.unlink()
    return boxes


def run_command(command: Sequence[str], folder: Path, environment: dict[str, str]) -> list[float]:
    """Runs a command in a folder; returns its wall and CPU seconds, children included.

    Raises: RuntimeError: it failed; its output is in the message.
    """
    log = folder / "output.txt"
    began = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"exit code {process.returncode} of {' '.join(command)}\n{text}")
    return [wall, usage.ru_utime + usage.ru_stime]


def compare(yolo: str, repeats: int, threads: int, scratch: Path) -> Iterator[tuple[str, Report]]:
    """Measures all commands in turns, the first round of each unmeasured.

    Yields what is compared with medians of `wall` and `cpu` seconds of `ours` and `ultralytics`, of
    an evaluation their `boxes` on an image, and `ratio_cpu`: ours over theirs, median, smallest and
    largest of the neighbours.

    Raises: RuntimeError: a command failed.
    """
    run_set, evaluated_set = draw_sets(scratch / "data")
    environment = {**os.environ, "OMP_NUM_THREADS": f"{threads}"}
    environment["YOLO_CONFIG_DIR"] = str(scratch / "settings")  # of ultralytics, not yours
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, we would compile ours every time
    sets = run_set, evaluated_set
    sides = {
        "ours": commands_of_ours(*sets, scratch / "ours"),
        "ultralytics": commands_of_ultralytics(yolo, *sets, scratch / "ultralytics"),
    }
    for name in (*sides, "settings"):
        (scratch / name).mkdir()
    counting = commands_that_count({name: scratch / name for name in sides})
    for what in sides["ours"]:
        seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
        boxes: dict[str, float] = {}
        for turn in range(1 + repeats):
            for name in sides if turn % 2 == 0 else reversed(sides):
                if what == "start":
                    shutil.rmtree(scratch / name / "start", ignore_errors=True)
                extra, pattern = counting[name] if turn == 0 and what != "start" else ([], "")
                command = [*sides[name][what], *extra]
                timing = run_command(command, scratch / name, environment)
                seconds[name].append(timing)
                if pattern:
                    boxes[name] = count_boxes(scratch / name, pattern) / _EVALUATED
        result = _summarise({name: rows[1:] for name, rows in seconds.items()})
        for name, count in boxes.items():
            result[name]["boxes"] = count
        yield what, result


def _summarise(seconds: dict[str, list[list[float]]]) -> Report:
    result: Report = {}
    for name, rows in seconds.items():
        wall, cpu = (median(column) for column in zip(*rows, strict=True))
        result[name] = {"wall": wall, "cpu": cpu}
    pairs = zip(seconds["ours"], seconds["ultralytics"], strict=True)
    ratios = [ours[1] / theirs[1] for ours, theirs in pairs]
    return result | {"ratio_cpu": [median(ratios), min(ratios), max(ratios)]}


def _describe_boxes(result: Report) -> str:
    """Describes the numbers of boxes of an evaluation, and says whether they are alike."""
    counts = [result[name].get("boxes") for name in ("ours", "ultralytics")]
    if None in counts:
        return ""
    text = "; boxes an image: {:.0f} and {:.0f}".format(*counts)
    if min(counts) < _ALIKE * max(counts):
        text += ", so the times are not comparable"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.beside_ultralytics", None, __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--yolo", default="yolo", help="its command (yolo)")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns of each (3)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of both (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    arguments = parser.parse_args()
    yolo = shutil.which(arguments.yolo)
    if yolo is None:
        print(f"skipped: {_LICENCE} is not installed here; --yolo names its command elsewhere")
        return 0
    report: Report = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory() as scratch:
        results = compare(yolo, arguments.repeats, arguments.threads, Path(scratch))
        for what, result in results:
            report[what] = result
            middle, smallest, largest = result["ratio_cpu"]
            ours, theirs = (result[name]["cpu"] for name in ("ours", "ultralytics"))
            print(
                f"{what}: ours {ours:.1f} CPU s, ultralytics {theirs:.1f}: {middle:.2f} of it "
                f"({smallest:.2f} to {largest:.2f}){_describe_boxes(result)}",
                flush=True,
            )
    if arguments.json:
        write_json(arguments.json, report, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
