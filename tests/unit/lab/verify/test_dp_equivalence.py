"""tools/verify.py equivalence as a user runs it, and what it says of ranks that train otherwise."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ppdist.config.experiment import load_config
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm, sync_batch_norm
from ppdist.engine.gradients import Gradients
from ppdist.engine.train_step import TrainStep
from ppdist.lab.verify import dp_equivalence
from ppdist.lab.verify.dp_equivalence import (
    Rounding,
    Trace,
    compare,
    format_lines,
    measure,
    sketch,
    tolerance_of,
    train_steps,
    verdict,
)
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.forked import ROOT, exit_code_of, run_tool, succeeded
from tests.project import write_config

STEPS = 5
SYNCHRONISED = ["train.sync_bn=true"]
CONFIG = """
train: {epochs: 20, batch_size_per_card: 2, clip_norm: 5.0}
optimizer: {lr: 0.003, reference_batch_size: 8}
schedule: {warmup_epochs: 0}
"""
# Seven images, two ranks of two: the second step of an epoch has three.


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equivalence")
    make_shapes(folder / "data", train=7, val=1, size=96, seed=0)
    return write_config(folder, CONFIG)


def verify(config_file: Path, ranks: int, *more: object):
    report = config_file.parent / "report.json"
    report.unlink(missing_ok=True)
    launcher = "--nproc_per_node", ranks, "--log_dir", config_file.parent / "log"
    command = ROOT / "tools" / "verify.py", "equivalence", "-c", config_file, "--steps", STEPS
    arguments = (*launcher, *command, "--json", report, *more)
    return run_tool("launch", *arguments, cwd=config_file.parent), report


@pytest.mark.slow
def test_two_ranks_train_like_one(config_file: Path) -> None:
    done, file = verify(config_file, 2)
    assert "PASS" in succeeded(done).splitlines()[-1]
    (report,) = json.loads(file.read_text(encoding="utf-8"))
    assert report["ranks"] == 2 and report["steps"] == STEPS
    assert report["micro_batches"] == {"count": 2, "images": 2}
    measured = {each["name"]: each for each in report["measured"]}
    assert set(measured) == {"losses", "gradient norm", "weights", "statistics"}
    assert measured["losses"]["difference"] <= 1e-5
    assert report["ranks_with_other_weights"] == []
    assert {path.name for path in config_file.parent.iterdir()} <= {
        "data", "cfg.yml", "report.json", "log"
    }  # fmt: skip


@pytest.mark.slow
def test_steps_with_fewer_images_than_ranks_pass(config_file: Path) -> None:
    """Six images, then one: two of three ranks have none."""
    done, file = verify(config_file, 3, "-o", *SYNCHRONISED)
    (report,) = json.loads(file.read_text(encoding="utf-8"))
    assert "PASS" in succeeded(done).splitlines()[-1]
    assert report["steps"] == STEPS and report["ranks_with_other_weights"] == []
    measured = {each["name"]: each for each in report["measured"]}
    # How far rounding moves a step of one image is the processor's: PASS compares with that.
    assert "statistics" in measured


def count_blank_ranks(argument) -> dict:
    """As `verify_ranks`, with statistics in which ranks without an image count, too."""
    sync_batch_norm.SyncBatchNorm2D.counts = property(lambda norm: True, lambda norm, real: None)
    return verified_here(argument)


def train_too_fast(argument) -> dict:
    """As `verify_ranks`, with gradients of the ranks two per cent too large."""
    factor = TrainStep._factor
    TrainStep._factor = lambda step, divisor: 1.02 * factor(step, divisor)
    return verified_here(argument)


def verified_here(argument) -> dict:
    """`verify_ranks` with synchronised batch norm; only the ranks have what was patched."""
    more = [f"train.max_steps={STEPS}", "log.visualdl=false", *SYNCHRONISED]
    config = load_config(argument, more)
    comm.init("cpu", config.distributed)
    script = ROOT / "tools" / "verify.py"
    command = [sys.executable, str(script), "equivalence", "-c", argument, "-o", *more]
    return dp_equivalence.verify_ranks(config, STEPS, command)


@pytest.mark.slow
def test_blank_ranks_that_count_are_found_out(config_file: Path) -> None:
    target = f"{__name__}:count_blank_ranks"
    report, *others = run_on_ranks(3, target, str(config_file), seconds=300)
    assert others == [report, report] and verdict(report) == "FAIL"


@pytest.mark.slow
def test_gradients_two_per_cent_off_are_found_out(config_file: Path) -> None:
    target = f"{__name__}:train_too_fast"
    report, same = run_on_ranks(2, target, str(config_file), seconds=300)
    assert report == same
    assert report["micro_batches"] == {"count": 1, "images": 4}  # sync_bn
    assert verdict(report) == "FAIL"
    measured = {each["name"]: each for each in report["measured"]}
    assert measured["gradient norm"]["difference"] > 0.01
    assert "statistics" in measured
    assert any(line.endswith("TOO FAR OFF") for line in format_lines(report))


def divide_by_local_normalizers(argument) -> dict:
    """As `verify_ranks`, with the mean over ranks of what each divides by its own objects."""
    average = Gradients.average

    def wrong(gradients, exchange, sums, *rest):
        local = sums.terms["normalizer"]
        own = local.clip(min=1.0)
        mean = comm.all_reduce_sum(local.clone()) / comm.world_size()
        for parameter in gradients.parameters:
            if parameter.grad is not None:
                parameter.grad.scale_((mean / own).item())
        return average(gradients, exchange, sums, *rest)

    Gradients.average = wrong
    return verified_here(argument)


@pytest.mark.slow
def test_local_normalizers_are_found_out(config_file: Path) -> None:
    target = f"{__name__}:divide_by_local_normalizers"
    report, _ = run_on_ranks(2, target, str(config_file), seconds=300, hosts=1)
    assert verdict(report) == "FAIL"
    assert {"gradient norm", "weights"} <= {
        each["name"] for each in report["measured"] if not each["passed"]
    }


@pytest.mark.slow
def test_a_rounding_that_training_amplifies_passes(tmp_path: Path) -> None:
    """AdamW and batch norm over few cells: the runs part, and each step is equal all the same."""
    make_shapes(tmp_path / "data", train=7, val=1, size=96, seed=0)
    adamw = CONFIG.replace("{lr: 0.003", "{name: adamw, lr: 0.003")
    done, _ = verify(write_config(tmp_path, adamw), 3, "-o", *SYNCHRONISED)
    assert "PASS" in succeeded(done).splitlines()[-1]


def set_up(config_file: Path, *more: str):
    return load_config(config_file, ["log.visualdl=false", "train.accumulate_steps=2", *more])


UNCLIPPED = f"train.max_steps={STEPS}", "train.clip_norm=null", "train.cpu_kernels=plain"


class Right(NamedTuple):
    """One rank that trains right, and what `compare` holds against it."""

    ranks: Trace
    alone: Trace
    moved: list[Trace]


@pytest.fixture(scope="module")
def right(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Right:
    config, folder = set_up(config_file, *UNCLIPPED), tmp_path_factory.mktemp("begun")
    ranks = train_steps(config, STEPS, keep=folder)
    moved = train_steps(config, STEPS, Rounding.of(config), begin=folder)
    return Right(ranks, train_steps(config, STEPS, begin=folder), [moved])


def judged(found: dict):
    """(verdict, rows that are too far off) of what `compare` has found."""
    report = {**found, "steps": STEPS, "ranks_with_other_weights": []}
    return verdict(report), [each["name"] for each in report["measured"] if not each["passed"]]


def judged_mutant(config_file: Path, right: Right):
    """As `judged`, of ranks that train wrong: their first step begins as the right one does."""
    ranks = train_steps(set_up(config_file, *UNCLIPPED), STEPS)
    return judged(compare(ranks, *right[1:], tolerance=1e-5))


def test_steps_that_begin_alike_end_alike(right: Right) -> None:
    assert judged(compare(*right, tolerance=1e-5)) == ("PASS", [])
    for group in ("weights", "statistics"):  # bit for bit: all that a step depends on is kept
        np.testing.assert_array_equal(right.alone[f"after/{group}"], right.ranks[f"after/{group}"])


def test_gradients_five_per_cent_off_are_found_out(
    config_file: Path, right: Right, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = TrainStep._update

    def wrong(step, factor, norm, rates):
        return update(step, 1.05 * factor, norm, rates)

    monkeypatch.setattr(TrainStep, "_update", wrong)
    verdict, rows = judged_mutant(config_file, right)
    assert verdict == "FAIL" and {"gradient norm", "weights"} <= set(rows)


@pytest.mark.parametrize("group", ["weights", "statistics"])
def test_ranks_that_stand_still_are_found_out(group: str, right: Right) -> None:
    still = {**right.ranks, f"after/{group}": right.ranks[f"before/{group}"]}
    found = compare(still, *right[1:], tolerance=1e-5)
    assert judged(found) == ("FAIL", [group])


def test_weights_that_hardly_move_prove_nothing(right: Right) -> None:
    begin, end = right.moved[0]["before/weights"], right.moved[0]["after/weights"]
    moved = {**right.moved[0], "after/weights": begin + 1.02 * (end - begin)}
    found = compare(right.ranks, right.alone, [moved], tolerance=1e-5)
    assert judged(found) == ("INCONCLUSIVE", [])


def test_a_sketch_keeps_the_length() -> None:
    rng = np.random.default_rng(0)
    one = {name: rng.normal(size=(size, 3)) for name, size in (("a", 1000), ("b", 7), ("c", 200))}
    other = {name: value + 1e-3 * rng.normal(size=value.shape) for name, value in one.items()}
    length = np.sqrt(sum(np.square(one[name] - other[name]).sum() for name in one))
    assert np.linalg.norm(sketch(one) - sketch(other)) == pytest.approx(length, rel=0.3)


def trace(losses: list[float]) -> Trace:
    rows = 1.0 + np.arange(len(losses) + 1.0)[:, None]
    return {
        "losses/loss": np.array(losses),
        "norm/gradient": np.ones(len(losses)),
        **{f"before/{group}": rows[:-1] for group in ("weights", "statistics")},
        **{f"after/{group}": rows[1:] for group in ("weights", "statistics")},
    }


def test_ranks_may_be_off_by_ten_roundings_of_the_step() -> None:
    alone = trace([1.0, 1.0, 1.0])
    moved = [trace([1.0, 1.0, 1.0]), trace([1.0, 1.0, 1.0 + 1e-4])]  # the largest of the draws
    for step, off, passes in ((3, 9e-4, True), (3, 11e-4, False), (2, 9e-4, False)):
        ranks = trace([1.0 + off * (at == step) for at in (1, 2, 3)])
        losses, *_ = measure(ranks, alone, moved, tolerance=1e-5)
        assert (losses.name, losses.step, losses.passed) == ("losses", step, passes)
        assert losses.allowed == pytest.approx(1e-3 if step == 3 else 1e-5)


def test_nan_loss_only_on_ranks_fails() -> None:
    alone = trace([1.0, 1.0])
    ranks = trace([1.0, float("nan")])
    losses, *_ = measure(ranks, alone, [alone], tolerance=1e-5)
    assert not losses.passed


def test_one_rank_has_nothing_to_compare(config_file: Path, capsys) -> None:
    assert exit_code_of("verify", "equivalence", "-c", config_file) == 2
    assert "[needs_ranks]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key", ["local_sgd_steps=1", "local_sgd_steps=4", "topk_fraction=0.1", "gradient_rank=2"]
)
def test_what_differs_by_design_is_refused(config_file: Path, key: str) -> None:
    config = load_config(config_file, [f"distributed.{key}"])
    name = key.partition("=")[0]
    with raises("differs_by_design", "=null", str(name)):
        dp_equivalence.require_comparable(config)


def test_bfloat16_gradients_have_a_tolerance(config_file: Path) -> None:
    exact, rounded = (
        load_config(config_file, [f"distributed.gradient_dtype={dtype}"])
        for dtype in ("float32", "bfloat16")
    )
    assert tolerance_of(exact) == 1e-5 < tolerance_of(rounded)
