"""The loop of a study, with trainings that only say what they measured (fake_train.py)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from ppdist.common.records import read_metrics
from ppdist.lab.tune.results import read_rows
from ppdist.lab.tune.store import Claim, Store, Waiting
from ppdist.lab.tune.trial import write_process
from tests.errors import raises
from tests.unit.lab.tune.studies import GRID, LAUNCHER, search_in, study_of, write_study

pytest.importorskip("optuna")

ROOT = Path(__file__).resolve().parents[4]
RUNS = """
import sys
from pathlib import Path
from ppdist.lab.tune.store import Store
from ppdist.config.study import load_study
from tests.unit.lab.tune.studies import search_in
store = Store(Path(sys.argv[2]), load_study(Path(sys.argv[1])))
search, said = search_in(store, workers=int(sys.argv[3]))
sys.exit(search.run())
"""


def process_in(study: Path, folder: Path, workers: int, **fakes: str) -> subprocess.Popen:
    """A process that makes a study.  Args: fakes: of fake_train.py's environment."""
    return subprocess.Popen(
        [sys.executable, "-c", RUNS, str(study), str(folder), str(workers)],
        cwd=ROOT, env={**os.environ, **fakes},
    )  # fmt: skip


def epochs_made(folder: Path) -> list[int]:
    files = sorted(folder.glob("trials/*/metrics.jsonl"))
    return [len(file.read_text(encoding="utf-8").splitlines()) - 1 for file in files]


def starts(folder: Path) -> list[int]:
    """How many times each trial was started."""
    files = sorted(folder.glob("trials/*/starts"))
    return [len(file.read_text(encoding="utf-8").splitlines()) for file in files]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def waited_for(what, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_grid_is_made_once_and_exported(tmp_path: Path) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID))
    search, said = search_in(store, workers=2)
    assert search.run() == 0
    again, nothing = search_in(store)
    assert again.run() == 0 and not nothing
    store.close()
    rows = read_rows(tmp_path / "out")
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("plain", 0), ("fast", 0), ("plain", 1), ("fast", 1),
    ]  # fmt: skip
    fast = rows[3]
    assert fast["final"] == fast["best"] == {
        "step": 40, "epoch": 4.0, "mAP": 0.0021, "eval_seconds": 0.1,
    }  # fmt: skip
    assert fast["curve"][0] == [1.0, pytest.approx(0.0006)] and fast["state"] == "complete"
    assert starts(tmp_path / "out") == [1, 1, 1, 1]
    assert any("(fast, seed 1) complete" in line for line in said)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="orphans end by a signal of Linux")
def test_a_killed_study_loses_and_repeats_nothing(tmp_path: Path) -> None:
    study, folder = write_study(tmp_path, GRID), tmp_path / "out"
    first = process_in(study, folder, 2, FAKE_WAIT="1")
    waited_for(lambda: epochs_made(folder) == [1, 1])
    first.kill()
    first.wait()
    pids = [int(file.read_text(encoding="utf-8")) for file in folder.glob("trials/*/starts")]
    waited_for(lambda: not any(lives(pid) for pid in pids), 10)
    assert process_in(study, folder, 2).wait(60) == 0
    assert starts(folder) == [2, 2, 1, 1]
    rows = read_rows(folder)
    assert [row["state"] for row in rows] == ["complete"] * 4
    for number in range(4):  # each epoch once
        lines = read_metrics(folder / "trials" / f"{number:03d}" / "metrics.jsonl")
        assert [line["step"] for line in lines] == [0, 10, 20, 30, 40]


@pytest.mark.slow
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    study, folder = write_study(tmp_path, GRID.replace("1]", "1, 2]")), tmp_path / "out"
    both = [process_in(study, folder, 1, FAKE_SECONDS="0.05") for _ in range(2)]
    assert [each.wait(90) for each in both] == [0, 0]
    assert starts(folder) == [1] * 6
    assert len(read_rows(folder)) == 6


def test_stop_leaves_trials_resumable_and_says_so(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID))
    monkeypatch.setenv("FAKE_SECONDS", "20")
    search, said = search_in(store, stop=lambda: (tmp_path / "out/trials/000/starts").exists())
    assert search.run() == 75
    assert any("trial 000 was stopped" in line for line in said)
    assert store.trials()[0].state == TrialState.RUNNING
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert search_in(store)[0].run() == 0
    assert starts(tmp_path / "out") == [2, 1, 1, 1]
    store.close()


@pytest.mark.slow
def test_hopeless_trials_are_stopped_and_told_as_pruned(tmp_path: Path, monkeypatch) -> None:
    text = "overrides: [train.epochs=6]\nvariants:\n"
    text += "  a: [optimizer.lr=0.9]\n  b: [optimizer.lr=0.8]\n  c: [optimizer.lr=0.1]\n"
    text += "pruner: {name: median, first_epochs: 1, startup_trials: 1}"
    store = Store(tmp_path / "out", study_of(tmp_path, text))
    monkeypatch.setenv("FAKE_WAIT", "0.85")  # so b and c have one epoch when they are looked at
    search, said = search_in(store)
    assert search.run() == 0
    store.close()
    rows = read_rows(tmp_path / "out")
    assert [row["state"] for row in rows] == ["complete", "pruned", "pruned"]
    assert [row["epochs"] for row in rows] == [6, 1, 1]
    assert any("trial 002 is pruned" in line for line in said)


def test_an_orphan_is_ended_and_waited_for(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID + "trials: 1"))
    claim = store.claim(begin=True, retry_failed=False)
    assert isinstance(claim, Claim)
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_WAIT", "1")
        folder = store.trial_folder(claim.number)
        items = ["train.epochs=4"]
        orphan = LAUNCHER.start(folder, ["--nproc_per_node", "1"], "x.yml", items)
    write_process(orphan, 0.5)
    store.leave(claim.number)
    waited_for(lambda: epochs_made(tmp_path / "out") == [1])  # it listens to signals by now
    assert isinstance(store.claim(begin=True, retry_failed=False), Waiting)
    assert orphan.process.wait(10) == 75
    assert search_in(store)[0].run() == 0
    store.close()
    assert starts(tmp_path / "out") == [2]
    assert read_rows(tmp_path / "out")[0]["minutes"] >= 0.5


def test_what_fails_again_ends_a_study_that_retries(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_CODE", "2")
    for count in (2, 4):
        store = Store(tmp_path / "out", study_of(tmp_path, GRID.replace("[0, 1]", "[0]")))
        search, _ = search_in(store)
        search.retry_failed = True
        assert search.run() == 0
        store.close()
        assert len(read_rows(tmp_path / "out")) == count


def test_a_training_that_fleetrun_gave_up_has_failed(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID + "trials: 1"))
    monkeypatch.setenv("FAKE_CODE", "1")
    assert search_in(store)[0].run() == 0
    store.close()
    assert starts(tmp_path / "out") == [1]
    row = read_rows(tmp_path / "out")[0]
    assert row["state"] == "fail"
    assert "the lamp is broken" in row["why"]


def test_a_study_of_failures_ends_with_the_reason(tmp_path: Path, monkeypatch) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID))
    monkeypatch.setenv("FAKE_CODE", "2")
    with raises("trials_failed"):
        search_in(store)[0].run()
    store.close()
    assert starts(tmp_path / "out") == [1, 1, 1]


def test_no_training_outlives_an_error_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    store = Store(tmp_path / "out", study_of(tmp_path, GRID))
    monkeypatch.setenv("FAKE_SECONDS", "20")
    search, _ = search_in(store, workers=2)
    # A shell that starts the tests in the background has them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    monkeypatch.setattr(store, "report", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        search.run()
    store.close()
    for file in (tmp_path / "out").glob("trials/*/starts"):
        assert not lives(int(file.read_text(encoding="utf-8")))
