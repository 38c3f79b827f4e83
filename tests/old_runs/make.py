"""Makes the stored runs of a version, with that version's code.

    git clone . OLD && git -C OLD checkout COMMIT
    mkdir SCRATCH && cd SCRATCH && PYTHONPATH=OLD:. python -m tests.old_runs.make

It writes to the current folder, so that no path of a machine stands in what is stored.  The initial
weights repeat themselves and most of them are frozen, so that a run packs to tens of kB; what is
trained, its moments and averages are what training made of them.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import ppdist
from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.models.build import build_model
from tests.old_runs.outcomes import BEST, outcomes
from tests.unit.data.classified import write_patterns

PERIOD = 251  # values after which the initial weights repeat
KEPT = ("config.yml", "metrics.jsonl", "environment.json")
ENVIRONMENT = ("ppdist", "paddle", "python")  # what is kept of environment.json
BASE = """
seed: 1
output_dir: {name}
data:
  root: shapes
  train: {{annotations: annotations/instances_train.json}}
  val: {{annotations: annotations/instances_val.json}}
  workers: 0
  augment: {{expand: 0, crop: 0, distort: 0}}
schedule: {{warmup_epochs: 1}}
checkpoint: {{keep: 1, every_epochs: {epochs}}}
evaluate: {{every_epochs: {epochs}}}
log: {{visualdl: false, images: 0}}
train:
  epochs: {epochs}
  batch_size_per_card: 4
  cpu_convolutions: plain
  freeze: {freeze}
  ema: {{decay: 0.9}}
"""
CLASSES = """
data: {format: folder, root: patterns, train: {images: train}, val: {images: val}, workers: 0}
"""
YOLOV5 = "name: yolov5, size: n, depth_multiple: 0.1, width_multiple: 0.03"
SHARED = "num_classes: 3, image_size: [64, 64]"
ADAMW = "optimizer: {name: adamw, lr: 0.004, reference_batch_size: 4, weight_decay: 0.01}"
RUNS = {  # epochs, what is frozen, model, other keys, ranks
    "yolov5": (40, "null", YOLOV5, ADAMW, 1),
    "ppyoloe": (
        6,
        "[backbone, neck, yolo_head.pred_reg]",
        "name: ppyoloe, depth_multiple: 0.1, width_multiple: 0.06",
        "optimizer: {lr: 0.02, reference_batch_size: 4}",
        1,
    ),
    "dfine": (
        2,
        "[backbone, encoder, decoder.decoder, decoder.dec_bbox_head, decoder.pre_bbox_head, "
        "decoder.enc_bbox_head, decoder.query_pos_head, decoder.enc_output]",
        "name: rtdetr, variant: dfine, size: n, queries: 20, denoising: 12",
        ADAMW,
        1,
    ),
    "classifier": (
        6,
        "[backbone, head.conv]",
        "name: yolov5_cls, size: n, depth_multiple: 0.1, width_multiple: 0.03",
        ADAMW,
        1,
    ),
    "powersgd": (
        3,
        "[backbone]",
        YOLOV5,
        "optimizer: {lr: 0.01, reference_batch_size: 4}\ndistributed: {gradient_rank: 2}",
        2,
    ),
    "distilled": (
        3,
        "[backbone]",
        YOLOV5,
        f"{ADAMW}\ndistill: {{teacher: yolov5, features: {{}}}}",
        1,
    ),
}


def write_config(name: str) -> Path:
    epochs, freeze, model, more, _ = RUNS[name]
    text = BASE.format(name=name, epochs=epochs, freeze=freeze)
    if name == "classifier":
        head, _, rest = text.partition("data:\n")
        text = head + CLASSES.strip() + "\n" + rest.partition("distort: 0}\n")[2]
    file = Path(f"{name}.yml")
    file.write_text(f"{text}model: {{{model}, {SHARED}, pretrained: start_{name}.npz}}\n{more}\n")
    return file


def write_start(file: Path, target: Path) -> None:
    """Initial weights of a configuration that repeat every PERIOD values."""
    paddle.seed(0)
    model = build_model(load_config(file).model)
    np.savez(
        target,
        **{
            key: np.resize(value.numpy().ravel()[:PERIOD], value.shape)
            if value.size > PERIOD
            else value.numpy()
            for key, value in model.state_dict().items()
        },
    )


def train(file: Path, ranks: int) -> None:
    command = ["train", "-c", str(file), "--eval"]
    if ranks > 1:
        script = Path(ppdist.__file__).parents[1] / "tools" / "train.py"
        command = ["launch", "--nproc_per_node", str(ranks), str(script), *command[1:]]
    subprocess.run([sys.executable, "-m", "ppdist", *command], check=True)


def pack(name: str, *, every: bool = False) -> None:
    """Packs a folder: every file of it, or what the later commands need of a run."""
    folder = Path(name)
    if not every:
        environment = json.loads((folder / "environment.json").read_text())
        environment = {key: environment[key] for key in ENVIRONMENT if key in environment}
        (folder / "environment.json").write_text(json.dumps(environment, indent=1))
    with tarfile.open(f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if every or str(inside) in KEPT or inside.parts[0] == "checkpoints":
                archive.add(path, str(path), recursive=False, filter=without_owner)


def without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def expected(name: str) -> dict[str, Any]:
    """What that version's own commands make of the run."""

    def command(*words: object) -> None:
        subprocess.run([sys.executable, "-m", "ppdist", *map(str, words)], check=True)

    found = outcomes(name, command)
    return found | {key: found[key][:BEST] for key in ("detections", "exported")}


def main() -> None:
    make_shapes(Path("shapes"), train=16, val=6, size=64)
    write_patterns(Path("patterns/train"), 6, seed=0)
    write_patterns(Path("patterns/val"), 4, seed=1)
    for folder in ("shapes", "patterns"):
        pack(folder, every=True)
    for name in RUNS:
        file = write_config(name)
        write_start(file, Path(f"start_{name}.npz"))
        train(file, RUNS[name][-1])
        pack(name)
    measure()


def measure() -> None:
    numbers = {name: expected(name) for name in RUNS}
    pack("yolov5_exported", every=True)
    Path("expected.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
