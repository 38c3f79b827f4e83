"""Fixtures every test may use.

What many tests do has one place: errors are expected by tests/errors.raises, tools run by
tests/forked (here, or as a process), tiny runs configured by tests/project.write_config.
"""

import gc
import inspect
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common.signals import STOP_SIGNALS
from tests.distributed import RETRIED


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference values beside the checkout; where they are absent the test is skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "parity").is_dir():
        pytest.skip("the reference values that stand beside the checkout are not here")
    return folder


# Thousands of tests leave much that lives on, models and Paddle's programs: with Python's own
# thresholds a tenth of their time goes into searching it for garbage again and again.  What is
# imported and collected before the first of them is not searched at all.
gc.set_threshold(50_000, 20, 20)
gc.disable()

# A run waits for its disk at each checkpoint, milliseconds for each file.  No test cuts the power;
# those of the order in which files reach the disk watch the calls.
os.fsync = lambda handle: None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of long files first, so that no worker waits for another that ends with one."""
    long = (
        "integration", "deploy", "export", "engine", "launch", "verify", "faults", "report", "viz",
    )  # fmt: skip
    items.sort(key=lambda item: item.path.parent.name not in long)


_ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of slow tests is not imported where none of them is asked for: that takes seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return bool(_ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Of a slow function no test is made where none is asked for."""
    if collector.config.option.markexpr != "not slow" or not inspect.isfunction(obj):
        return None
    marks = getattr(obj, "pytestmark", ())
    return [] if any(mark.name == "slow" for mark in marks) else None


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What a test ignores or holds back, the processes of later tests would, too."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts what tests/distributed.py ran once more, so that a real fault cannot hide there."""
    found = [each.message for each in terminalreporter.stats.get("warnings", ())]
    retried = [message for message in found if RETRIED in message]
    terminalreporter.line(f"{len(retried)} runs on several ranks were retried: {RETRIED}")
