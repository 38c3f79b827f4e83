"""What the parts of tools/verify.py accelerator notice, and the whole of it on ranks."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from ppdist.common.process import EXIT_DIR_VARIABLE
from ppdist.config.distributed import DistributedConfig
from ppdist.data.types import Arrays
from ppdist.distributed import comm
from ppdist.engine.build import build_model
from ppdist.verify import accelerator
from ppdist.verify.accelerator import (
    FAIL,
    NOT_RUN,
    PARTS,
    PASS,
    Found,
    Runs,
    attempt,
    differences,
    judge_equivalence,
    judge_gradients,
    judge_kernels,
    judge_memory,
    judge_resume,
    judge_speed,
    judge_training,
    kernels,
    losses_and_gradients,
    page,
    trained,
)
from tests.accelerator import plugin
from tests.distributed import run_on_ranks
from tests.forked import ROOT, run_tool, succeeded
from tests.once import for_all_workers
from tests.unit.engine.tiny import FASTEST, fixed_batch, tiny_config
from tests.unit.verify.proof import SMALL


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return for_all_workers(tmp_path_factory, "accelerator", plugin.build)


# What is noticed


def test_kernels_of_this_device_are_right() -> None:
    comm.init("cpu", DistributedConfig())
    found = kernels()
    assert found.verdict == PASS
    assert {"1 + 1", "convolution", "sort", "suppression"} <= found.measured.keys()


@pytest.mark.parametrize("wrong", [0.0, math.nan, 1.0001])
def test_a_kernel_that_gives_something_else_fails(wrong) -> None:
    right = np.array([1.0, 2.0])
    found = judge_kernels({"1 + 1": (right, right), "sort": (right * wrong, right)})
    assert found.verdict == FAIL and "sort" in found.problems[0]
    assert judge_kernels({"sort": (np.zeros(3), right)}).verdict == FAIL


def gradients(factor: float = 1.0, at: str = "weight") -> dict[str, np.ndarray]:
    found = {"loss loss": np.array([2.0]), "weight": np.ones(9), "bias": np.full(3, 0.5)}
    return found | {at: found[at] * factor}


@pytest.mark.parametrize(("at", "factor"), [
    ("bias", 1.01), ("bias", 0.0), ("weight", math.nan), ("loss loss", 1.001)
])  # fmt: skip
def test_a_wrong_gradient_or_loss_fails(at, factor) -> None:
    found = judge_gradients(gradients(factor, at), gradients(), gradients())
    assert found.verdict == FAIL and at in found.problems[0]


def test_equal_gradients_pass_and_missing_ones_fail() -> None:
    assert judge_gradients(gradients(), gradients(), gradients()).verdict == PASS
    some = {key: each for key, each in gradients().items() if key != "bias"}
    assert judge_gradients(some, gradients(), gradients()).verdict == FAIL


def test_gradients_that_prove_nothing_do_not_pass() -> None:
    chaos = {key: each * 1.5 for key, each in gradients().items()}
    assert judge_gradients(gradients(), gradients(), chaos).verdict == NOT_RUN
    zeros = {key: each * 0.0 for key, each in gradients().items()} | {"loss loss": np.array([2.0])}
    assert judge_gradients(zeros, zeros, zeros).verdict == NOT_RUN


def test_gradients_of_one_batch_are_those_of_its_model(tmp_path) -> None:
    """Twice the same is the same; a rounding is little; another image is not."""
    comm.init("cpu", DistributedConfig())
    config = tiny_config(tmp_path, model=FASTEST)
    weights = {key: each.numpy() for key, each in build_model(config).state_dict().items()}
    batch = fixed_batch(0, 0, 2)
    arrays = {name: np.asarray(getattr(batch, name)) for name in Arrays._fields}
    first, again, moved = (
        losses_and_gradients(config, weights, arrays, 4, 8, moved=each)
        for each in (False, False, True)
    )
    assert judge_gradients(again, first, moved).measured["gradients"]["furthest_off"] == 0
    assert judge_gradients(first, again, moved).verdict == PASS
    assert any((moved[key] != first[key]).any() for key in first)
    arrays["images_B3HW"] = arrays["images_B3HW"] // 2
    other = losses_and_gradients(config, weights, arrays, 4, 8)
    assert judge_gradients(other, first, moved).verdict == FAIL


@pytest.mark.parametrize(("losses", "skipped", "verdict"), [
    ([4.0, 3.0, 2.0, 2.01], 0, PASS),
    ([4.0, 3.0, 2.0, 2.2], 0, FAIL),
    ([4.1, 2.9, 2.0, 2.0], 0, FAIL),
    ([4.0, math.nan, 2.0, 2.0], 0, FAIL),
    ([4.0, 3.0, 2.0, math.inf], 0, FAIL),
    ([0.0] * 4, 0, FAIL),
    ([4.0, 3.0, 2.0, 2.0], 1, FAIL),
])  # fmt: skip
def test_a_training_is_judged_by_float32(losses, skipped, verdict) -> None:
    assert judge_training(losses, skipped, [4.0, 3.0, 2.0, 2.0]).verdict == verdict


def test_half_precision_is_not_run_where_there_is_none() -> None:
    comm.init("cpu", DistributedConfig())
    for dtype in ("bfloat16", "float16"):
        assert trained(SimpleNamespace(), dtype).verdict == NOT_RUN


class OneReport:
    """What a training with AMP left, instead of one."""

    def __init__(self, **more) -> None:
        self.report = dict.fromkeys(accelerator._KEPT, 1) | {"losses": [4.0, 3.0]} | more

    def benchmark(self, name: str, steps: int, *overrides: str) -> dict:
        assert {"train.amp.enabled=true", f"train.amp.dtype={name}"} <= set(overrides)
        return self.report


def test_only_float16_may_look_for_a_loss_scale() -> None:
    def proof(float32: Found, **report) -> SimpleNamespace:
        runs, options = OneReport(**report), accelerator.Options(steps=2)
        return SimpleNamespace(runs=runs, options=options, found={"float32": float32})

    float32 = judge_training([4.0, 3.0], 0)
    with patch.object(accelerator, "_has_half", lambda dtype: Found()):
        for dtype, verdict in (("float16", PASS), ("bfloat16", FAIL)):
            found = attempt(PARTS[f"AMP {dtype}"], proof(float32, skipped_steps=2))
            assert found.verdict == verdict and found.measured["skipped_steps"] == 2
        failed = judge_training([math.nan], 0)
        found = attempt(PARTS["AMP bfloat16"], proof(failed, skipped_steps=0))
        assert found.verdict == NOT_RUN and "float32" in found.not_run


def test_equivalence_passes_only_what_tells() -> None:
    row = {"name": "losses", "difference": 1e-7, "step": 1, "rounding": 0.0, "allowed": 1e-5,
           "telling_steps": 2, "free": None, "passed": True}  # fmt: skip
    report = {
        "measured": [row], "steps": 2, "steps_asked_for": 2, "steps_that_tell": 2, "ranks": 2,
        "sync_bn": True, "ranks_with_other_weights": [], "weights_moved": 1e-3,
        "micro_batches": {"count": 1, "images": 4},
    }  # fmt: skip
    assert judge_equivalence(report).verdict == PASS
    assert judge_equivalence(report | {"measured": [row | {"telling_steps": 0}]}).not_run
    assert judge_equivalence(report | {"ranks_with_other_weights": [1]}).verdict == FAIL
    found = judge_equivalence(report | {"measured": [row | {"passed": False}]})
    assert found.verdict == FAIL and found.problems == ["too far off: losses"]


def test_speed_is_judged_on_cards_alone() -> None:
    assert judge_speed({"1": 10.0, "2": 19.0}, 0.8, cards=True).verdict == PASS
    slow = judge_speed({"1": 10.0, "2": 19.0, "4": 20.0}, 0.8, cards=True)
    assert slow.verdict == FAIL and slow.problems[0].startswith("4 cards: 50%")
    assert judge_speed({"1": 10.0, "2": 9.0}, 0.8, cards=False).verdict == NOT_RUN
    assert judge_speed({"1": 10.0}, 0.8, cards=True).verdict == NOT_RUN


def test_memory_holds_weights_and_gradients() -> None:
    right = {"peak_allocated_bytes": 900, "peak_reserved_bytes": 1000, "parameters": 100}
    assert judge_memory(right).verdict == PASS
    assert judge_memory(right | {"peak_allocated_bytes": 0}).verdict == FAIL
    assert judge_memory(right | {"peak_reserved_bytes": 899}).verdict == FAIL


def test_resume_is_judged_by_two_equal_runs() -> None:
    one = {"a": np.ones(4, np.float32), "b": np.zeros(2, np.float32)}
    same = differences(one, {key: each.copy() for key, each in one.items()})
    assert same["tensors_that_differ"] == 0 and judge_resume(same, None).verdict == PASS
    odd = differences(one, one | {"a": one["a"] * np.float32(1.001)})
    assert odd["tensors_that_differ"] == 1 and odd["off"] == pytest.approx(1e-3, rel=1e-2)
    assert judge_resume(odd, same).verdict == FAIL
    assert judge_resume(odd, odd).verdict == PASS
    broken = differences(one, one | {"a": one["a"] * np.nan})
    assert judge_resume(broken, odd).verdict == FAIL
    with pytest.raises(ValueError, match="0 and 2"):
        differences({}, one)


# Runs beside the ranks


def fail_on_rank_1(folder: str) -> dict:
    """A run whose rank 1 ends with an error while rank 0 would go on for ever, and a later one."""
    comm.init("cpu", DistributedConfig())
    with patch.object(accelerator, "_GRACE_SECONDS", 0.5):
        program = (
            "import os, sys, time; print('not this'); "
            "rank = os.environ.get('PADDLE_TRAINER_ID', 'alone'); "
            f"assert {EXIT_DIR_VARIABLE!r} not in os.environ; "
            "sys.exit('broken card') if rank == '1' else time.sleep(100 if sys.argv[1] else 0)"
        )
        out = Path(folder)
        (out / "logs").mkdir(exist_ok=True)
        config = tiny_config(out, model=FASTEST)
        (out / "work").mkdir(exist_ok=True)
        runs = Runs(config, out, lambda name: [sys.executable, "-c", program], math.inf)
        with pytest.raises(accelerator.RunFailed) as broken:
            runs.start("broken", ["train", "for ever"], [])
        runs.start("alone", ["train", ""], [], count=1)
        late = Runs(config, out, lambda name: [sys.executable], -math.inf)
        with pytest.raises(accelerator.OutOfTime):
            late.start("late", ["train"], [])
    return {"broken": [*broken.value.args]}


def test_a_rank_that_fails_does_not_hang_the_others(tmp_path) -> None:
    for found in run_on_ranks(2, f"{__name__}:fail_on_rank_1", str(tmp_path), hosts=1):
        (problem,) = found["broken"]
        assert problem.startswith("broken: rank 1: exit code 1: broken card")


def test_a_verdict_other_than_pass_is_read_from_the_report(tmp_path) -> None:
    """`ppdist verify equivalence` ends with 1 where nothing could tell right from wrong, too."""
    comm.init("cpu", DistributedConfig())
    (tmp_path / "logs").mkdir()
    (tmp_path / "work").mkdir()
    program = (
        "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('[1]'); sys.exit(1)"
    )
    config = tiny_config(tmp_path, model=FASTEST)
    runs = Runs(config, tmp_path, lambda name: [sys.executable, "-c", program], math.inf)
    assert runs.measure("judged", ["verify"], [], judges=True) == [1]
    with pytest.raises(accelerator.RunFailed):
        runs.measure("measured", ["benchmark"], [])
    runs = Runs(config, tmp_path, lambda name: [sys.executable, "-c", "exit(1)"], math.inf)
    with pytest.raises(accelerator.RunFailed):
        runs.measure("silent", ["verify"], [], judges=True)


# The whole of it


def prove_on_ranks(count: int, out: Path, **more) -> dict:
    plug_in = {"plugin": more.pop("plugin")} if "plugin" in more else {}
    argument = {"out": str(out)} | more
    found = run_on_ranks(
        count, "tests.unit.verify.proof:prove", argument, hosts=1, seconds=900, **plug_in
    )
    assert all(each["failed"] == found[0]["failed"] for each in found)
    report = json.loads((out / accelerator.JSON_NAME).read_text(encoding="utf-8"))
    assert list(report["parts"]) == list(PARTS)
    assert (out / accelerator.PAGE_NAME).read_text(encoding="utf-8") == page(report)
    assert not (out / "work").exists()
    assert found[0]["said"].count("\n") >= len(PARTS) or more.get("zeros")
    return report["parts"]


@pytest.mark.slow
def test_the_whole_on_two_cards(cards, tmp_path) -> None:
    parts = prove_on_ranks(2, tmp_path, plugin=cards, steps=8)
    verdicts = {name: part["verdict"] for name, part in parts.items()}
    half = {"AMP bfloat16", "AMP float16"}  # of which it has no kernels
    assert verdicts == {name: NOT_RUN if name in half else PASS for name in PARTS}
    assert set(parts["speed"]["measured"]["images_per_second"]) == {"1", "2"}
    assert parts["resume"]["measured"]["bit_for_bit"]
    assert parts["memory"]["measured"]["peak_allocated_bytes"] > 1 << 20


@pytest.mark.slow
def test_the_whole_on_two_cpu_ranks(tmp_path) -> None:
    parts = prove_on_ranks(2, tmp_path, steps=8)
    run = {"kernels", "float32", "N cards like one", "resume"}
    for name, part in parts.items():
        assert part["verdict"] == (PASS if name in run else NOT_RUN), (name, part)
        assert bool(part["not_run"]) == (name not in run)


@pytest.mark.slow
def test_a_card_without_code_fails_and_trains_nothing(cards, tmp_path) -> None:
    parts = prove_on_ranks(1, tmp_path, plugin=cards, zeros=True)
    assert parts["kernels"]["verdict"] == FAIL and "1 + 1 is 0" in parts["kernels"]["problems"][0]
    assert {part["verdict"] for name, part in parts.items() if name != "kernels"} == {NOT_RUN}


@pytest.mark.gpu
@pytest.mark.slow
def test_the_whole_on_this_machines_cards(tmp_path) -> None:
    """Where there is a card: `fleetrun` starts the same on more of them."""
    from ppdist.distributed import device

    if not device.accelerators():
        pytest.skip("this Paddle sees no card")
    words = ("accelerator", "--out", tmp_path, "--steps", 40, "-o", *SMALL)
    assert "FAIL" not in succeeded(run_tool("verify", *words, cwd=ROOT, seconds=1800))
