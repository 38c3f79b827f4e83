"""metrics.jsonl, read: what was taken back does not count, whatever is shown of it."""

import json
from pathlib import Path

from ppdist.common.records import MetricRecords, read_metrics, run_summary, step_of

START = {"step": 0, "derived": {"steps": {"value": 200, "why": "so"}}}
END = {"step": 200, "finished": "total"}


def evaluated(step: int, score: float) -> dict:
    return {"step": step, "mAP": score, "eval_seconds": 1.0}


def test_restarted_run_is_no_longer_ended():
    assert MetricRecords.of([START, END]).finished == "total"
    again = {**START, "step": 200}
    assert MetricRecords.of([START, END, again, {"step": 240, "loss": 1.0}]).finished == ""
    stopped = {"step": 300, "finished": "signal"}
    assert MetricRecords.of([START, END, again, stopped]).finished == "signal"


def test_a_return_takes_back_what_lies_beyond_its_step():
    ranks = {"step": 240, "rank_step_seconds": [1.0]}
    found = MetricRecords.of(
        [
            {"step": 180, "loss": 1.0}, evaluated(180, 0.5), {"step": 240, "loss": 9.0}, ranks,
            evaluated(240, 0.9), {"step": 180, "returned_from_step": 260},
            {"step": 200, "loss": 0.5}, evaluated(240, 0.6),
        ]
    )  # fmt: skip
    assert [each["step"] for each in found.steps] == [180, 200]
    assert [each["mAP"] for each in found.evaluations] == [0.5, 0.6]
    assert found.ranks == [] and len(found.rollbacks) == 1


def test_unknown_records_and_no_step_are_dropped():
    odd = [{"loss": 1}, {"step": True, "loss": 1}, {"step": "3", "loss": 1}, {"step": 3}]
    odd += [{"step": 1e400, "loss": 1}, {"step": 10**400, "loss": 1}, {"step": 1, "derived": []}]
    assert MetricRecords.of(odd) == MetricRecords()


def test_lines_that_are_no_json_cost_themselves_alone(tmp_path: Path):
    lines = ['{"step": 1, "los', "[" * 100_000, '{"step": ' + "9" * 5000 + "}", "3", '{"step": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2}]


def test_run_summary_omits_rolled_back_steps(tmp_path: Path):
    records = [evaluated(100, 0.3), evaluated(200, 0.9), {"step": 100, "returned_from_step": 220}]
    records.append(evaluated(200, 0.4))
    text = "".join(json.dumps(record) + "\n" for record in records[:3])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert "first evaluation" not in [what for what, *_ in run_summary(tmp_path, {})]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(records[3]) + "\n")
    (tmp_path / "checkpoints" / "step-00000200").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("step-00000200")
    assert run_summary(tmp_path, {})[0][:2] == ("best", "mAP 0.4000")


def test_summary_has_the_losses_of_the_table_and_the_time_by_part(tmp_path: Path):
    def rows(*records, **seconds):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "metrics.jsonl").write_text(text)
        return {what: (value, why) for what, value, why in run_summary(tmp_path, seconds)}

    steps = [{"step": 16, "loss": 1.41}, {"step": 24, "loss": None}]
    epochs = [
        {"step": 8 * epoch, "epoch_end": {"epoch": epoch, "loss": loss}}
        for epoch, loss in ((1, 1.438), (2, 1.4), (3, 1.2))
    ]
    found = rows(*steps, *epochs, training=18.0, plots=19.0, saving=0.01, evaluation=2.0)
    assert found["training loss"] == ("1.200", found["training loss"][1])
    assert "1.438" in found["training loss"][1]
    assert found["time"][0] == "39s" and "plots 49%, training 46%" in found["time"][1]
    assert rows(epochs[0])["training loss"] == ("1.438", "in epoch 1")
    assert rows(*steps)["training loss"] == ("1.410", "at step 16")
    assert "training loss" not in rows(steps[1])


def test_only_a_checkpoint_has_a_step(tmp_path: Path):
    for name in ("step-00000030", "200", "best.pdparams"):
        (tmp_path / name).mkdir()
    assert step_of(tmp_path / "step-00000030") == 30
    assert step_of(tmp_path / "200") is step_of(tmp_path / "best.pdparams") is None
    assert step_of(tmp_path / "absent") is None
