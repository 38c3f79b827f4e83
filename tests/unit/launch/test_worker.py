"""The process that starts a rank's script and says how it ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ppdist.launch.worker import read_reports

# A launcher signals the group of a worker in the moment in which that starts its script.
SIGNALLED_AMID_THE_START = """
import os, signal, sys
from ppdist.common import child
from ppdist.launch import worker

def amid(number):
    return lambda: [os.kill(each, signal.SIGTERM) for each in (os.getppid(), os.getpid())]

child.ends_with_this = amid
sys.exit(worker.main())
"""


def test_a_signal_amid_the_start_reaches_the_script(tmp_path: Path) -> None:
    script = [sys.executable, "-c", "import time; time.sleep(50)"]
    orders = {"command": script, "log_dir": str(tmp_path), "restart": 0}
    (tmp_path / "job.json").write_text(json.dumps(orders))
    variables = {"PPDIST_EXIT_DIR": str(tmp_path), "PADDLE_TRAINER_ID": "1"}
    variables |= {"PADDLE_LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED_AMID_THE_START],
        env=os.environ | variables,
        capture_output=True,
        timeout=40,
    )
    assert (ended.returncode, ended.stderr) == (143, b"")
    (report,) = read_reports(tmp_path)
    assert report.code == -15 and report.seconds is not None
