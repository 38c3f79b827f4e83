"""Benchmarks follow the code that they measure."""

from benchmarks import startup
from ppdist.engine import build


def test_the_parts_of_a_start_are_functions():
    assert [name for name in startup.STEPS if not callable(getattr(build, name, None))] == []
