"""What a user sees: `visualdl --logdir output/NAME/vdl --language en --disable-telemetry`."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from urllib.error import URLError
from urllib.parse import quote

import numpy as np
import pytest

from ppdist.common.run_log import RunLog
from tests.ports import free_port

pytestmark = pytest.mark.slow
STEPS = range(10, 110, 10)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The served page of a short run that was interrupted and resumed once."""
    folder = tmp_path_factory.mktemp("output") / "tiny_run"
    for resume_step, steps in ((None, range(10, 80, 10)), (50, range(60, 110, 10))):
        with RunLog(folder, True, 100, 20, resume_step) as log:
            log.writers.describe({"lr": 0.01, "total_batch": 16}, ["mAP"], {"train": "epochs=5"})
            for step in steps:
                log.metrics({"step": step, "loss": 100.0 / step, "lr": 0.01})
            log.metrics({"step": steps[-1], "mAP": 0.5, "AP/RBC": 0.4, "eval_seconds": 1.0})
            log.images("val", steps[-1], [np.full((64, 64, 3), 120, np.uint8)])
    port = free_port()
    program = [sys.executable, "-c", "from visualdl.server.app import main; main()"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--language", "en"]
    server = subprocess.Popen(
        [*program, "--logdir", folder / "vdl", *options, "--disable-telemetry"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/app"
        wait_for(f"{url}/api/runs")
        yield url
    finally:
        server.kill()
        server.wait()


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            fetch(url)
            return
        except URLError:
            assert time.monotonic() < deadline, f"{url} did not answer"
            time.sleep(0.2)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read()


def test_resumed_run_curve_has_no_doubled_points(address):
    data = fetch(f"{address}/api/scalar/list?run=tiny_run&tag={quote('train/loss', safe='')}")
    points = json.loads(data)["data"]
    assert [step for _, step, _ in points] == list(STEPS)
    assert [value for *_, value in points] == pytest.approx([100.0 / step for step in STEPS])


def test_the_server_gives_what_the_other_pages_show(address):
    def get(path: str, tag: str = "") -> list:
        return json.loads(fetch(f"{address}/api/{path}?run=tiny_run&tag={quote(tag, safe='')}"))[
            "data"
        ]

    (row,) = get("hparams/list")
    assert row["hparams"] == {"lr": 0.01, "total_batch": 16.0}
    assert row["metrics"] == {"eval/mAP": 0.5, "train/loss": pytest.approx(1.0)}


def test_page_answers_client_without_language(address):
    assert b"VisualDL" in fetch(f"{address}/index")


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("scalar", ["eval_per_class", "train", "tiny_run"]),
        ("sample/image", ["val/0"]),
        ("hyper-parameter", ["total_batch", "eval/mAP"]),
    ],
)
def test_a_browser_shows_the_curves_and_images(address, tmp_path, page, expected):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    profile = f"--user-data-dir={tmp_path}"
    budget = "--virtual-time-budget=15000"  # ms of page time, until its requests are done
    done = subprocess.run(
        [browser, *options, profile, budget, "--dump-dom", f"{address}/{page}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    for text in expected:  # titles of single charts are drawn inside their canvas
        assert text in done.stdout
    drawn = {"sample/image": "<img", "hyper-parameter": "0.5"}.get(page, "<canvas")
    assert drawn in done.stdout
