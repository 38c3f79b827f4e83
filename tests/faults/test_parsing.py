"""PPDIST_FAULT as a user writes it."""

import subprocess
import sys
import time

import pytest

from ppdist.engine.callbacks import TrainingRun
from tests.errors import raises
from tests.faults import clock, injector
from tests.faults import fault as faults
from tests.faults.fault import Fault, parse_faults


def test_faults_parse_in_order_with_values() -> None:
    found = parse_faults("kill@rank1:step7, slow=0.25@rank0:step3,nan@rank0:step3")
    assert [str(fault) for fault in found] == [
        "kill@rank1:step7",
        "slow=0.25@rank0:step3",
        "nan=1@rank0:step3",
    ]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode@rank0:step1", "'explode'"), ("kill@1:7", "KIND[=VALUE]@rankR:stepN"),
        ("kill=3@rank0:step1", "no value"), ("slow=fast@rank0:step1", "'fast'"),
        ("slow=-1@rank0:step1", "'-1'"), ("clock=inf@rank0:step1", "'inf'"),
        ("nan=0@rank0:step1", "'0'"), ("disk-full=1.5@rank0:step1", "'1.5'"),
        ("kill@rank0:step0", "step1"),
    ],
)  # fmt: skip
def test_invalid_fault_is_user_error(text, message) -> None:
    with raises("fault_invalid", message):
        parse_faults(text)


@pytest.fixture
def left(tmp_path):
    """What a rank that has made so many steps still has to expect of a PPDIST_FAULT."""

    def of(text: str, done_steps: int) -> list[str]:
        struck = injector.FaultInjector(parse_faults(text))
        struck.on_train_begin(TrainingRun(None, None, tmp_path, done_steps, 24))
        return [str(fault) for fault in struck.pending]

    return of


def test_fault_fires_once_even_repeated_or_combined(tmp_path, left) -> None:
    twice = "kill@rank0:step7,kill@rank0:step7"
    (first, second) = parse_faults(twice)
    assert left(twice, 0) == twice.split(",")
    faults.write_down(tmp_path, first)
    assert left(twice, 4) == ["kill@rank0:step7"]
    faults.write_down(tmp_path, second)
    assert left(twice, 4) == [] and len(faults.struck(tmp_path, 0)) == 2
    other = "nan=2@rank0:step9,kill@rank0:step7"  # written by whoever resumes
    assert left(other, 8) == ["nan=2@rank0:step9"]
    assert left(twice, 0) == twice.split(",")  # begins anew


def test_a_fault_of_a_rank_that_there_is_not_is_refused(left) -> None:
    with raises("fault_invalid", "kill@rank9:step1", "rank 9"):
        left("kill@rank9:step1", 0)


_MOVED = """
import sys, threading, time
from pathlib import Path
from tests.faults import clock, fault
clock.preload()
before, coarse = time.time(), time.monotonic()
clock.move(600)
print(round(time.time() - before), time.localtime() > time.localtime(before + 300))
threading.Event().wait(0.1)
fault.write_down(Path(sys.argv[1]), *fault.parse_faults("kill@rank1:step7"))
print(time.monotonic() - coarse < 60)
"""


@pytest.mark.skipif(clock.COMPILER is None, reason="no C compiler, cc")
def test_clock_jump_moves_the_process_and_no_recorded_fault(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MOVED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["600", "True", "True"], done.stderr
    (line,) = faults.struck(tmp_path, 1)
    assert abs(line["time"] - time.time()) < 300 and faults.struck(tmp_path, 0) == []


def test_every_kind_has_something_that_does_it() -> None:
    assert set(injector.ACTIONS) == set(faults.KINDS)
    assert all(str(Fault(kind, 0, 1, 2.0)).startswith(kind) for kind in faults.KINDS)
