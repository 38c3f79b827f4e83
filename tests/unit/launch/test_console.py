"""Lines for the user on a terminal that is blocked for a while."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.launch.hosts import FLEETRUN, SAVES_AT_SIGTERM, wait_for, write

SAYS_MUCH = """
import sys
from ppdist.launch.console import finish, say
for number in range(20_000):
    say(f"line {number} " + 100 * "x")
print("said", flush=True)
sys.stdin.readline()
finish()
sys.exit(7)
"""


@pytest.fixture
def full() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that takes no more; a test closes the end that it writes to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    yield reading, writing
    os.close(reading)


def test_a_blocked_terminal_holds_up_no_speaker(full: tuple[int, int]) -> None:
    command = [sys.executable, "-c", SAYS_MUCH]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": full[1]}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "said\n"
        os.close(full[1])
        process.stdin.close()
        heard = b""
        while piece := os.read(full[0], 65536):
            heard += piece
    assert process.returncode == 7
    assert b"fleetrun: line 999 " in heard and b"line 19999 " not in heard, "the queue has an end"


def test_a_blocked_terminal_leaves_the_exit_code(
    full: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {name: value for name, value in os.environ.items() if "PADDLE" not in name}
    script = write(SAVES_AT_SIGTERM.replace('print("saved", flush=True)', 'Path("saved").touch()'))
    process = subprocess.Popen([FLEETRUN, script], stderr=full[1], env=environment)
    os.close(full[1])
    wait_for(lambda: Path("ready0").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75 and Path("saved").exists()
