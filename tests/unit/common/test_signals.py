"""Signals that come while a program still imports what it needs."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.common.child import PIPE, start_here

ROOT = Path(__file__).resolve().parents[3]
# Runs a program up to the import of a module, and ends as the signals are held by then.
UNTIL = """
import os, runpy, signal, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            os._exit({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP} <= held)

wanted, script, *words = sys.argv[1:]
sys.meta_path.insert(0, Look())
sys.argv = [script, *words]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("ppdist.cli", ["tools/train.py"]),
        ("ppdist.cli", ["ppdist/__main__.py", "train"]),
        ("ppdist.cli", ["ppdist/__main__.py", "launch"]),
        ("ppdist.common.errors", ["tools/launch.py"]),
    ],
)
def test_signals_are_held_before_the_first_import(module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", UNTIL, module, *words]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 1


# What a command does when Ctrl-C comes -> the lines that it leaves.
INTERRUPTED = {
    "it works": ("press()", []),
    "a library makes another error of it": (
        "try: press()\n    except BaseException: raise ImportError('initialization failed')",
        [],
    ),
    "it has results": (
        "try: press()\n    except KeyboardInterrupt: forget_interrupt(); print('so far')\n"
        "    return INTERRUPTED",
        ["so far"],
    ),
    "it wants to go on, and a second comes": (
        "try: press()\n    except KeyboardInterrupt: press(); time.sleep(60)",
        [],
    ),
    "a thread works": ("threading.Thread(target=time.sleep, args=(60,)).start(); press()", []),
    "a child works": (
        "child = ForkedChild(lambda: time.sleep(60)); time.sleep(0.2); os.kill(child.pid, 2)\n"
        "    assert os.waitpid(child.pid, 0)[1] == 130 << 8; press()",
        [],
    ),
    "it is imported": ("sys.path.insert(0, sys.argv[1]); import pressing", []),
}
COMMAND = """
import os, sys, threading, time
from ppdist.common.child import ForkedChild
from ppdist.common.process import run
from ppdist.common.signals import INTERRUPTED, forget_interrupt

def press():
    os.kill(os.getpid(), 2)
    time.sleep(60)

def main():
    {}

run(main)
"""


@pytest.mark.parametrize("case", INTERRUPTED)
def test_ctrl_c_ends_a_command_with_one_line(case: str, tmp_path: Path) -> None:
    (tmp_path / "pressing.py").write_text("import os; os.kill(os.getpid(), 2); open('never', 'w')")
    does, leaves = INTERRUPTED[case]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND.format(does), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
        # A shell that starts the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout.split("\n")[:-1] == leaves
    assert ended.stderr == "\nppdist: stopped by Ctrl-C\n"


@pytest.mark.parametrize("early", [False, True], ids=["while it works", "before it listens"])
def test_ctrl_c_ends_a_child_of_ours_that_is_no_launcher(early: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    script = COMMAND.format("print('works', flush=True); time.sleep(60)")
    if early:
        script = f"import os, signal; os.kill(os.getpid(), signal.SIGINT)\n{script}"
    command = [sys.executable, "-c", script]
    try:
        child = start_here(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout is not None and child.stdout.readline() == ("" if early else "works\n")
    if not early:
        child.send_signal(signal.SIGINT)
    errors = child.communicate(timeout=60)[1]
    assert (child.returncode, errors) == (130, "\nppdist: stopped by Ctrl-C\n")


@pytest.mark.parametrize("module", ["ppdist.cli", "argparse"])
def test_ctrl_c_while_a_command_is_imported_is_one_line(module: str) -> None:
    code = UNTIL.replace("os._exit(", "os.kill(os.getpid(), signal.SIGINT); bool(")
    ended = subprocess.run(
        [sys.executable, "-c", code, module, "ppdist/__main__.py", "data", "check"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "\nppdist: stopped by Ctrl-C\n")
