"""What a run tells about its epochs and hands to pages of curves."""

import contextlib
import io
import math
import re
import sys

import pytest

from ppdist.common.errors import UserError
from ppdist.common.logging import read_metrics
from ppdist.engine.callbacks import StepSeconds, TrainingRun
from ppdist.engine.monitor import EpochLogger
from ppdist.engine.train_step import StepResult
from tests.distributed import run_on_ranks
from tests.unit.engine.runs import build_run
from tests.unit.engine.tiny import FASTEST, step_result

BATCH = "train.batch_size_per_card=4"


class Heard:
    """A log that only listens."""

    def __init__(self):
        self.lines = []

    def info(self, message):
        self.lines.append(message)

    def eta(self, step):
        return f"  ETA {100 - step}s"


def made(loss: float, applied: bool = True) -> StepResult:
    return step_result(losses={"loss": loss, "loss_box": loss / 2}, applied=applied)


def test_epoch_line_summarises_its_applied_steps():
    log = Heard()
    epochs = EpochLogger(log, steps_per_epoch=3, shown=["mAP"])
    epochs.on_train_begin(TrainingRun(None, None, None, 0, total_steps=100))

    def step(number, result, wall=1.0, data=0.0):
        epochs.on_step_begin(number)
        epochs.on_step_end(number, result, 0.01, StepSeconds(wall, wall, data))

    for number, result in enumerate([made(1.0), made(math.nan, applied=False), made(3.0)], start=1):
        step(number, result, wall=2.0, data=0.5)
    step(4, made(9.0))
    epochs.on_rollback(3)
    for number in (4, 5, 6):
        step(number, made(1.0))
    epochs.on_evaluate_end(6, {"mAP": 0.25, "val_loss": 2.0}, is_best=True)
    step(7, made(1.0))
    epochs.on_evaluate_end(7, {"mAP": 0.5}, is_best=True)
    for number in (8, 9):  # steps that are skipped
        epochs.on_step_begin(number)
    epochs.on_train_end(9, "total")
    first, second, amid, third = log.lines
    assert amid == "after step 7:  mAP 0.5000" and "mAP" not in third
    assert "epoch 1/34 done in 0s  loss 2 (box 1)  lr 1.00e-02  img/s 4.0" in first
    assert "waiting for images 25%" in first and first.endswith("ETA 97s")
    assert "loss 1 (box 0.5)  val_loss 2.0000  mAP 0.2500" in second


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    """The folder of a tiny run over three epochs of three steps, and what it printed."""
    folder, screen = tmp_path_factory.mktemp("run"), io.StringIO()
    own = ("train.epochs=3", "log.visualdl=true", "log.histograms=true")
    with contextlib.redirect_stdout(screen):
        experiment = build_run(shapes, folder, BATCH, *own, model=FASTEST, evaluate=True)
        with experiment.log:
            assert experiment.trainer.fit() == 0
            experiment.log.run_summary()
    return folder, screen.getvalue()


def without_tensorboardx(argument):
    sys.modules["tensorboardX"] = None
    shapes, folder = argument
    with pytest.raises(UserError) as caught:
        build_run(shapes, folder, BATCH, "log.tensorboard=true", model=FASTEST)
    return str(caught.value)


@pytest.mark.slow
def test_package_missing_on_rank_0_ends_all_ranks(shapes, tmp_path):
    target, folders = (
        "tests.unit.engine.test_monitor_epochs:without_tensorboardx",
        (shapes, tmp_path),
    )
    for said in run_on_ranks(2, target, [*map(str, folders)]):
        assert "pip install 'ppdist[tensorboard]', or set log.tensorboard: false" in said


@pytest.mark.slow
def test_each_epoch_and_the_end_of_a_run_are_told(run):
    _, out = run
    assert len(re.findall(r"epoch [123]/3 done in .*loss .*mAP .*lr .*img/s .*memory", out)) == 3
    table = " ".join(out.split())
    for text in ("checkpoints/best", "checkpoints/last", "visualdl --logdir", "evaluation", "%"):
        assert text in table


def test_pages_get_curves_spreads_and_settings_of_a_run(run):
    from visualdl import LogReader

    folder, _ = run
    with contextlib.redirect_stdout(io.StringIO()):
        reader = LogReader(file_path=str(folder / "vdl/vdlrecords.ppdist.log"))
    evaluated = [each["step"] for each in read_metrics(folder / "metrics.jsonl") if "mAP" in each]
    spreads = [tag for tag in reader.get_tags()["histogram"] if tag.startswith("weights/")]
    gradients = [tag for tag in reader.get_tags()["histogram"] if tag.startswith("gradients/")]
    assert spreads and gradients
    steps = [each.id for each in reader.get_data("histogram", spreads[0])]
    assert steps == evaluated == [3, 6, 9]
    assert all(each.id in evaluated for each in reader.get_data("pr_curve", "PR/square"))
    (record,) = reader.get_data("hyper_parameters", "hparam")
    hparam = record.hparam
    assert len(hparam.hparamInfos) + len(hparam.metricInfos) <= 10, "VisualDL hangs with more"
    named = {info.name for info in hparam.metricInfos}
    assert named <= set(reader.get_tags()["scalar"]), "the page shows their last points"
    texts = {tag: reader.get_data("text", tag)[0] for tag in reader.get_tags()["text"]}
    assert "train.epochs=3.0" in texts["config/train"].text.encoded_text_string
