"""ppdist plan as a user runs it: without Paddle, in words, with every assumption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_here

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plan.py"
WHOLE = ["--cards", "4x8", "--link-gbits", "25", "--rows", "1x8=250", "--parameters", "52.2",
         "--images", "118287", "--epochs", "80"]  # fmt: skip


@pytest.fixture
def ask(tmp_path):
    """Calls `ppdist plan predict`; returns its JSON report, with step milliseconds by cards."""

    def answer(*words):
        file = tmp_path / "plan.json"
        done = run_here("plan", "predict", *words, "--json", file)
        assert done.returncode == 0, done.stderr
        report = json.loads(file.read_text())
        report["ms"] = {
            each["cluster"]["hosts"] * each["cluster"]["cards"]: 1000 * each["step_seconds"]
            for each in report["predictions"]
        }
        return report

    return answer


@pytest.mark.slow
def test_planner_runs_without_paddle():
    block = "import runpy, sys; sys.modules['paddle'] = None; sys.argv = sys.argv[1:]; "
    code = block + "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOOL), "predict", *WHOLE],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_plan_names_hours_limit_and_assumptions(ask):
    report = ask(*WHOLE)
    assert [each["cluster"]["hosts"] for each in report["predictions"]] == [1, 1, 1, 1, 2, 4]
    last = report["predictions"][-1]
    assert last["limit"] == "stragglers" and last["total_batch"] == 256
    assert last["gpu_hours"] == pytest.approx(32 * last["hours"]) == pytest.approx(102.9, abs=0.1)
    assert len(report["assumed"]) == 5


@pytest.mark.parametrize("rows", [{1: 300}, {1: 250, 2: 290}, {8: 300}])
def test_a_row_that_is_asked_for_comes_back(rows, ask):
    words = [f"{cards}x8={ms}" for cards, ms in rows.items()]
    report = ask("--rows", *words, "--cards", 8)
    for cards, ms in rows.items():
        assert report["ms"][cards] == pytest.approx(ms, rel=1e-6)


def report_of(folder, ranks, device="cpu"):
    """A report of ppdist benchmark scaling: 590 ms alone, 637 ms on several."""
    result = {}
    for count in ranks:
        seconds = 0.59 if count == 1 else 0.637
        variant = {"images_per_step": 4 * count, "step_seconds": seconds, "seconds": {"data": 0.0}}
        result[str(count)] = {
            "images_per_second": 4 * count / seconds,
            "last_round": {"parameters": 7.9e6, **variant},
        }
    path = folder / "scaling.json"
    machine = {"ranks": max(ranks), "device": device}
    path.write_text(json.dumps({"what": "scaling", "machine": machine, "result": result}))
    return path


def test_ranks_of_a_cpu_are_those_that_were_measured(tmp_path, ask):
    report = ask("--benchmark", report_of(tmp_path, (1, 2)), "--cards", 2)
    assert report["ms"][2] == pytest.approx(637)
    assert report["job"]["overlap"] == 0
    ask("--benchmark", report_of(tmp_path, (1,), "gpu:0"), "--cards", 2)


def test_fit_prints_parameters_and_residuals():
    rows = ["1x16=169.1", "2x16=191.8", "4x16=194.8", "8x16=206.3"]
    done = run_here("plan", "fit", "--rows", *rows)
    assert done.returncode == 0
    assert all(fact in done.stdout for fact in ("jitter", "10.569 ms", "9.6 %", "12.1 ms"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--cards 8", "--benchmark"),
        ("--cards 4x8 --rows 1x8=250", "--link-gbits"),
        ("--cards 1 --rows 1x8=250 1x16=470", "--batch"),
        ("--cards 8 --rows 1x8=250 --inside-gbytes 20", "--inside-gbytes 20"),
        ("--cards 4by8", "HOSTSxCARDS"),
        ("--cards 8 --rows 8=250", "'8=250'"),
        ("--cards 8 --epochs 0", "--epochs: "),
        ("--cards 8 --rows 1x8=250 --json /dev/null/x", "/dev/null: "),
        ("--cards 8 --rows 1x8=250 --host-mtbf 24", "--host-mtbf 24: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, named):
    done = run_here("plan", "predict", *arguments.split())
    assert done.returncode == 2 and named in done.stderr
