"""train.hours: a run ends cleanly in time, on all ranks after the same step."""

import time

import pytest

from ppdist.common.eta import ETA, EVALUATION, SAVING
from ppdist.common.job import STARTED_VARIABLE
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine import build
from ppdist.engine.callbacks import Callback
from ppdist.engine.time_budget import TimeBudget
from tests.distributed import run_on_ranks
from tests.unit.engine.runs import build_run, records, run_to_end
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
        eta.stepped(step, 0.0)
        now[0] += 2.0
    assert eta.closing() == 2 * 2.0 + 5 * 0.5 * 10 * 2.0  # no evaluation seen: a guess, five times
    for part, seconds in ((EVALUATION, 7.0), (EVALUATION, 5.0), (SAVING, 1.0)):
        with eta.spending(part, 5):
            now[0] += seconds
    assert eta.closing() == 2 * 2.0 + 7.0 + 1.0


class OverAtStep(TimeBudget):
    """Over before the third step, by the clock of rank 0 alone."""

    asked = 0

    def is_over(self, closing_seconds: float) -> bool:
        assert comm.is_main() and closing_seconds >= 0
        self.asked += 1
        return self.asked >= 3


class Ended(Callback):
    def on_train_end(self, step: int, reason: str) -> None:
        self.told = step, reason


def train_for_a_while(folder: str) -> list[object]:
    build.TimeBudget = OverAtStep
    ended = Ended()
    options = ("train.hours=5", "train.epochs=9", "evaluate.every_epochs=9")
    experiment = build_run(
        f"{folder}/data", f"{folder}/out", *options, "train.batch_size_per_card=4",
        model=FASTEST, evaluate=True, callbacks=[ended],
    )  # fmt: skip
    with experiment.log:
        return [experiment.trainer.fit(), *ended.told]


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step_and_resume(tmp_path) -> None:
    make_shapes(tmp_path / "data", train=8, val=2, size=64, seed=0)
    assert run_on_ranks(2, f"{__name__}:train_for_a_while", str(tmp_path)) == [[0, 3, "hours"]] * 2
    written = records(tmp_path / "out")
    assert [each["step"] for each in written if "mAP" in each] == [3]
    assert written[-1]["finished"] == "hours"
    assert (tmp_path / "out/checkpoints/last").resolve().name == "step-00000003"
    text = (tmp_path / "out/train.log").read_text()
    assert "of train.hours: 5, in epoch 3 of 9 (step 3 of 9); --resume continues" in text
    began = time.strftime("%F", time.localtime())
    assert f"train.hours: 5: the run ends before {began[:4]}" in text
    options = ("train.epochs=9", "evaluate.every_epochs=9", "train.max_steps=4")
    run_to_end(tmp_path / "data", tmp_path / "out", *options, model=FASTEST, resume=True)
    assert records(tmp_path / "out")[-1]["finished"] == "total"
