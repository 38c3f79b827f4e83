"""What processes that share a study know of each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from optuna.trial import TrialState

from ppdist.lab.tune.store import Claim, Store, Waiting
from ppdist.lab.tune.trial import grid
from tests.errors import raises
from tests.unit.lab.tune.studies import EXPERIMENT, GRID, SEARCH, study_of, write_study

pytest.importorskip("optuna")

CLAIMS = """
import sys, time
from pathlib import Path
from ppdist.lab.tune.store import Claim, Store
from ppdist.config.study import load_study
store = Store(Path(sys.argv[2]), load_study(Path(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
while isinstance(claim := store.claim(begin=True, retry_failed=False), Claim):
    print(claim.number, claim.cell.key(), flush=True)
time.sleep(float(sys.argv[3]))
"""


def claimant(study: Path, folder: Path, seconds: float = 0) -> subprocess.Popen:
    """A process that takes every trial it can get, and lives on so long."""
    return subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(study), str(folder), str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[4],
    )  # fmt: skip


def go(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def claim(store: Store, retry_failed: bool = False) -> Claim | Waiting | None:
    return store.claim(begin=True, retry_failed=retry_failed)


def taken(store: Store) -> Claim:
    found = claim(store)
    assert isinstance(found, Claim)
    return found


def test_trials_of_a_killed_process_are_adopted(tmp_path: Path) -> None:
    study = write_study(tmp_path, GRID)
    other = claimant(study, tmp_path / "out", 60)
    go(other)
    assert other.stdout is not None
    lines = [other.stdout.readline() for _ in range(5)][1:]
    store = Store(tmp_path / "out", study_of(tmp_path, GRID))
    assert claim(store) is None
    other.kill()
    other.wait()
    found = [taken(store) for _ in range(4)]
    assert all(each.again for each in found)
    assert [f"{each.number} {each.cell.key()}\n" for each in found] == lines
    assert claim(store) is None
    store.close()


def test_a_training_that_has_not_ended_yet_is_waited_for(tmp_path: Path) -> None:
    store = Store(tmp_path, study_of(tmp_path, GRID + "trials: 1"))
    number = taken(store).number
    store.leave(number)
    hold = "import sys; from pathlib import Path; from ppdist.common import files; "
    hold += "files.hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.readline()"
    run = subprocess.Popen(
        [sys.executable, "-c", hold, str(store.trial_folder(number))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[4],
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "held\n"
    assert isinstance(claim(store), Waiting)
    run.communicate("end\n", timeout=20)
    assert taken(store).again
    store.close()


def test_suggestions_outlive_a_restart(tmp_path: Path) -> None:
    def suggested(name: str, restarts: bool, seed: int, sign: int = 1) -> list[dict]:
        text = SEARCH.replace("trials: 6", "trials: 14") + f"seed: {seed}"
        study = study_of(tmp_path, text)
        store, found = Store(tmp_path / name, study), []
        for _ in range(14):
            trial = taken(store)
            found.append(dict(trial.cell.params))
            value = sign * trial.cell.params["optimizer.lr"]
            store.finish(trial.number, TrialState.COMPLETE, value, {})
            if restarts:
                store.close()
                store = Store(tmp_path / name, study)
        assert claim(store) is None
        store.close()
        return found

    first = suggested("a", False, 0)
    assert suggested("b", True, 0) == first
    assert suggested("c", False, 1) != first
    assert len({str(each) for each in first}) == 14
    # The first ten are drawn at random, the others near what did well.
    other = suggested("d", False, 0, sign=-1)
    assert other[:10] == first[:10] and other[10:] != first[10:]


def test_failed_cells_are_made_again_only_when_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path, study_of(tmp_path, GRID))
    for _ in grid(store.config):
        store.finish(taken(store).number, TrialState.FAIL, None, {})
    assert claim(store) is None
    assert claim(store, retry_failed=True) is None  # not what has failed just now
    store.close()
    store = Store(tmp_path, store.config)
    found = claim(store, retry_failed=True)
    assert isinstance(found, Claim) and found.cell == grid(store.config)[0] and found.number == 4
    store.finish(found.number, TrialState.FAIL, None, {})
    others = [claim(store, retry_failed=True) for _ in range(4)]
    assert [each.number for each in others if isinstance(each, Claim)] == [5, 6, 7]
    assert others[-1] is None
    store.close()


def test_a_study_grows_but_does_not_change(tmp_path: Path) -> None:
    Store(tmp_path / "out", study_of(tmp_path, GRID)).close()
    more = GRID.replace("fast:", "slow: [optimizer.lr=0.0001], fast:").replace("1]\n", "1, 2]\n")
    store = Store(tmp_path / "out", study_of(tmp_path, more))
    assert len(grid(store.config)) == 9
    store.close()
    with raises("study_settings_differ", "variants.fast"):
        Store(tmp_path / "out", study_of(tmp_path, GRID.replace("0.002", "0.003")))
    with raises("study_settings_differ"):
        Store(tmp_path / "out", study_of(tmp_path, GRID.replace("=4", "=5")))
    # What a start has left out is not forgotten by it.
    fewer = GRID.replace(", fast: [optimizer.lr=0.002]", "")
    Store(tmp_path / "out", study_of(tmp_path, fewer)).close()
    with raises("study_settings_differ", "variants.fast"):
        Store(tmp_path / "out", study_of(tmp_path, GRID.replace("0.002", "0.003")))


def test_a_changed_experiment_is_refused(tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID)
    Store(tmp_path / "out", study).close()
    experiment = tmp_path / "experiment.yml"
    experiment.rename(tmp_path / "renamed.yml")
    renamed = study.model_copy(update={"config": str(tmp_path / "renamed.yml")})
    Store(tmp_path / "out", renamed).close()
    experiment.write_text(EXPERIMENT + "optimizer: {lr: 0.5}\n", encoding="utf-8")
    with raises("study_settings_differ"):
        Store(tmp_path / "out", study)


def test_a_study_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    study, file = study_of(tmp_path, GRID), tmp_path / "out" / "study.json"
    Store(tmp_path / "out", study).close()
    now = json.loads(file.read_text(encoding="utf-8"))
    earlier = now | {"minutes_per_trial": None, "costs_like": {}, "calibration_epochs": 4}
    file.write_text(json.dumps(earlier), encoding="utf-8")
    Store(tmp_path / "out", study).close()
    file.write_text(json.dumps(earlier | {"minutes_per_trial": 3}), encoding="utf-8")
    with raises("study_settings_differ", "minutes_per_trial"):  # its trials took equal time
        Store(tmp_path / "out", study)


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path: Path) -> None:
    store = Store(tmp_path, study_of(tmp_path, GRID))
    taken(store)
    with (tmp_path / "journal.log").open("a", encoding="utf-8") as journal:
        journal.write('{"op_code": 4, "work')
    assert taken(store).number == 1  # by a process that lives on
    store.close()
    with (tmp_path / "journal.log").open("a", encoding="utf-8") as journal:
        journal.write('{"op_code": 4, "work')
    store = Store(tmp_path, store.config)
    assert [taken(store).number for _ in range(3)] == [0, 1, 2]
    store.close()


def test_halving_ends_what_is_worse_than_the_best_third(tmp_path: Path) -> None:
    text = SEARCH + "pruner: {name: halving, first_epochs: 2, factor: 3}"
    store = Store(tmp_path, study_of(tmp_path, text))
    numbers = [taken(store).number for _ in range(6)]
    hopeless = [store.report(number, {1: 0.9 - number * 0.1}) for number in numbers]
    assert not any(hopeless)  # no rung is reached yet
    hopeless = [store.report(number, {2: 0.9 - number * 0.1}) for number in numbers]
    assert hopeless == [False, True, True, True, True, True]
    assert not store.report(0, {1: 0.9, 2: 0.9})  # nothing new
    store.close()


def half_a_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4][:10] + b"\n", *lines[5:]]


DAMAGES = {
    "whole": (lambda lines: lines, ""),
    "tail cut off": (lambda lines: [*lines[:-1], lines[-1][:-20]], ""),
    "tail of NUL": (lambda lines: [*lines, b"\0" * 200], ""),
    "page of NUL": (lambda lines: [*lines[:4], b"\0" * 300 + b"\n", *lines[4:]], "line 5 "),
    "half a line": (half_a_line, "line 5 "),
    "other entry": (lambda lines: [*lines, b'{"op_code":99,"worker_id":""}\n'], "contradict"),
    "other JSON": (lambda lines: [*lines, b"[1]\n"], "line "),
    "deep JSON": (lambda lines: [*lines, b"[" * 200000 + b"\n"], "line "),
    "empty": (lambda lines: [], "missing or empty"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_journal_is_one_message_with_what_is_kept(damage: str, tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID)
    store = Store(tmp_path / "out", study)
    for value in (0.1, 0.2):
        number = taken(store).number
        store.trial_folder(number).mkdir(parents=True, exist_ok=True)
        store.report(number, {1: value})
        store.finish(number, TrialState.COMPLETE, value, {})
    store.close()
    change, what = DAMAGES[damage]
    journal = tmp_path / "out" / "journal.log"
    journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))
    if what:
        for _ in range(2):  # the first changed nothing
            with raises("study_damaged", what, f"{tmp_path / 'out' / 'trials'}"):
                Store(tmp_path / "out", study)
    else:
        store = Store(tmp_path / "out", study)
        assert taken(store).number == (1 if damage == "tail cut off" else 2)  # its end was lost
        store.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"[]", b'{"variants": 3}', b'{"seed": 0'])
def test_torn_settings_of_a_study_are_one_message(content: bytes, tmp_path: Path) -> None:
    study = study_of(tmp_path, GRID)
    store = Store(tmp_path / "out", study)
    taken(store)
    store.close()
    (tmp_path / "out" / "study.json").write_bytes(content)
    with raises("study_damaged", "journal.log"):
        Store(tmp_path / "out", study)
    (tmp_path / "out" / "study.json").unlink()  # as the message says
    store = Store(tmp_path / "out", study)
    assert len(store.trials()) == 1
    store.close()
