"""Several runs: what differs, and what came of it."""

import json
import math
import statistics
from pathlib import Path

from ppdist.metrics.run import read_run
from ppdist.report.content import compare, distinct, grouped, verdict_on
from ppdist.report.page import write_report
from tests.unit.report.folders import make_run


def test_runs_that_differ_only_in_the_seed_are_one_group(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"lr{lr}_s{seed}", seed=seed, lr=lr)
        for lr in (0.01, 0.02)
        for seed in (0, 1, 2)
    ]
    page = compare([read_run(folder) for folder in folders])
    assert [group.name for group in page.groups] == ["lr0.01", "lr0.02"]
    assert [len(group.runs) for group in page.groups] == [3, 3]
    scores = [(0.6 + 0.02 * seed) * (1 - math.exp(-4)) for seed in (0, 1, 2)]
    expected = f"{statistics.fmean(scores):.4f} ± {statistics.stdev(scores):.4f}"
    column = page.summary.columns.index("best mAP")
    assert [row[column] for row in page.summary.rows] == [expected, expected]
    assert page.each is not None and len(page.each.rows) == 6


def test_only_keys_with_different_values_are_shown(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", lr=0.01), make_run(tmp_path / "b", lr=0.02, ranks=4)]
    page = compare([read_run(folder) for folder in folders])
    assert page.differing is not None
    assert page.differing.rows == [
        ["optimizer.lr", "0.01", "0.02"],
        ["ranks (derived)", "2", "4"],
        ["total_batch (derived)", "16", "32"],
        ["lr (derived)", "0.01", "0.02"],
    ]
    speed = page.summary.columns.index("speed")
    assert [row[speed] for row in page.summary.rows] == ["1.00x", "2.00x"]
    assert page.each is None


def test_other_ranks_or_no_config_form_own_group(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, ranks=ranks) for name, ranks in (("a", 1), ("b", 2))]
    for name in ("c", "d"):
        folders.append(make_run(tmp_path / name))
        (folders[-1] / "config.yml").unlink()
    assert len(grouped([read_run(folder) for folder in folders])) == 4


def test_names_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("x/run", "y/run", "other")]
    assert distinct(folders) == ["x/run", "y/run", "other"]
    assert distinct([Path("/a/x"), Path("/b/a/x")]) == ["/a/x", "b/a/x"]


def test_runs_without_records_can_be_compared(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, evaluation=False) for name in ("a", "b")]
    for folder in folders:
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    page = compare([read_run(folder) for folder in folders])
    assert page.classes is None
    assert not any("best" in column for column in page.summary.columns)
    assert "best" not in page.summary.note


def test_an_unevaluated_run_leaves_the_metric(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.01), ("b", 0.02))]
    (folders[1] / "evaluation.json").unlink()
    file = folders[1] / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if "eval_seconds" not in line]
    file.write_text("\n".join(lines), encoding="utf-8")
    page = compare([read_run(folder) for folder in folders])
    column = page.summary.columns.index("best mAP")
    assert page.summary.rows[1][column] is None and "the best mAP." in page.summary.note


def test_what_tools_eval_leaves_is_as_good_as_a_run(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run"), tmp_path / "evaluated"
    other.mkdir()
    (run / "evaluation.json").rename(other / "evaluation.json")
    page = compare([read_run(run), read_run(other)])
    for name, value in (("best mAP", "0.5610"), ("last mAP", "0.5610"), ("mAP50", "0.8500")):
        assert page.summary.rows[1][page.summary.columns.index(name)] == value
    assert page.classes is not None
    assert all(row[2] is not None for row in page.classes.rows)


def test_runs_judged_by_other_metrics_say_so(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.01), ("b", 0.02))]
    config = json.loads((folders[1] / "config.yml").read_text(encoding="utf-8"))
    config["evaluate"]["metric"] = "mAP50"
    (folders[1] / "config.yml").write_text(json.dumps(config), encoding="utf-8")
    page = compare([read_run(folder) for folder in folders])
    assert "best own metric" in page.summary.columns


def test_the_verdict_of_a_run_is_on_its_page_and_not_while_it_runs(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert verdict_on(run)[0].code in ("learned", "partly_learned")
    page = write_report([tmp_path / "run"], tmp_path / "page.html")
    assert page == [] and verdict_on(run)[0].text in (tmp_path / "page.html").read_text("utf-8")
    run.running = True
    assert verdict_on(run) == []
