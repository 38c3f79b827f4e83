"""Processes forked from one that has imported Paddle and ppdist, and done nothing else.

The imports would be three seconds of every process; this is one process for all tests of one
pytest.  So what is forked shares its hash seed; ranks of tools/launch.py do not.
"""

import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = ROOT / "tests" / "third_party"  # packages of others, see `clean_environment`

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ppdist.engine.build"])


def start(
    target: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    cwd: Path = ROOT,
    *,
    anew: bool = False,
) -> BaseProcess:
    """A process, in a group of its own, that calls target(*arguments) and writes to these files.

    Args: anew: it imports Paddle itself, in this environment, instead of being forked.
    """
    files = (str(out), str(err))
    context = multiprocessing.get_context("spawn") if anew else _context
    process = context.Process(target=_begin, args=(target, arguments, environment, files, cwd))
    # What it is forked from starts with the first of them, and in this environment: one thread, as
    # those that are there do not live on in a fork.
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):
        process.start()
    return process


def _begin(
    target: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    files: tuple[str, str],
    cwd: Path,
) -> None:
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    listed = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in listed if path and path not in sys.path]
    target(*arguments)


def end(process: BaseProcess) -> None:
    """Kills it and all that it has started, if it is still there."""
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def clean_environment(packages: Path | None = None) -> dict[str, str]:
    """Of one thread, without a job's variables.

    Args: packages: a folder of packages that count as installed; None: no other ones.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
    path = os.pathsep.join(map(str, filter(None, (ROOT, packages))))
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run_tool(
    name: str,
    *arguments: object,
    cwd: Path = ROOT,
    seconds: float = 300,
    packages: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs tools/<name>.py as a command; nothing it prints may be a traceback.

    Args: packages: see `clean_environment`.
    """
    command = [str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start(_program, (command,), clean_environment(packages), out, err, cwd)
        process.join(seconds)
        code = process.exitcode
        end(process)
        texts = [file.read_text(errors="replace") for file in (out, err)]
    if code is None:
        raise subprocess.TimeoutExpired(command, seconds, *texts)
    assert "Traceback" not in texts[0] + texts[1], texts[1] + texts[0]
    return subprocess.CompletedProcess(command, code, *texts)


def exit_code_of(name: str, *arguments: object) -> int:
    """Runs tools/<name>.py in this process."""
    command = [str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    with patch.object(sys, "argv", command), patch.object(sys, "path", [*sys.path]):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as ended:
            return ended.code or 0
    raise AssertionError("a command ends by an exit code")


def run_here(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`run_tool` in this process, which has imported what takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code_of(name, *arguments)
    assert "Traceback" not in out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_on_two_ranks(
    folder: Path, tool: str, *arguments: object, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a tool through tools/launch.py on two gloo ranks; logs go to folder/log_<tool>."""
    words = ("--nproc_per_node", 2, "--log_dir", folder / f"log_{tool}", ROOT / f"tools/{tool}.py")
    return run_tool("launch", *words, *arguments, cwd=folder, packages=packages)


def _program(command: list[str]) -> None:
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed."""
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
