"""The benchmark measures the product's own parts and says what it measured, as JSON."""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppdist.benchmark import loader, scaling, step
from ppdist.benchmark.scaling import launch, measure_scaling
from ppdist.benchmark.step import _averaging_seconds, _compare, _Variant
from ppdist.common.errors import LaunchError
from ppdist.optim.grad_sync import AllReduceSync

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "examples" / "demo.yml"
SMALL = ["model.image_size=[64,64]", "train.batch_size_per_card=2", "data.workers=0",
         "model.width_multiple=0.125", "evaluate.batch_size_per_card=16"]  # fmt: skip


def run(monkeypatch, capsys, what, *options):
    """The report that tools/benchmark.py prints, on data it draws itself."""
    command = ["benchmark.py", what, "-c", str(CONFIG), "--synthetic", "8", "-o", *SMALL, *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    return json.loads(printed.out)


@pytest.mark.slow
def test_training_variants_alternate(monkeypatch, capsys):
    options = ["--vs", "train.cpu_convolutions=plain", "--steps", "2", "--warmup", "1"]
    report = run(monkeypatch, capsys, "train", *options)
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
def test_cocos_numbers_are_faster_and_the_same(monkeypatch, capsys, tmp_path):
    command = ["benchmark.py", "coco", "--images", "100", "--json", str(tmp_path / "coco.json")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert json.loads((tmp_path / "coco.json").read_text()) == report
    result, ours = report["result"], report["result"]["packages"]["hotcoco"]
    assert ours["largest_difference"] <= 1e-9 and ours["times_faster"] > 1
    assert result["detections"] == 10_000 and 0 < result["metrics"]["mAP"] < 1
    assert ours["times_less_cpu"] > 1 and set(result["ours"]) == {"evaluation", "evaluation.json"}


def test_other_measurements_ask_for_a_configuration(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "train"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "the following arguments are required: -c/--config" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_is_measured_beside_another(monkeypatch, capsys, workers):
    options = ["data.cache=ram", f"data.workers={workers}", "--seconds", "0.4", "--epochs", "2"]
    result = run(monkeypatch, capsys, "loader", *options)["result"]
    assert result["images"] > 0 and result["workers"] == workers
    assert result["images_per_second_per_worker"] == result["images_per_second"] > 0
    assert result["without_cache"]["images_per_second"] > 0
    assert result["times_straightforward"]["clock"] == pytest.approx(
        result["images_per_second"] / result["straightforward"]["images_per_second"]
    )
    memory = result["memory"]
    assert set(memory) == {"rss_mb", "pss_mb", "own_mb"}
    assert all(len(row) == 2 for row in memory.values())
    assert 1 < memory["own_mb"][1] <= memory["pss_mb"][1] <= memory["rss_mb"][1]


def test_shared_memory_counts_once_in_pss():
    shared = np.ones(64 << 20, np.uint8)
    child = os.fork()
    if child == 0:
        time.sleep(60)
    try:
        one, both = (loader.memory_of(those) for those in ([child], [child, os.getpid()]))
        assert child in loader._children()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert shared[0] == 1
    assert one["rss_mb"] > 64 > one["own_mb"] and one["pss_mb"] > 32
    assert both["rss_mb"] - both["pss_mb"] > 64


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(monkeypatch, capsys):
    options = ["--repeats", "1", "--processes", "1", "2"]
    result = run(monkeypatch, capsys, "eval", *options)["result"]
    assert result["metrics_identical"] and result["images"] == 4
    one, two = (result["processes"][count] for count in ("1", "2"))
    assert one["of_first"] == 1 and two["of_first"] == two["seconds"] / one["seconds"]
    assert [len(each["parts"]) for each in (one, two)] == [1, 2]
    losses = [each["metrics"]["val_loss"] for each in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_evaluation_is_measured_over_the_whole_split(monkeypatch, capsys):
    report = run(monkeypatch, capsys, "eval", "--repeats", "1")
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

    done = SimpleNamespace(losses={"loss": 1.0}, images=4)
    trainer = SimpleNamespace(
        derived=SimpleNamespace(
            schedule=SimpleNamespace(rates=lambda number: None), accumulate_steps=1
        ),
        train_step=lambda *_: passes(3.0, done),
    )
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step, "wait_for_slice", lambda: passes(0.5 + 60.0, 60.0))
    variant = _Variant("a", trainer, iter(()))
    variant.step()
    assert variant.wall == [pytest.approx(3.5)]


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
    monkeypatch.setattr(step, "_require_same_joining", lambda variants: None)
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
    step = SimpleNamespace(model=paddle.nn.Linear(2, 3), averaging=Noting())
    assert _averaging_seconds(step, repeats=1) > 0
    both = [[2, 3], [3]]
    assert step.averaging.asked == [both, 0, both, 1, both, 2] * 2


def test_a_variant_of_what_ranks_settle_once_is_refused(monkeypatch, capsys):
    key = "distributed.bucket_mb=1"
    command = ["benchmark.py", "train", "-c", str(CONFIG), "--synthetic", "2", "--vs", key]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert (
        "distributed.bucket_mb: 1 in the variant 'distributed.bucket_mb=1', 25 in 'base': ranks "
        "settle it once, when they join; measure the two in runs of their own"
    ) in capsys.readouterr().err


def test_scaling_compares_within_rounds(monkeypatch):
    drift = iter([1.0, 0.5, 3.0])  # of the machine's speed, from round to round
    slice_seconds = []

    def interleave(groups, seconds):
        """Leaves what each run would have found: together, and apart."""
        slice_seconds.append(seconds)
        speed = next(drift)
        for group in groups:
            for command in group.commands:
                file = Path(command[command.index("--json") + 1])
                processes = int(command[2]) if command[0] == "fleetrun" else 1
                rate, step = {1: (5.0, 0.8), 2: (8.0, 1.0)}[processes]
                if command[0] != "fleetrun":
                    rate, step = 4.5, 0.9
                variant = {"images_per_second": rate * speed, "step_seconds": step / speed,
                           "sent_bytes_per_step": 7}  # fmt: skip
                result = {"variants": {"base": variant}, "gradient_all_reduce_seconds": 0.4}
                file.write_text(json.dumps({"result": result}))

    monkeypatch.setattr(scaling, "interleave", interleave)
    report = measure_scaling(
        ["fleetrun"], ["train"], counts=[1, 2], rounds=3, slice_seconds=2.5
    )  # fmt: skip
    assert slice_seconds == [2.5] * 3
    assert report["1"]["speed_up"] == report["1"]["efficiency"] == 1
    two = report["2"]
    assert two["images_per_second"] == 8.0 and two["of_rounds"] == [8.0, 4.0, 24.0]
    assert two["speed_up"] == pytest.approx(8 / 5)
    assert two["efficiency_of_rounds"] == pytest.approx([4 / 5] * 3)
    assert two["efficiency"] == pytest.approx(4 / 5)
    assert two["machine_limit"] == pytest.approx(9 / 10)
    assert two["efficiency_of_limit"] == pytest.approx(8 / 9)
    assert two["exposed_seconds"] == two["exposed_share_of_step"] == pytest.approx(0.1)
    assert two["hidden_share"] == pytest.approx(0.75)
    assert two["sent_bytes_per_step"] == 7


def test_a_failed_scaling_run_names_its_command():
    fails = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with pytest.raises(LaunchError, match=r"2 processes ended with exit code 3: .* train") as error:
        launch(fails, ["benchmark.py", "train"], 2, environment=os.environ)
    assert error.value.code == "run_failed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["infer"], "is a classifier, but inference is measured of detectors alone"),
        (["train", "--synthetic"], "--synthetic draws objects for detectors, but model.name: "
         "yolov5_cls is a classifier; leave it out and set data.root"),
        (["infer", "--json", "/dev/null/x"], "/dev/null: cannot be written to"),
    ],
)  # fmt: skip
def test_what_a_classifier_has_not_is_refused_in_one_line(monkeypatch, capsys, options, message):
    config = ROOT / "configs" / "yolov5" / "yolov5s_cls_imagenet.yml"
    small = ["-o", "model.width_multiple=0.125", "model.image_size=[64,64]"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options, "-c", str(config), *small])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_number_of_processes_that_comes_twice_is_refused(monkeypatch, capsys):
    command = ["benchmark.py", "scaling", "-c", str(CONFIG), "--processes", "1", "2", "1"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "--processes 1 2 1: give each number once" in capsys.readouterr().err


def test_nonsense_is_refused_in_one_line(monkeypatch, capsys):
    command = [
        "benchmark.py",
        "train",
        "-c",
        str(CONFIG),
        "--synthetic",
        "2",
        "--vs",
        "train.nope=1",
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "train.nope" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["-w", "x"], ["-o", "seed=1"], ["--synthetic"]])
def test_what_belongs_to_a_config_is_refused_without_one(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "infer", "--model", "export", *option])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / "benchmark.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "-w, -o and --synthetic go with -c/--config" in capsys.readouterr().err
