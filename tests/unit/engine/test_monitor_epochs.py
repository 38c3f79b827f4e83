"""What a run tells about its epochs and hands to pages of curves."""

import contextlib
import io
import math
import re

import pytest

from ppdist.common.records import read_metrics
from ppdist.engine.callbacks import TrainingRun
from ppdist.engine.clock import StepSeconds
from ppdist.engine.monitor import EpochLogger
from ppdist.engine.step_policy import StepResult, Verdict
from ppdist.engine.step_sums import EpochMeans
from tests.unit.engine.runs import build_run
from tests.unit.engine.tiny import FASTEST, step_result

BATCH = "train.batch_size_per_card=4"


class Heard:
    """A log that only listens."""

    def __init__(self):
        self.lines = []

    def info(self, message):
        self.lines.append(message)

    detail = info

    def forget(self, step, key):
        self.forgotten = (step, key)

    def row(self, header, row, text):
        self.lines += [header, row]

    def metrics(self, record):
        self.lines.append(record["epoch_end"])

    def time_left(self, step):
        return f"{100 - step}s"


def made(loss: float, applied: bool = True) -> StepResult:
    verdict = Verdict.APPLY if applied else Verdict.SKIP
    return step_result(losses={"loss": loss, "loss_box": loss / 2}, verdict=verdict)


def test_epoch_row_summarises_its_applied_steps():
    log, means = Heard(), EpochMeans(3)
    logger = EpochLogger(log, means, 3, ["mAP"])
    both = means, logger
    for each in both:
        each.on_train_begin(TrainingRun(None, None, None, 0, total_steps=100))

    def step(number, result, wall=1.0, data=0.0):
        means.on_step_end(number, result, 0.01, StepSeconds(wall, wall, data))

    def evaluated(number, **metrics):
        for each in both:
            each.on_evaluate_end(number, metrics, is_best=True)

    for number, result in enumerate([made(1.0), made(math.nan, applied=False), made(3.0)], start=1):
        step(number, result, wall=2.0, data=0.5)
        assert means.ends(number) == (number == 3)
    epoch, numbers = means.take(3)
    logger.on_epoch_end(epoch, 3, numbers)
    step(4, made(9.0))
    means.restore(None, 3)
    for number in (4, 5, 6):
        step(number, made(1.0))
    evaluated(6, mAP=0.25, val_loss=2.0)
    epoch, numbers = means.take(6)
    logger.on_epoch_end(epoch, 6, numbers)
    step(7, made(1.0))
    evaluated(7, mAP=0.5)
    assert means.take(9)[1].get("mAP") is None, "what was found amid an epoch is not its end's"
    header, first, told, record, _, second, _, _, amid = log.lines
    assert header.split() == ["epoch", "loss", "box", "lr", "img/s", "val", "mAP", "ETA"]
    assert first.split() == ["1/34", "2.000", "1.000", "1.0e-02", "4", "97s"]
    assert "25% of it" in told
    assert record["epoch"] == 1 and record["loss"] == 2.0 and "mAP" not in record
    assert second.split()[-3:] == ["2.000", "0.2500", "94s"] and len(header) == len(second)
    assert amid.split()[-2:] == ["mAP", "0.5000"]


def test_an_epoch_row_fits_80_columns(monkeypatch):
    monkeypatch.setattr("ppdist.engine.monitor.device.on_accelerator", lambda: True)
    log = Heard()
    logger = EpochLogger(log, EpochMeans(3), 3, ["mAP", "mAP50"])
    logger.on_train_begin(TrainingRun(None, None, None, 0, total_steps=900))
    parts = {f"loss_{name}": 12345.6 for name in ("cls", "iou", "dfl", "aux", "one_to_one")}
    own = {"lr": 1e-3, "images_per_second": 1234.5, "seconds": 9.0, "data_share": 0.0}
    logger.on_epoch_end(300, 900, {"loss": 1.0, **parts, **own, "memory_gib": 71.25, "mAP": 0.5})
    header, row, *_ = log.lines
    assert 70 < len(header) <= 80 >= len(row) and "GPU mem" in header and "mAP50" in header


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    """The folder of a tiny run over three epochs of three steps, and what it printed."""
    folder, screen = tmp_path_factory.mktemp("run"), io.StringIO()
    own = ("train.epochs=3", "log.visualdl=true")
    with contextlib.redirect_stdout(screen):
        experiment = build_run(shapes, folder, BATCH, *own, model=FASTEST, evaluate=True)
        with experiment.log:
            assert experiment.trainer.fit() == 0
            experiment.log.run_summary()
    return folder, screen.getvalue()


@pytest.mark.slow
def test_each_epoch_and_the_end_of_a_run_are_told(run):
    _, out = run
    assert len(re.findall(r"^ *[123]/3 [\d. ]+", out, re.MULTILINE)) == 3 and "mAP50" in out
    table = " ".join(out.split())
    for text in ("checkpoints/best", "checkpoints/last", "visualdl --logdir", "evaluation", "%"):
        assert text in table


def test_pages_get_scores_and_settings_of_a_run(run):
    from visualdl import LogReader

    folder, _ = run
    with contextlib.redirect_stdout(io.StringIO()):
        reader = LogReader(file_path=str(folder / "vdl/vdlrecords.ppdist.log"))
    evaluated = [each["step"] for each in read_metrics(folder / "metrics.jsonl") if "mAP" in each]
    assert evaluated == [3, 6, 9]
    assert [each.id for each in reader.get_data("scalar", "eval/mAP")] == evaluated
    (record,) = reader.get_data("hyper_parameters", "hparam")
    hparam = record.hparam
    assert len(hparam.hparamInfos) + len(hparam.metricInfos) <= 10, "VisualDL hangs with more"
    named = {info.name for info in hparam.metricInfos}
    assert named <= set(reader.get_tags()["scalar"]), "the page shows their last points"
    texts = {tag: reader.get_data("text", tag)[0] for tag in reader.get_tags()["text"]}
    assert "train.epochs=3.0" in texts["config/train"].text.encoded_text_string
