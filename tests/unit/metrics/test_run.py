"""What is read of a run's folder: how it stands, its best, its ranks, what it confuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppdist.metrics.run import Run, read_run
from ppdist.report.content import describe_status, make_scores, show, slow_ranks
from tests.unit.report.folders import make_run


@pytest.mark.parametrize("ending", ["total", "early_stopping"])
def test_a_continued_and_killed_run_is_not_finished(ending: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False, steps=200)
    text = (run / "metrics.jsonl").read_text(encoding="utf-8").replace('"total"', f'"{ending}"')
    records = [
        {"step": 200, "derived": {"steps": {"value": 1000, "why": ""}}},
        {"step": 240, "epoch": 12.0, "loss": 1.0},
    ]
    text += "".join(json.dumps(record) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    state, why = describe_status(read_run(run))
    assert state == "not finished" and "step 240 of 1000" in why


def test_the_best_is_none_that_was_taken_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False, steps=200)
    reason = "ranks held different weights"
    records: list[dict[str, Any]] = [
        {"step": 240, "epoch": 12.0, "mAP": 0.9, "eval_seconds": 1.0},
        {"step": 180, "returned_from_step": 260, "reason": reason},
        {"step": 220, "epoch": 11.0, "mAP": 0.3, "eval_seconds": 1.0},
    ]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    found = read_run(run)
    assert found.best and found.best["step"] == 160
    assert reason in list(show(found).events)[-1]


def test_records_without_epochs_have_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("epoch", None)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    tiles = show(read_run(run)).tiles
    assert (tiles[0].name, tiles[0].beside) == ("best mAP", "step 400")


def test_a_run_shows_the_ranks_it_has_now(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False, ranks=4)
    alone = {"step": 1, "rank_step_seconds": [1.0], "rank_own_seconds": [1.0]}
    text = json.dumps(alone) + "\n" + (run / "metrics.jsonl").read_text(encoding="utf-8")
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert "rank 1 1.50x" in show(read_run(run)).slow_ranks


# Seconds of a step, and of a micro-batch, of each rank; None: a run of an earlier version.
COMPARED = [
    ([0.9, 0.3, 0.3], [0.3, 0.3, 0.3], "All ranks take the same time"),
    ([0.4, 0.4, 0.05], [0.2, 0.4, 0.0], "rank 1 2.00x."),
    ([0.4, 0.05], [0.2, 0.0], ""),
    ([0.4, 0.2], None, "rank 0 2.00x."),
]


@pytest.mark.parametrize(("own", "of_micro_batch", "said"), COMPARED)
def test_ranks_are_compared_by_their_micro_batches(own, of_micro_batch, said) -> None:
    record = {"step": 1, "rank_step_seconds": own, "rank_own_seconds": own}
    record |= {} if of_micro_batch is None else {"rank_micro_batch_seconds": of_micro_batch}
    found = slow_ranks(Run(Path(), ranks=[record]))
    assert said in found and bool(said) == bool(found)


def test_mistakes_of_many_classes_are_named(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(300)]
    run = make_run(tmp_path / "run", names=names, pictures=False)
    content = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    content["confusion"] = {"iou": 0.5, "confidence": 0.3, "true_counts": [40] * 301}
    content["confusion"]["cells"] = [[7, 7, 30], [7, 300, 10], [300, 9, 4], [9, 7, 2]]
    (run / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    found = read_run(run)
    assert found.problems == [] and found.evaluation
    confused = make_scores(found.evaluation).confused
    assert confused and confused.rows == [
        ["class 9", "class 7", 2, 0.02], ["class 7", "(missed)", 10, 0.08],
        ["(extra)", "class 9", 4, None],
    ]  # fmt: skip
    content["confusion"]["cells"] = [[7, 301, 10]]
    (run / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    assert "a cell lies outside" in "".join(read_run(run).problems)
