"""The installed fleetrun, for real: it starts processes on this machine and their ends are judged.

Only the tests of collectives load Paddle in the ranks; the others need none there.
"""

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppdist.launch.options import STALE_VARIABLES
from tests.accelerator import plugin
from tests.ports import free_port
from tests.unit.launch.hosts import ALL_REDUCE, FLEETRUN, ROOT, write

TIMEOUT = 90.0  # seconds; a hang is a failed test


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and an environment without traces of another launch."""
    for name in (*STALE_VARIABLES, "PPDIST_EXIT_DIR", "PPDIST_LAUNCHER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    if not FLEETRUN.is_file():
        pytest.skip("ppdist is not installed in this Python (pip install -e .)")
    return tmp_path


@contextmanager
def started(*words: str, **streams) -> Iterator[subprocess.Popen]:
    """fleetrun, which does not outlive the test, nor does what it started."""
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([str(FLEETRUN), *words], **(defaults | streams))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def fleetrun(*words: str) -> subprocess.CompletedProcess:
    with started(*words) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate(timeout=40)
            logs = [f"{path}: {path.read_text()}" for path in Path("log").glob("workerlog*")]
            pytest.fail(f"fleetrun hangs\n{output}\n{errors}\n" + "\n".join(logs))
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(rank, 'is there')", "{} is there"),
        pytest.param(ALL_REDUCE, "sum 3.0 on rank {} of 2", marks=pytest.mark.slow),
    ],
    ids=["print", "gloo"],
)
def test_of_two_processes_only_rank_0_is_seen(code: str, said: str) -> None:
    ended = fleetrun("--nproc_per_node", "2", write(code))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [said.format(0)]
    assert "LAUNCH" not in ended.stdout + ended.stderr  # the lines of Paddle's launcher
    assert said.format(1) in Path("log/workerlog.1").read_text()
    assert sorted(path.name for path in Path("log").iterdir()) == ["workerlog.0", "workerlog.1"]


@pytest.mark.slow
def test_two_cards_of_a_plug_in_sum(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(plugin.build(folder)))
    code = f"{ALL_REDUCE}print(tensor.place, flush=True)\n"
    ended = fleetrun("--devices", f"{plugin.KIND}:1,0", write(code))
    assert ended.returncode == 0, ended.stderr
    assert f"fleetrun: 2 processes on {plugin.KIND} 1,0;" in ended.stderr
    assert ended.stdout.startswith("sum 3.0 ")
    assert f"Place({plugin.KIND}:1)" in ended.stdout
    assert f"Place({plugin.KIND}:0)" in Path("log/workerlog.1").read_text()


@pytest.mark.slow
def test_two_hosts_on_loopback_sum() -> None:
    ips, port = "--ips=127.0.0.2,127.0.0.3", str(free_port())
    script = write(ALL_REDUCE)
    common = (ips, "--start_port", port, "--nproc_per_node", "1")
    other = ("--host", "127.0.0.3", *common, "--log_dir", "log_b", script)
    with started(*other) as second:
        first = fleetrun("--host", "127.0.0.2", *common, "--log_dir", "log_a", script)
        output, errors = second.communicate(timeout=TIMEOUT)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + errors
    assert "sum 3.0 on rank 0" in first.stdout and "sum 3.0 on rank 1" in output


def test_an_exception_is_shown_once_with_its_rank() -> None:
    code = "def main():\n if rank == 1: raise RuntimeError('boom')\n time.sleep(60)\nrun(main)"
    ended = fleetrun("--nproc_per_node", "2", write(code))
    assert ended.returncode == 1
    assert "fleetrun: rank 1 failed first" in ended.stderr
    assert ended.stderr.count("RuntimeError: boom") == 1
    assert ended.stderr.count("Traceback (most recent") == 1


@pytest.mark.slow
def test_rank_0_writes_to_terminal_directly() -> None:
    code = """
print("terminal", sys.stdout.isatty(), sys.stderr.isatty())
for _ in range(3):
    time.sleep(0.2)
    print("now", time.time())
"""
    ours, theirs = pty.openpty()
    delays: list[float] = []
    with started("--nproc_per_node", "2", write(code), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            seen += piece
            times = re.findall(rb"now ([\d.]+)\r", seen)  # of the lines that are complete
            delays += [time.time() - float(at) for at in times[len(delays) :]]
        os.close(ours)
        assert process.wait(TIMEOUT) == 0
    assert b"terminal True True" in seen
    assert len(delays) == 3 and max(delays) < 0.5, (delays, seen)


@pytest.mark.parametrize("program", [[str(FLEETRUN)], [sys.executable, f"{ROOT}/tools/launch.py"]])
def test_cards_that_are_not_there_exit_2(program: list[str]) -> None:
    from ppdist.launch.cards import detect_cards

    if detect_cards():
        pytest.skip("this machine has cards")
    write("")
    command = [*program, "--selected_gpus", "0,1", "t.py", "-c", "a.yml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "ppdist: error: cards 0,1 were requested, but this machine has no visible GPU; to train on "
        "its CPU, type: fleetrun --nproc_per_node 2 t.py -c a.yml [no_cards]\n"
    )


def test_fleetrun_starts_without_importing_paddle() -> None:
    code = "import sys, ppdist.launch.cli; assert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
