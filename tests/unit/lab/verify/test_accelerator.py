"""What the parts of `ppdist verify accelerator` notice, and the whole of it on ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.lab.verify import accelerator
from ppdist.lab.verify.accelerator import (
    FAIL,
    NOT_RUN,
    PARTS,
    PASS,
    judge_equivalence,
    judge_resume,
    judge_speed,
    relative_difference,
)
from tests.accelerator import plugin
from tests.distributed import run_on_ranks
from tests.forked import ROOT, exit_code_of, run_tool, succeeded
from tests.once import for_all_workers
from tests.unit.lab.verify.proof import SMALL


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return for_all_workers(tmp_path_factory, "accelerator", plugin.build)


# What is noticed


def test_equivalence_passes_only_what_tells() -> None:
    row = {"name": "losses", "difference": 1e-7, "step": 1, "rounding": 0.0, "allowed": 1e-5,
           "telling_steps": 2, "passed": True}  # fmt: skip
    report = {"measured": [row], "steps": 2, "steps_that_tell": 2, "ranks_with_other_weights": []}
    assert judge_equivalence(report).verdict == PASS
    assert judge_equivalence(report | {"measured": [row | {"telling_steps": 0}]}).not_run
    assert judge_equivalence(report | {"ranks_with_other_weights": [1]}).verdict == FAIL
    result = judge_equivalence(report | {"measured": [row | {"passed": False}]})
    assert result.verdict == FAIL and "losses" in result.problems[0]


def test_speed_is_judged_on_cards_alone() -> None:
    assert judge_speed({1: 10.0, 2: 19.0}, 0.8, on_cards=True).verdict == PASS
    assert judge_speed({1: 10.0, 4: 20.0}, 0.8, on_cards=True).verdict == FAIL
    assert judge_speed({1: 10.0, 2: 9.0}, 0.8, on_cards=False).verdict == NOT_RUN
    assert judge_speed({1: 10.0}, 0.8, on_cards=True).verdict == NOT_RUN


def test_resume_is_judged_by_two_equal_runs() -> None:
    one = {"a": np.ones(4, np.float32), "b": np.zeros(2, np.float32)}
    assert relative_difference({key: array.copy() for key, array in one.items()}, one) == 0
    off = relative_difference(one | {"a": one["a"] * np.float32(1.001)}, one)
    assert off == pytest.approx(1e-3, rel=1e-2)
    assert judge_resume(0.0, 0.0).verdict == PASS
    assert judge_resume(off, 0.0).verdict == FAIL
    assert judge_resume(off, off).verdict == PASS
    broken = relative_difference(one | {"a": one["a"] * np.nan}, one)
    assert judge_resume(broken, off).verdict == FAIL
    with pytest.raises(ValueError, match="0 and 2"):
        relative_difference({}, one)


def test_an_earlier_option_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("verify", "accelerator", "--minutes", 5) == 2
    assert "[foreign_option]" in capsys.readouterr().err


# The whole of it


def prove_on_ranks(count: int, out: Path, plug_in: Path | None = None) -> dict:
    found = run_on_ranks(
        count, "tests.unit.lab.verify.proof:prove", {"out": str(out)}, hosts=1, seconds=600,
        plugin=plug_in,
    )  # fmt: skip
    assert not any(rank["failed"] for rank in found)
    report = json.loads((out / accelerator.JSON_NAME).read_text(encoding="utf-8"))
    assert list(report["parts"]) == list(PARTS)
    assert not (out / "work").exists()
    assert found[0]["printed"].count("\n") > len(PARTS)
    assert all(part["verdict"] == PASS or part["not_run"] for part in report["parts"].values())
    return report["parts"]


@pytest.mark.slow
def test_the_whole_on_two_cards(cards: Path, tmp_path: Path) -> None:
    parts = prove_on_ranks(2, tmp_path, cards)
    assert {part["verdict"] for part in parts.values()} == {PASS}
    assert set(parts["speed"]["measured"]["images_per_second"]) == {"1", "2"}
    assert parts["resume"]["measured"]["resumed_off_by"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("on", ["a card, held against the CPU", "two CPU ranks"])
def test_the_whole_on(on: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    given = (1, tmp_path, request.getfixturevalue("cards")) if "card" in on else (2, tmp_path)
    parts = prove_on_ranks(*given)
    verdicts = {name: part["verdict"] for name, part in parts.items()}
    assert verdicts == {"equivalence": PASS, "speed": NOT_RUN, "resume": PASS}


@pytest.mark.gpu
@pytest.mark.slow
def test_the_whole_on_this_machines_cards(tmp_path: Path) -> None:
    """Where there is a card: `fleetrun` starts the same on more of them."""
    from ppdist.distributed import device

    if not device.accelerators():
        pytest.skip("this Paddle sees no card")
    words = ("accelerator", "--out", tmp_path, "--steps", 40, "-o", *SMALL)
    assert "FAIL" not in succeeded(run_tool("verify", *words, cwd=ROOT, seconds=1800))
