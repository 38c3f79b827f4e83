"""One folder, one training: the second is refused while the first lives, however it ends."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.common.errors import ConfigError
from ppdist.common.files import hold, is_held
from tests.errors import raises

ROOT = Path(__file__).resolve().parents[3]
# Holds the lock and has a child, as a rank has workers, that outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from ppdist.common.files import hold, is_held
hold(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path / "run"`, and the number of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"{tmp_path / 'run'}"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_second_training_is_refused_until_first_dies(holder, tmp_path):
    process, child = holder
    told = rf"another training writes there \(process {process.pid} on host .+ since \d{{4}}-"
    assert is_held(tmp_path / "run") and not is_held(tmp_path)
    with pytest.raises(ConfigError, match=told):
        hold(tmp_path / "run", seconds=0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Path(f"/proc/{child}").exists()  # the copy has not taken the lock over
    assert not is_held(tmp_path / "run")
    assert hold(tmp_path / "run") == []
    assert hold(tmp_path / "run" / ".." / "run") == []  # its own
    assert f'"pid": {os.getpid()}' in (tmp_path / "run" / "run.lock").read_text()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    (warning,) = hold(tmp_path / "run")
    assert "No locks available" in warning and "second training" in warning


def test_unwritable_lock_folder_is_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("folder_unwritable"):
        hold(tmp_path / "file")
