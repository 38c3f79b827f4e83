"""train.hours: a run ends cleanly in time, on all ranks after the same step."""

import time

import pytest

from ppdist.common.eta import ETA, EVALUATION, SAVING
from ppdist.common.job import STARTED_VARIABLE
from ppdist.engine.time_budget import TimeBudget
from tests.unit.engine.runs import records, run_to_end
from tests.unit.engine.tiny import FASTEST


def test_budget_leaves_time_for_the_end() -> None:
    now = [1000.0]
    budget = TimeBudget(1.0, lambda: now[0])
    assert not budget.is_over(100)
    now[0] += 3600 - 60 - 1.2 * 100 - 1
    assert budget.elapsed() == 3419 and not budget.is_over(100)
    now[0] += 1
    assert budget.is_over(100) and not budget.is_over(99)
    short = TimeBudget(0.01, lambda: now[0])  # 36 s: not all of it is for the end
    assert not short.is_over(10) and short.is_over(30)


def test_budget_counts_from_the_start_of_fleetrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED_VARIABLE, "500.0")
    assert TimeBudget(1.0, lambda: 2300.0).elapsed() == 1800
    monkeypatch.delenv(STARTED_VARIABLE)
    assert TimeBudget(1.0, lambda: 2300.0).elapsed() == 0


def test_no_jump_of_the_wall_clock_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, now = TimeBudget(1.0), time.time()
    for hours in (-48, 2, 48):
        monkeypatch.setattr(time, "time", lambda ahead=hours: now + 3600 * ahead)
        assert 0 <= budget.elapsed() < 60 and not budget.is_over(1)


def test_closing_is_the_longest_of_what_was_seen() -> None:
    now = [0.0]
    eta = ETA(100, lambda: now[0])
    eta.expect(10, 10, evaluation_images=40, images_per_step=4)
    for step in range(1, 6):
        eta.record_step(step, 0.0)
        now[0] += 2.0
    # No evaluation seen: a guess, five times.
    assert eta.closing_seconds() == 2 * 2.0 + 5 * 0.5 * 10 * 2.0
    for part, seconds in ((EVALUATION, 7.0), (EVALUATION, 5.0), (SAVING, 1.0)):
        with eta.spending(part, 5):
            now[0] += seconds
    assert eta.closing_seconds() == 2 * 2.0 + 7.0 + 1.0


def test_a_run_out_of_time_evaluates_saves_and_resumes(shapes, tmp_path, monkeypatch) -> None:
    """That ranks end after the same step: test_step_policy_collectives.py."""
    asked = []
    monkeypatch.setattr(TimeBudget, "is_over", lambda *_: asked.append(1) or len(asked) > 2)
    options = ("train.hours=5", "train.epochs=9", "evaluate.every_epochs=9")
    run_to_end(shapes, tmp_path, *options, model=FASTEST, evaluate=True)
    written = records(tmp_path)
    assert [each["step"] for each in written if "mAP" in each] == [3]
    assert written[-1]["finished"] == "hours"
    assert (tmp_path / "checkpoints/last").resolve().name == "step-00000003"
    assert "train.hours: 5, in epoch" in (tmp_path / "train.log").read_text()
    run_to_end(shapes, tmp_path, *options[1:], "train.max_steps=4", model=FASTEST, resume=True)
    assert records(tmp_path)[-1]["finished"] == "total"
