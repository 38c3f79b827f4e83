"""The benchmark measures the product's own parts and says what it measured, as JSON."""

import json
import sys
from types import SimpleNamespace

import pytest

import benchmarks.__main__ as benchmarks
from ppdist.lab.benchmark import step
from ppdist.lab.benchmark.step import _endless, measure_step
from tests.unit.lab.benchmark.tool import CONFIG, ROOT, refusal_of, report_of


@pytest.mark.slow
def test_a_training_is_measured_by_part():
    report = report_of("train", "--steps", "2", "--warmup", "1")
    assert report["machine"]["ranks"] == 1
    result = report["result"]
    assert result["steps"] == 2 and len(result["losses"]) == 3
    assert result["images_per_step"] == 2
    assert result["images_per_second"] == pytest.approx(2 / result["step_seconds"])
    parts = result["seconds"]
    assert set(parts) == set(step.PARTS)
    assert 0.5 * result["step_seconds"] < sum(parts.values()) < 2 * result["step_seconds"]
    assert result["peak_rss_mb"] > 100


def test_more_steps_than_the_run_has_begin_anew():
    batch_source = SimpleNamespace(steps=lambda first, scores: iter(["a", "b"]))
    done = SimpleNamespace(losses={"loss": 1.0}, images=4, applied=True)
    seen = []

    def train_step(batches, number, *_):
        seen.append((batches, number))
        return done

    rates = SimpleNamespace(rates=lambda number: None)
    schedule = SimpleNamespace(lr_scheduler=rates, total_steps=2)
    trainer = SimpleNamespace(schedule=schedule, train_step=train_step, batch_source=batch_source)
    batches = _endless(batch_source)
    assert [measure_step(trainer, next(batches), number)["images"] for number in range(5)] == [
        4
    ] * 5
    assert seen == [("a", 0), ("b", 1), ("a", 0), ("b", 1), ("a", 0)]


# The command


@pytest.mark.slow
def test_cocos_numbers_are_faster_and_the_same(monkeypatch, capsys, tmp_path):
    file = tmp_path / "coco.json"
    arguments = ["benchmarks", "coco", "--images", "100", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert benchmarks.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == report
    result, ours = report["result"], report["result"]["packages"]["hotcoco"]
    assert ours["largest_difference"] <= 1e-9 and ours["times_faster"] > 1
    assert result["detections"] == 10_000 and 0 < result["metrics"]["mAP"] < 1
    assert ours["times_less_cpu"] > 1 and set(result["ours"]) == {"evaluation", "evaluation.json"}


def test_other_measurements_ask_for_a_configuration():
    said = refusal_of("train")
    assert "-c/--config" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["infer"], "is a classifier, but inference measures detectors only"),
        (["train", "--synthetic"], "--synthetic draws objects for detectors, but model.name: "
         "yolov5_cls is a classifier; leave it out and set data.root"),
        (["infer", "--json", "/dev/null/x"], "/dev/null: cannot be written to"),
    ],
)  # fmt: skip
def test_what_a_classifier_has_not_is_refused(options, message):
    config = ROOT / "configs" / "yolov5" / "yolov5s_cls_imagenet.yml"
    small = ["-o", "model.width_multiple=0.125", "model.image_size=[64,64]"]
    assert message in refusal_of(*options, "-c", config, *small)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scaling", "-c", CONFIG, "--processes", "1", "2", "1"],
         "--processes 1 2 1: give each number once"),
        (["train", "-c", CONFIG, "--synthetic", "2", "-o", "train.nope=1"], "train.nope"),
        (["train", "-c", CONFIG, "--vs", "a=1"], "[foreign_option]"),
        *((["infer", "--model", "export", *option],
           "-w, -o and --synthetic go with -c/--config")
          for option in (["-w", "x"], ["-o", "seed=1"], ["--synthetic"])),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_line(arguments, message):
    assert message in refusal_of(*arguments)
