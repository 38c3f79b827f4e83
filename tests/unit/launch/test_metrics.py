"""The numbers of a host are right, and what cannot be read costs no others."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from ppdist.distributed import heartbeat
from ppdist.launch import metrics, worker
from ppdist.launch.metrics import METRICS, Measures, last_evaluation
from tests.unit.launch.hosts import ROOT
from tests.unit.launch.measured import Ranks


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    folder = tmp_path / "private"
    folder.mkdir()
    return Ranks(folder)


def test_run_metrics_come_from_rank_0_host_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.say(0, "step", 20, inside=True)
    ranks.say(1, "step", 17, silent=300)
    found = ranks.read()
    assert found["ppdist_rank_up{rank=0}"] == found["ppdist_rank_up{rank=1}"] == 1
    assert found["ppdist_rank_lag_steps{rank=0}"] == 0
    assert found["ppdist_rank_lag_steps{rank=1}"] == 3
    assert (found["ppdist_rank_waiting{rank=0}"], found["ppdist_rank_waiting{rank=1}"]) == (1, 0)
    assert found["ppdist_rank_silent_seconds{rank=0}"] < 100
    assert 300 <= found["ppdist_rank_silent_seconds{rank=1}"] < 400
    assert found["ppdist_rank_phase{rank=1,phase=step}"] == 1
    assert sum(value for name, value in found.items() if "rank_phase{rank=1" in name) == 1
    assert found["ppdist_rank_own_seconds_total{rank=1}"] == 1.5 * 17
    assert found["ppdist_run_step"] == 20 and found["ppdist_run_planned_steps"] == 80
    assert found["ppdist_run_loss"] == 3.25 and found["ppdist_run_images_total"] == 160
    assert found["ppdist_run_bad_steps_total"] == 1 and found["ppdist_host_ranks"] == 2
    ranks.begin(1)
    ranks.say(4, "step", 20)  # the first of another host
    ranks.tell_run(tmp_path)
    other = ranks.read()
    assert other["ppdist_rank_step{rank=4}"] == 20
    # The number of ranks has to outlive the loss of rank 0's host.
    assert [name for name in other if name.startswith("ppdist_run_")] == ["ppdist_run_ranks"]


def test_ended_rank_is_down_without_other_metrics(ranks: Ranks) -> None:
    ranks.say(0, "step", 20)
    ranks.say(1, "step", 20)
    worker.end_report(ranks.attempt, 1, 1, -9)
    found = ranks.read()
    assert (found["ppdist_rank_up{rank=0}"], found["ppdist_rank_up{rank=1}"]) == (1, 0)
    assert "ppdist_rank_silent_seconds{rank=1}" not in found


def test_restarts_and_hangs_count_over_attempts(ranks: Ranks, tmp_path: Path) -> None:
    ranks.tell_run(tmp_path / "output" / "demo")
    first = Measures(ranks.folder, pytest.fail)
    assert {labels["run"] for _, labels, _ in first.samples()} == {"demo"}
    (ranks.attempt / "watch.json").write_text("{}")
    ranks.begin(1)
    ranks.begin(2)
    samples = {name: (labels, value) for name, labels, value in first.samples()}
    assert samples["ppdist_host_restarts_total"][1] == 2
    assert samples["ppdist_host_stalls_total"][1] == 1
    assert samples["ppdist_host_ranks"][0]["run"] == "demo"  # as long as nobody says otherwise


def test_checkpoint_and_evaluation_are_read_from_files(ranks: Ranks, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    ranks.say(0, "step", 20)
    ranks.tell_run(output)
    orders = ranks.attempt / "job.json"
    os.utime(orders, (time.time() - 100, time.time() - 100))
    found = ranks.read()
    assert found["ppdist_run_ranks"] == 4
    assert not [name for name in found if "checkpoint_step" in name or "evaluation" in name]
    assert 100 <= found["ppdist_run_checkpoint_age_seconds"] < 150  # of the attempt
    for step, age in ((900, 50), (1000, 20)):
        manifest = output / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
        os.utime(manifest, (time.time() - age, time.time() - age))
    (output / "checkpoints" / "step-00001100").mkdir()  # not yet whole
    record = {"step": 1000, "mAP": 0.5, "AP/cat": 0.7, "val_loss": None, "eval_seconds": 2.0}
    (output / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    found = ranks.read()
    assert found["ppdist_run_checkpoint_step"] == 1000
    assert 20 <= found["ppdist_run_checkpoint_age_seconds"] < 50
    assert found["ppdist_run_evaluation{metric=mAP}"] == 0.5
    assert found["ppdist_run_evaluation_step"] == 1000
    assert len([name for name in found if "evaluation{" in name]) == 1
    os.utime(orders)  # resumed from it a moment ago
    assert ranks.read()["ppdist_run_checkpoint_age_seconds"] < 15


def test_the_last_evaluation_is_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_evaluation(path) == {}
    first = '{"step": 1, "loss": 2.0}\n{"step": 1, "eval_seconds": 1.0, "mAP": 0.1}\n'
    path.write_text(first + '{"step": 2, "eval_sec')  # it is being written
    assert last_evaluation(path)["mAP"] == 0.1
    second = '{"step": 2, "eval_seconds": 1.0, "mAP": 0.2}\n'
    path.write_text(first + second + '"eval_seconds"\nno "eval_seconds" in JSON\n')
    assert last_evaluation(path)["mAP"] == 0.2
    monkeypatch.setattr(metrics, "_TAIL_BYTES", 100)
    path.write_text(second + '{"step": 1, "loss": 2.0}\n' * 1000)
    assert last_evaluation(path) == {}


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        (None, "ppdist_host_ranks"),  # the launcher's own orders are broken
        *((text, "") for text in ('{"output_dir": "/tmp/', '{"world": 2}', "[]", "\xff")),
    ],
)
def test_what_cannot_be_read_is_left_out_and_said_once(
    ranks: Ranks, told: str | None, missing: str
) -> None:
    ranks.say(0, "step", 20)
    if told is None:
        (ranks.attempt / "job.json").write_text("{")
    else:
        heartbeat.run_path(ranks.attempt, 0).write_bytes(told.encode("latin-1"))
    said: list[str] = []
    broken = Measures(ranks.folder, said.append)
    for _ in range(2):
        names = {name for name, _, _ in broken.samples()}
    others = set() if missing else {"ppdist_host_ranks", "ppdist_run_step"}
    assert {"ppdist_rank_up"} | others <= names
    assert missing not in names and len(said) == 1


def test_every_number_is_explained() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(ppdist_(?:run|host|rank)_\w+)`", page)) == set(METRICS)
