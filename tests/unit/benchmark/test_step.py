"""The benchmark measures the product's own parts and says what it measured, as JSON."""

import json
import sys
from types import SimpleNamespace

import paddle
import pytest

import benchmarks.__main__ as benchmarks
from ppdist.benchmark import step
from ppdist.benchmark.step import _averaging_seconds, _compare, _endless, _Variant
from ppdist.optim.grad_sync import AllReduceSync
from tests.unit.benchmark.tool import CONFIG, ROOT, refusal_of, report_of


@pytest.mark.slow
def test_training_variants_alternate():
    options = ["--vs", "train.cpu_convolutions=plain", "--steps", "2", "--warmup", "1"]
    report = report_of("train", *options)
    assert report["machine"]["ranks"] == 1
    variants = report["result"]["variants"]
    assert list(variants) == ["base", "train.cpu_convolutions=plain"]
    base, plain = variants.values()
    assert base["steps"] == plain["steps"] == 2
    assert base["images_per_step"] == 2
    assert base["images_per_second"] == pytest.approx(2 / base["step_seconds"])
    parts = base["seconds"]
    assert set(parts) == set(step.PARTS)
    assert 0.5 * base["step_seconds"] < sum(parts.values()) < 2 * base["step_seconds"]
    against = plain["against base"]
    assert against["wall_ratio"] > 0
    assert against["cpu_ratio"] > 0
    assert against["largest_relative_loss_difference"] < 1e-4  # oneDNN computes what eager does
    assert report["result"]["peak_rss_mb"] > 100


@pytest.mark.slow
def test_evaluation_is_measured_over_the_whole_split():
    report = report_of("eval", "--repeats", "1")
    assert report["result"]["images"] == 4
    result = report["result"]
    assert result["images_per_second"] == pytest.approx(4 / result["seconds"])
    parts = {"images", "forward", "boxes", "loss", "rows", "ranks", "metrics"}
    assert set(result["parts"][0]) == parts
    assert 0.5 * result["seconds"] < sum(result["parts"][0].values()) <= result["seconds"]
    assert result["metrics"]["val_loss"] > 0 and result["metrics"]["mAP"] >= 0


def test_a_step_is_timed_without_a_pause(monkeypatch):
    now = [0.0]

    def passes(seconds, result):
        now[0] += seconds
        return result

    done = SimpleNamespace(losses={"loss": 1.0}, images=4, applied=True)
    trainer = SimpleNamespace(
        schedule=SimpleNamespace(
            lr_scheduler=SimpleNamespace(rates=lambda number: None),
            total_steps=9,
        ),
        batch_source=SimpleNamespace(numbers=lambda step: [0]),
        train_step=lambda *_: passes(3.0, done),
    )
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step, "wait_for_slice", lambda: passes(0.5 + 60.0, 60.0))
    variant = _Variant("a", trainer, iter(()))
    variant.step()
    assert variant.wall == [pytest.approx(3.5)]


def test_more_steps_than_the_run_has_begin_anew():
    batch_source = SimpleNamespace(
        batches=lambda first, scores: iter(["a", "b"]), numbers=lambda step: [0]
    )
    done = SimpleNamespace(losses={"loss": 1.0}, images=4, applied=True)
    seen = []

    def train_step(batches, numbers, number, *_):
        seen.append((next(batches), number))
        return done

    rates = SimpleNamespace(rates=lambda number: None)
    schedule = SimpleNamespace(lr_scheduler=rates, total_steps=2)
    trainer = SimpleNamespace(schedule=schedule, train_step=train_step, batch_source=batch_source)
    variant = _Variant("a", trainer, _endless(batch_source))
    for _ in range(5):
        variant.step()
    assert seen == [("a", 0), ("b", 1), ("a", 0), ("b", 1), ("a", 0)]


def test_ratios_are_of_neighbouring_steps():
    first, other = (_Variant(name, None, iter(())) for name in ("a", "b"))
    first.wall, other.wall = [1.0, 1.0, 10.0, 2.0], [50.0, 3.0, 30.0, 6.0]
    first.cpu, other.cpu = [1.0] * 4, [2.0] * 4
    first.losses, other.losses = [4.0, 2.0], [4.0, 2.1]
    found = _compare(first, other, 1)
    assert found["wall_ratio"] == 3.0
    assert found["cpu_ratio"] == 2.0
    assert found["largest_relative_loss_difference"] == pytest.approx(0.05)


def test_a_slow_step_counts_once_a_period():
    local, plain = _Variant("local", None, iter(()), every=8), _Variant("plain", None, iter(()))
    for number in range(18):  # two of warm-up, then two periods
        synchronises = (number + 1) % 8 == 0
        for variant, wall, sent in ((local, 1.7, 1600), (plain, 0.2, 400)):
            slow = variant is local and not synchronises
            variant.wall.append(0.1 if slow else wall)
            variant.cpu.append(0.1)
            variant.parts.append({"optimizer": 0.1 if slow else wall})
            variant.losses.append(1.0)
            variant.images.append(8)
            variant.sent.append(0 if slow else sent)
    report = local.report(2)
    assert report["step_seconds"] == report["seconds"]["optimizer"] == pytest.approx(0.3)
    assert report["images_per_second"] == pytest.approx(8 / 0.3)
    assert report["sent_bytes_per_step"] == 200
    assert report["steps"] == 16
    assert _compare(local, plain, 2)["wall_ratio"] == pytest.approx(0.2 / 0.3)


def test_steps_are_rounded_up_to_whole_periods(monkeypatch, tmp_path):
    made = {}

    class Counting(_Variant):
        def step(self):
            self.wall.append(1.0)

        def report(self, warmup):
            return {}

    def start(name, config, folder):
        trainer = SimpleNamespace(train_step=SimpleNamespace(model=paddle.nn.Linear(1, 1)))
        made[name] = Counting(name, trainer, iter(()), config["every"])
        made[name].losses.append(1.0)
        return made[name]

    monkeypatch.setattr(step, "_start", start)
    monkeypatch.setattr(step, "_compare", lambda *_: {})
    monkeypatch.setattr(step, "_require_same_process", lambda variants: None)
    variants = {"a": {"every": 2}, "b": {"every": 3}}
    step.measure_training(variants, steps=7, warmup=1, scratch=tmp_path)
    assert [len(each.wall) for each in made.values()] == [1 + 12] * 2


class Noting(AllReduceSync):
    """What averages weights every third step, and notes when it is asked to do what."""

    every = 3

    def __init__(self):
        self.asked = []

    def gradients(self, gradients, factor):
        self.asked.append([each.shape for each in gradients])

    def updated(self, step):
        self.asked.append(step)


def test_averaging_is_timed_as_the_run_does_it():
    step = SimpleNamespace(model=paddle.nn.Linear(2, 3), grad_sync=Noting())
    assert _averaging_seconds(step, repeats=1) > 0
    both = [[2, 3], [3]]
    assert step.grad_sync.asked == [both, 0, both, 1, both, 2] * 2


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
    assert "the following arguments are required: -c/--config" in said


def test_a_variant_of_what_ranks_settle_once_is_refused():
    key = "distributed.bucket_mb=1"
    said = refusal_of("train", "-c", CONFIG, "--synthetic", "2", "--vs", key)
    assert (
        "distributed.bucket_mb: 1 in the variant 'distributed.bucket_mb=1', 25 in 'base': a "
        "process can only set it once; measure the two in separate runs"
    ) in said


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
        (["train", "-c", CONFIG, "--synthetic", "2", "--vs", "train.nope=1"], "train.nope"),
        *((["infer", "--model", "export", *option],
           "-w, -o and --synthetic go with -c/--config")
          for option in (["-w", "x"], ["-o", "seed=1"], ["--synthetic"])),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_line(arguments, message):
    assert message in refusal_of(*arguments)
