"""Paddle's launcher, changed so that it reacts only to the first signal.

Schedulers send a signal to all processes of a job, so the launcher gets it both from them and from
fleetrun; at the second one it would cut short the ranks' grace period.  Here it reacts to the first
signal only; fleetrun ends it in another way if necessary.

    python paddle_launcher.py ARGUMENTS   as python -m paddle.distributed.launch ARGUMENTS
"""

import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

_install = signal.signal
_heard: list[int] = []


def install_once(number: int, handler: Any) -> Any:
    """Replaces signal.signal: handlers are called only for the first signal of any kind."""
    if not callable(handler):
        return _install(number, handler)

    def handle_first(number: int, frame: FrameType | None) -> None:
        if not _heard:
            _heard.append(number)
            handler(number, frame)

    return _install(number, handle_first)


if __name__ == "__main__":
    # As with -m: modules in this file's folder must not hide others.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != folder]
    signal.signal = install_once  # type: ignore[assignment]
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
