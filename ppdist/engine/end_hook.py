"""The hook at the end of a training: `log.on_end`, a command or a URL that gets the summary."""

import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

from ppdist.common import process
from ppdist.common.child import output_of, own_environment
from ppdist.common.job import RESTART_VARIABLE, hosts_change, launched_rank
from ppdist.common.records import summarise_results

# A stopped run has 28 s in total to save and exit (launch/worker.py).
_SECONDS, _STOPPED_SECONDS = 30.0, 5.0
_OUTCOMES = {0: "finished", process.STOPPED: "stopped"}


class EndHook:
    """The context of a training run, on each rank; rank 0 calls the hook when it ends.

    A hook that fails, or exceeds its time limit, only causes a warning.

    Attributes:
        status: exit code of the run, unless the context is left by an exception.
        has_results: whether the records in output_dir are those of this run.
    """

    status = 0
    has_results = False

    def __init__(self, target: str | None, output_dir: Path, command: Sequence[str]) -> None:
        """
        Args:
            target: `log.on_end`; None: nothing is called.
            command: the command that started the run, for the summary.
        """
        self._target, self._output_dir, self._command = target, output_dir, command
        self._began = time.monotonic()

    def __enter__(self) -> "EndHook":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # If an attempt ends because hosts leave or join, the run has not ended.
        if not self._target or launched_rank() != 0 or hosts_change():
            return
        try:
            call_hook(self._target, self._summarise(error))
        except Exception as problem:
            process.warn(f"log.on_end: {type(problem).__name__}: {problem}")

    def _summarise(self, error: BaseException | None) -> dict[str, Any]:
        exit_code, code, message = self.status, None, None
        if error is not None:
            exit_code, failure = process.describe_end(error)
            code, message = failure.code or None, failure.message or None
        return {
            "outcome": _OUTCOMES.get(exit_code, "failed"),
            "exit_code": exit_code,
            "code": code,
            "message": message,
            "output_dir": str(self._output_dir.absolute()),
            "host": socket.gethostname(),
            "command": shlex.join(self._command),
            "seconds": round(time.monotonic() - self._began, 1),
            "restarts": int(os.environ.get(RESTART_VARIABLE) or 0),
            **(summarise_results(self._output_dir) if self.has_results else {}),
        }


def call_hook(target: str, summary: Mapping[str, Any]) -> None:
    """Passes a summary to a command or a URL.

    Raises: OSError: the command or request failed, or took too long.
    """
    content = json.dumps(summary)  # ASCII, whatever the locale of a command
    seconds = _STOPPED_SECONDS if summary["outcome"] == "stopped" else _SECONDS
    if re.match(r"https?://", address := os.path.expandvars(target)):
        _post(address, content.encode(), seconds)
    else:
        _run(target, content, seconds)


def _post(address: str, data: bytes, seconds: float) -> None:
    problems: list[Exception] = [TimeoutError(f"no answer in {seconds:.0f} s")]

    def post() -> None:
        try:
            # A Request with an explicit header: services refuse urllib's default, the content type
            # of a form.
            request = Request(address, data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=seconds):
                problems.clear()
        except Exception as error:
            problems[:] = [error]

    # A DNS lookup has no timeout, so it runs in a daemon thread, which need not be joined.
    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(seconds)
    for problem in problems:
        raise OSError(f"{type(problem).__name__}: {problem}")


def _run(command: str, content: str, seconds: float) -> None:
    result = output_of(["/bin/sh", "-c", command], seconds, own_environment(), content)
    if result is None:
        raise TimeoutError(f"the command took longer than {seconds:.0f} s")
    exit_code, _, errors = result
    if exit_code:
        last_line = (errors.strip().splitlines() or [""])[-1]
        raise OSError(f"the command ended with exit code {exit_code}: {last_line}")
