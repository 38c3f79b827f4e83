"""The promise: a run that was interrupted, however and whenever, equals one that was not.

Each row is a training (model, settings, ranks) and what happens to it.  Compared are the losses of
all steps, means of epochs, evaluations and every array of the last checkpoint, bit for bit; where
the number of ranks changes, to rounding.
"""

import hashlib
import math
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.common.process import STOPPED
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine.callbacks import Callback
from ppdist.engine.checkpoint import path_of
from ppdist.metrics.run import history
from ppdist.models.yolov5 import YOLOv5
from tests.distributed import run_on_ranks
from tests.emulated_bfloat16 import EMULATED
from tests.unit.data.classified import write_patterns
from tests.unit.engine.runs import build_run, records
from tests.unit.engine.teachers import ALL, write_teacher
from tests.unit.engine.tiny import FASTEST, init_cpu

# Ten images, two micro-batches of two a step: three steps an epoch, the last of them smaller.
COMMON = (
    "train.total_batch=4", "train.batch_size_per_card=2", "train.epochs=4", "log.every_steps=1",
    "checkpoint.every_steps=2", "checkpoint.keep=9", "optimizer.reference_batch_size=8",
    "data.bad_images=error",
)  # fmt: skip
TIMES = {"seconds", "eval_seconds", "images_per_second", "data_share", "memory_gib"}


@dataclass(frozen=True)
class Row:
    """A training and its interruptions.

    Attributes:
        events: KIND@STEP, one for each attempt before the last: `end` after this step by
            train.max_steps; SIGTERM to the last rank (`term`) or the end of all ranks (`kill`)
            before it; their end once its checkpoint is on disk, if it is the best before its epoch
            is reported (`saved`).
        world: ranks of all attempts, or of each.
        nan: steps of which the last rank's loss is not finite, until the run goes back.
        apart: each rank has an output_dir of its own, as on hosts that share no folder.
        teacher: a teacher's model; "": none.
        damaged: one of ten images is cut short.
    """

    events: tuple[str, ...]
    settings: tuple[str, ...] = ()
    model: str = FASTEST
    world: int | tuple[int, ...] = 1
    evaluate: bool = False
    nan: tuple[int, ...] = ()
    apart: bool = False
    teacher: str = ""
    damaged: bool = False


WARM = ("schedule.warmup_epochs=1", "train.ema.ramp_steps=10")
NEW_AVERAGE = (
    "data.augment.plain_epochs=1", "train.ema.restart_decay=0.5", "train.ema.ramp_steps=2",
)  # fmt: skip
MIXED = (
    "data.resize=letterbox", "data.augment.mosaic=1", "data.augment.close_mosaic_epochs=1",
    "data.augment.mixup=0.5", "data.augment.affine={scale: 0.5, translate: 0.1}",
    "schedule={warmup_epochs: 3, warmup_bias_lr: 0.1, warmup_momentum: 0.8}",
    "optimizer={nesterov: true, decay_biases: false}", "train.ema.ramp_steps=100",
)  # fmt: skip
DEIM = (
    "optimizer.name=adamw",
    "optimizer.groups=[{match: backbone.*.bn}, {match: backbone, lr_factor: 0.5}]",
    "train.multi_scale=[[64, 64], [96, 96]]", "data.augment.plain_epochs=1",
    "train.ema={decay: 0.9999, ramp_steps: 1000, restart_decay: 0.999}",
    "loss.classification=mal", "model.activation=silu",
)  # fmt: skip
SHARDED = ("distributed.shard_optimizer=true", "optimizer={name: adamw, lr: 0.001}")
IN_STEPS = ("evaluate.every_steps=2", "checkpoint.every_steps=3")
LOCAL = ("distributed.local_sgd_steps=3", "checkpoint.every_steps=3")
LOW_RANK = ("distributed.gradient_rank=2",)
BFLOAT16 = ("train.cpu_kernels=auto", "train.amp={enabled: true, dtype: bfloat16, level: O2}")
BY_CLASS = ("data.sampling.name=difficulty", "data.workers=1", "data.cache=ram")

DEFAULT = {
    "killed amid epochs": Row(("kill@3", "kill@8"), WARM, evaluate=True),
    "two ranks, stopped where an evaluation is due, and killed": Row(
        ("term@3", "kill@8"), WARM, world=2, evaluate=True
    ),
    "gradients of low rank": Row(("end@5",), LOW_RANK, world=2),
}
SLOW = {
    "ended at an epoch's end": Row(("end@3", "end@9"), WARM, evaluate=True),
    "killed before the first checkpoint": Row(("kill@2",), WARM),
    "an evaluation that is made again": Row(
        ("term@3", "kill@5"), ("checkpoint.every_steps=9",), evaluate=True
    ),
    "killed after the best checkpoint": Row(("saved@3",), evaluate=True),
    "a damaged image": Row(
        ("kill@5", "end@8"), ("data.check_images=none", "data.bad_images=skip"), damaged=True
    ),
    "stopped at once": Row(("term@1", "term@2"), WARM),
    "a new average, at its start and within": Row(("end@9", "end@10"), NEW_AVERAGE),
    "a new average on ranks, killed": Row(("kill@11",), NEW_AVERAGE, world=2, evaluate=True),
    "images by their classes": Row(("end@7",), BY_CLASS, evaluate=True),
    "early stopping": Row(("term@5",), ("early_stopping={patience: 2}",), world=2, evaluate=True),
    "killed amid bad steps": Row(("kill@7",), nan=(5, 6, 7)),
    "stopped amid bad steps": Row(("term@6",), nan=(5, 6, 7)),
    "ranks killed amid bad steps": Row(("kill@7",), world=2, nan=(5, 6, 7)),
    "ppyoloe": Row(("end@4",), ("train.cpu_kernels=auto",), "ppyoloe"),
    "ppyoloe with an auxiliary head": Row(
        ("end@7",),
        ("model.size=t", "model.auxiliary=true", "loss.auxiliary_attached_epochs=3"),
        "ppyoloe",
    ),
    "ppyoloe one to one": Row(
        ("end@2",), ("model.one_to_one=true", "loss.static_assigner_epochs=1"), "ppyoloe"
    ),
    "yolov5 of mixed images and fitted anchors": Row(("end@7",), MIXED, "yolov5"),
    "classifier with dropout": Row(("end@4",), ("model.dropout=0.3",), "yolov5_cls"),
    "dfine": Row(("kill@6",), DEIM, "dfine", evaluate=True),
    "a detector of another package": Row(
        ("kill@4",), ("optimizer.name=adamw",), "queries", evaluate=True
    ),
    "bfloat16": Row(("end@4",), BFLOAT16, "yolov5"),
    "frozen parts": Row(
        ("end@4",),
        ("train.freeze=3", "optimizer.layer_decay=0.7",
         "optimizer.groups=[{match: neck, lr_factor: 0.5, weight_decay_factor: 2}]"),
        "ppyoloe",
    ),
    "a teacher": Row(("end@4",), (), "ppyoloe", teacher="ppyoloe"),
    "a teacher on ranks": Row(("kill@4",), (), "ppyoloe", 2, teacher="ppyoloe"),
    "sharded AdamW": Row(("kill@4", "term@7"), SHARDED, world=2),
    "evaluations amid epochs": Row(
        ("kill@4", "term@8", "kill@11"), (*WARM, *IN_STEPS, "early_stopping={patience: 9}"),
        world=2, evaluate=True,
    ),
    "killed after the best checkpoint, amid an epoch": Row(
        ("saved@2", "end@5"), IN_STEPS, evaluate=True
    ),
    "images by their classes, drawn anew amid epochs": Row(
        ("kill@4", "end@7"), (*BY_CLASS, *IN_STEPS), evaluate=True
    ),
    "local SGD": Row(("end@4", "term@8", "kill@10"), LOCAL, world=2, evaluate=True),
    "largest gradients": Row(("kill@6",), ("distributed.topk_fraction=0.05",), world=2),
    "statistics of all ranks": Row(("kill@6",), ("train.sync_bn=true",), world=2),
    "folders apart": Row(("end@4",), (*LOW_RANK, *SHARDED[:1]), world=2, apart=True),
    "other ranks": Row(("end@2", "end@5", "end@9"), world=(2, 3, 1, 2)),
    "other ranks, three micro-batches": Row(
        ("end@1", "end@3", "end@4"), ("train.total_batch=6", "train.epochs=6"), world=(2, 3, 1, 2)
    ),
    "other ranks, statistics of all": Row(
        ("end@4", "end@7", "end@8"), ("train.sync_bn=true",), world=(2, 3, 1, 2)
    ),
    "other ranks, sharded": Row(
        ("kill@4", "end@7", "term@10"), SHARDED[:1], world=(2, 3, 1, 2)
    ),
}  # fmt: skip


class Killed(Exception):
    """Ends a run where it is, as kill -9 would."""


class Interrupt(Callback):
    """Makes steps of the last rank bad, and ends the run before one."""

    def __init__(self, event: str, nan: list[int]) -> None:
        kind, _, step = event.partition("@")
        self.kind, self.step = kind, int(step or 0)
        self.bad, self.now, self.saved = {*nan}, 0, 0

    def on_train_begin(self, run) -> None:
        self.output_dir = run.output_dir
        if (self.output_dir / "went back").exists():
            self.bad = set()
        run.train_step.loss.register_forward_post_hook(self.spoil)

    def spoil(self, loss, arguments, output):
        if self.now not in self.bad or comm.rank() != comm.world_size() - 1:
            return output
        self.bad.remove(self.now)
        return type(output)(output.total * math.nan, *output[1:])

    def on_step_begin(self, step: int) -> None:
        self.now = step
        if step != self.step:
            return
        if self.kind == "term" and comm.rank() == comm.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.kind == "kill":
            self.end()

    def on_save(self, step: int) -> None:
        self.saved = step
        if (self.kind, self.step) == ("saved", step):
            self.end()

    def on_rollback(self, step: int) -> None:
        (self.output_dir / "went back").touch()

    def end(self) -> None:
        """Waits for the last checkpoint, which is written beside the steps."""
        if self.saved and comm.is_main():
            while not path_of(self.output_dir / "checkpoints", self.saved).exists():
                time.sleep(0.01)
        comm.barrier()
        raise Killed


def attempt(shapes: Path, output: Path, row: dict, event: str, resume: bool) -> str:
    """Makes one attempt of a run on the ranks of this start; a digest of what this rank holds."""
    YOLOv5.anchor_threshold = 1.2  # a first run fits anchors of its own, which a later must not
    settings = [*COMMON, *row["settings"]]
    kind, _, step = event.partition("@")
    if kind == "end":
        settings.append(f"train.max_steps={step}")
    if row["teacher"]:
        settings += [f"distill.teacher={output.parent / 'teacher'}", *ALL]
    data = shapes
    if row["damaged"]:
        data = shapes / "damaged"
    if row["model"] == "yolov5_cls":
        data, splits = shapes / "classes", "{images: train}"
        settings += [f"data.train={splits}", f"data.val={splits}"]
    experiment = build_run(
        data,
        output / str(comm.rank()) if row["apart"] else output,
        *settings,
        model=row["model"],
        resume="auto" if resume else False,
        evaluate=row["evaluate"],
        callbacks=[Interrupt(event, row["nan"])],
        kernels=EMULATED,
    )
    if BY_CLASS[0] in row["settings"]:  # what so short a run learns is 0 for every class
        evaluator, state = experiment.trainer.evaluations.evaluator, experiment.trainer.state
        evaluator.class_scores = lambda metrics: [state.step / 20, 0.9, None]
    try:
        with experiment.log:
            code = experiment.trainer.fit()
    except Killed:
        assert kind in ("kill", "saved")
    else:
        assert (code, kind) in ((0, "end"), (0, ""), (STOPPED, "term"))
    trainer = experiment.trainer
    digest = hashlib.blake2b()
    for model in (trainer.train_step.model, trainer.evaluations.model):
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def make(argument) -> list[str]:
    """Makes attempts, one after another."""
    init_cpu()
    shapes, row = Path(argument["shapes"]), argument["row"]
    return [
        attempt(shapes, Path(output), row, event, resume)
        for output, event, resume in argument["attempts"]
    ]


def trained(row: Row, shapes: Path, folder: Path) -> tuple[Path, Path]:
    """Output folders of rank 0: of the run that nothing interrupts, and of the other."""
    attempts = [(f"{folder / 'whole'}", "", False)]
    attempts += [
        (f"{folder / 'parts'}", event, number > 0) for number, event in enumerate((*row.events, ""))
    ]
    parts = [(row.world, attempts)]
    if isinstance(row.world, tuple):
        first, *later = attempts
        parts = [(row.world[0], [first]), *((w, [one]) for w, one in zip(row.world, later))]
    for world, those in parts:
        argument = {"row": asdict(row), "shapes": f"{shapes}", "attempts": those}
        digests = run_on_ranks(world, f"{__name__}:make", argument, seconds=400)
        assert len({by_rank[-1] for by_rank in digests}) == 1, "ranks hold different weights"
    below = "0" if row.apart else ""
    return folder / "whole" / below, folder / "parts" / below


def numbers_of(folder: Path) -> dict:
    """What a run wrote of its steps, epochs and evaluations, without times."""
    lines = records(folder)
    return {
        "losses": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "evaluated": [(line["step"], line["mAP"]) for line in lines if "mAP" in line],
        "epochs": [
            {key: value for key, value in row.items() if key not in TIMES}
            for row in history(folder)
        ],
    }


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    files = (folder / "checkpoints" / "last").glob("*.safetensors")
    return {f"{file.stem}/{key}": array for file in files for key, array in load_file(file).items()}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train=10, val=5, size=64, seed=0)
    make_shapes(folder / "damaged", train=10, val=5, size=64, seed=0)
    image = min((folder / "damaged" / "images" / "train").iterdir())
    image.write_bytes(image.read_bytes()[:-100])
    write_patterns(folder / "classes" / "train", 4, seed=0)
    return folder


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_interrupted_run_equals_the_whole(name, shapes, tmp_path, record_property):
    row, folder = (DEFAULT | SLOW)[name], tmp_path
    if row.teacher:
        write_teacher(folder / "teacher", model=row.teacher)
    whole, parts = trained(row, shapes, folder)
    expected, found = numbers_of(whole), numbers_of(parts)
    ends = {int(event[4:]) for event in row.events if event.startswith("end")}  # which evaluate
    at = [step for step, _ in expected["evaluated"]]
    found["evaluated"] = [
        pair for pair in found["evaluated"] if pair[0] in at or pair[0] not in ends
    ]
    found["epochs"] = [
        epoch
        for epoch in found["epochs"]
        if isinstance(epoch["epoch"], int) or epoch["step"] in at or epoch["step"] not in ends
    ]
    arrays, others = arrays_of(whole), arrays_of(parts)
    assert arrays.keys() == others.keys()
    assert len(expected["losses"]) == len({loss for _, loss in expected["losses"]}) > 5
    if isinstance(row.world, int):
        assert found == expected
        assert [key for key in arrays if not np.array_equal(arrays[key], others[key])] == []
        return
    losses, expected_losses = np.array(found["losses"]), np.array(expected["losses"])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    off = np.abs(losses / expected_losses - 1).max()
    record_property("figure", f"largest relative difference of a loss {off:.1e}")
    for key, array in arrays.items():
        np.testing.assert_allclose(others[key], array, rtol=1e-3, atol=1e-5, err_msg=key)
