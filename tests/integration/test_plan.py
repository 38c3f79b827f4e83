"""ppdist plan as a user runs it: without Paddle, in words, with every assumption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.forked import run_here

TOOL = Path(__file__).resolve().parents[2] / "tools" / "plan.py"
WHOLE = ["--cards", "4x8", "--link-gbits", "25", "--rows", "1x8=250", "--parameters", "52.2",
         "--images", "118287", "--epochs", "80", "--reference-batch", "64",
         "--critical-batch", "1830", "--eval-images", "5000", "--eval-rate", "60"]  # fmt: skip


@pytest.mark.slow
def test_planner_runs_without_paddle(tmp_path):
    block = "import runpy, sys; sys.modules['paddle'] = None; sys.argv = sys.argv[1:]; "
    code = block + "runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = ["predict", *WHOLE, "--plot", str(tmp_path / "plan.png")]
    done = subprocess.run(
        [sys.executable, "-c", code, str(TOOL), *arguments],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_plan_names_hours_limit_help_and_assumptions(tmp_path):
    file = tmp_path / "plan.json"
    done = run_here("plan", "predict", *WHOLE, "--json", file)
    assert done.returncode == 0
    assert "4 x 8 cards: 3.6 h, " in done.stdout and " GPU-hours. Of these:" in done.stdout
    assert "Limit on 4 x 8 cards: waiting for the slowest card. What would help:" in done.stdout
    assert (
        "bfloat16 gradients" in done.stdout
        and "more epochs, which a large batch needs" in done.stdout
    )
    assert "jitter 9.6 %, as fitted to YOLOv5l on A100" in done.stdout
    assert "Not in these numbers:\n  - accuracy\n  - waiting for images" in done.stdout
    report = json.loads(file.read_text())
    assert [found["cluster"]["hosts"] for found in report["predictions"]] == [1, 1, 1, 1, 2, 4]
    last = report["predictions"][-1]
    assert last["limit"] == "stragglers" and last["total_batch"] == 256
    assert last["gpu_hours"] == pytest.approx(32 * last["hours"])
    assert report["what_ifs"][0]["hours"] < last["hours"] and len(report["assumed"]) == 6


def test_no_images_and_epochs_predicts_speed_only(tmp_path):
    plot = tmp_path / "speed.png"
    done = run_here("plan", "predict", "--cards", "2", "--rows", "1x8=250",
                       "2x8=280", "--parameters", "8", "--inside-gbytes", "10", "--inside-us", "3",
                       "--overlap", "0.9", "--jitter", "0", "--plot", plot)  # fmt: skip
    assert done.returncode == 0 and "GPU-hours" not in done.stdout and "img/s" in done.stdout
    assert "Assumed" not in done.stdout
    assert "  - hours: --images and --epochs\n" in done.stdout
    assert plot.stat().st_size > 10_000


def test_fit_prints_parameters_and_residuals():
    rows = ["1x16=169.1", "2x16=191.8", "4x16=194.8", "8x16=206.3"]
    done = run_here("plan", "fit", "--rows", *rows)
    assert done.returncode == 0
    assert "3 parameters (image, parallel, jitter) from 4 rows" in done.stdout
    assert "10.569 ms an image, jitter 9.6 %, data parallel 12.1 ms" in done.stdout
    assert len(done.stdout.splitlines()) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cards", "8"], "no step was measured; give --benchmark FILE (ppdist benchmark train"),
        (["--cards", "4x8", "--rows", "1x8=250"],
         "--cards 4x8: how fast is the link between the hosts? Give --link-gbits, or --doctor"),
        (["--cards", "4by8"], "expected HOSTSxCARDS such as 4x8, or a number of cards, found"),
        (["--cards", "8", "--rows", "8=250"],
         "expected CARDSxBATCH=MILLISECONDS such as 1x16=169, found '8=250'"),
        (["--cards", "8", "--jitter", "-1"], "--jitter: expected a number, 0 or more, found '-1'"),
        (["--cards", "8", "--epochs", "0"], "--epochs: expected a number above 0, found 0"),
        (["--cards", "8", "--rows", "1x8=250", "--json", "/dev/null/x"],
         "/dev/null: cannot be written to: it is a file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(arguments, message):
    done = run_here("plan", "predict", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
