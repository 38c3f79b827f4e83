"""No module of the current folder runs in a Python that ppdist starts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ppdist.cli import script_words
from ppdist.common.child import own_environment, python, python_module, run_command
from ppdist.common.trackers import TrackedRun, TrackerProcess
from ppdist.launch.doctor import check_software
from ppdist.launch.metrics import export_metrics

WAIT = 60.0  # seconds: a bound against hanging

# Of the interpreter, of what Paddle and the converter import, and what Python runs at its start.
NAMES = (
    "cv2 json numpy onnx paddle paddle2onnx ppdist prometheus_client psutil queue random runpy "
    "secrets signal sitecustomize tempfile typing usercustomize yaml"
)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a stranger's; its modules write their names into this file."""
    folder, ran = tmp_path / "stranger", tmp_path / "ran"
    folder.mkdir()
    for name in NAMES.split():
        code = f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError('hostile')\n"
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    return ran


def run(command: list[str], folder: Path) -> None:
    code = run_command(command, folder / "output", WAIT, environment=own_environment())
    assert code == 0, (folder / "output").read_text()


def start_tracker(folder: Path) -> None:
    run = TrackedRun({}, folder / "tracker", "name", None)
    with pytest.raises(RuntimeError, match="takes no arguments"):  # so far it came
        TrackerProcess("ppdist.common.writers:MetricWriter", run).close()


def start_metrics(folder: Path) -> None:
    with export_metrics(folder, ("127.0.0.1", 0)):
        pass


def start_ranks(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text("import typing, random, numpy, ppdist\n")
    words = ["--nproc_per_node", "2", "--log_dir", str(folder / "log"), str(script)]
    run([sys.executable, *script_words("launch"), *words], folder)


WAYS: dict[str, Callable[[Path], object]] = {
    "code": lambda folder: run(python("import typing, random, numpy, queue"), folder),
    "module": lambda folder: run(python_module("platform"), folder),
    "tracker": start_tracker,
    "metrics": start_metrics,
    "fleetrun": start_ranks,
    "doctor": lambda folder: check_software("CPU"),
}


@pytest.mark.parametrize("way", WAYS)
def test_modules_of_the_current_folder_do_not_run(way: str, ran: Path, tmp_path: Path) -> None:
    WAYS[way](tmp_path)
    assert not ran.exists(), ran.read_text()
