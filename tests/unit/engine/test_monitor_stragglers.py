"""A rank that is slower than the others is named, once."""

import time
from types import SimpleNamespace

import paddle
import pytest

from ppdist.common.job import MIN_HOSTS_VARIABLE
from ppdist.distributed import comm, heartbeat
from ppdist.engine.clock import StepSeconds, Stopwatch
from ppdist.engine.monitor import HeartbeatCallback, StragglerMonitor
from tests.distributed import run_on_ranks
from tests.unit.engine.tiny import init_cpu, step_result


def steps(slow):
    """30 steps of two ranks, two comparisons; one sleeps before the sum of a step."""
    init_cpu()
    said: list[str] = []
    monitor = StragglerMonitor(SimpleNamespace(warning=said.append))
    for step in range(1, 31):
        watch = Stopwatch()
        time.sleep(0.03 if comm.rank() == slow else 0.0)
        comm.all_reduce_sum(paddle.to_tensor([1.0]))
        monitor.on_step_end(step, step_result(), 0.1, watch.stop(0.0))
    return said


def test_a_slow_rank_is_named_within_30_steps(record_property):
    first, second = run_on_ranks(2, "tests.unit.engine.test_monitor_stragglers:steps", 1, hosts=1)
    assert first == second and len(first) == 1
    (warning,) = first
    assert warning.startswith("straggler: rank 1 (host")
    record_property("warning", warning)


def test_brief_or_small_slowness_is_no_straggler(monkeypatch):
    pace = StragglerMonitor(None)
    assert pace.judge([1.0, 2.0]) == ""
    assert pace.judge([1.0, 1.1]) == ""
    assert pace.judge([2.0, 1.0]) == ""
    assert pace.judge([1.0, 2.0]) == ""
    monkeypatch.setattr(comm, "addresses", lambda: ["a", "b"])
    said = pace.judge([1.0, 2.0])
    assert "rank 1 (host b)" in said
    assert "2.0 times that of" in said
    assert pace.judge([1.0, 2.0]) == ""  # it was said


def test_ranks_are_compared_by_their_micro_batches(monkeypatch):
    """Of four, one has three times as many, and two have none: these are no measure."""
    told = [[], [], [], []]
    monkeypatch.setattr(comm, "world_size", lambda: 4)
    for own, counts, seconds in zip(told, (3, 1, 0, 0), (0.6, 0.2, 0.05, 0.05)):
        monkeypatch.setattr(comm, "all_gather", lambda each, own=own: own.append(each) or each)
        monitor = StragglerMonitor(None)
        for step in range(1, 16):
            timed = StepSeconds(1.0, seconds, 0.0)
            monitor.on_step_end(step, step_result(own_micro_batches=counts), 0.1, timed)
    seconds_W = [own[0].item() for own in told]
    assert seconds_W == pytest.approx([0.2, 0.2, 0.0, 0.0])
    monitor = StragglerMonitor(None)
    assert not monitor.judge(seconds_W) and not monitor.judge(seconds_W)


def test_equally_slow_stragglers_are_named_together(monkeypatch):
    monkeypatch.setattr(comm, "addresses", lambda: [*"aaabbb"])
    pace = StragglerMonitor(None)
    assert pace.judge([1.0, 1.0, 1.1, 2.1, 2.0, 1.0]) == ""
    assert "ranks 3-4 (host b)" in pace.judge([1.0, 1.0, 1.1, 2.0, 2.1, 2.0])
    assert "rank 5 (host b)" in pace.judge([1.0, 1.0, 1.1, 2.0, 2.1, 2.0])


def test_time_in_collectives_is_not_a_ranks_own():
    watch = Stopwatch()
    with heartbeat.Waiting("sum"):
        time.sleep(0.1)
    seconds = watch.stop(0.0)
    assert seconds.wall >= 0.1 and 0 <= seconds.compute <= seconds.wall - 0.1


def test_each_step_is_told_to_fleetrun(monkeypatch):
    told = []
    monkeypatch.setattr(heartbeat, "record_step", lambda **words: told.append(words))
    callback = HeartbeatCallback()
    for changes in ({}, {"finite": False}, {"finite": False, "searching": True}):
        watch = Stopwatch()
        with heartbeat.Waiting("sum"):
            time.sleep(0.02)
        callback.on_step_end(1, step_result(**changes), 0.1, watch.stop(0.001))
    assert [each["bad"] for each in told] == [False, True, False]  # the last looks for its scale
    for each in told:
        assert (each["loss"], each["images"], each["data_seconds"]) == (2.5, 8, 0.001)
        assert each["micro_batches"] == 1
        assert 0 < each["own_seconds"] <= each["step_seconds"] - 0.02


@pytest.mark.parametrize(
    ("seconds_W", "hosts", "speeds"),
    [
        ([0.1, 0.1, 0.2], None, "`distributed.shares` to [1, 1, 0.5]"),
        ([0.1, 0.0, 0.2], None, ""),  # what the second needs is not known
        ([0.1, 0.1, 0.2], "1", ""),  # a list is of one number of ranks
        ([0.1] * 16 + [0.2], None, ""),
    ],
)
def test_a_straggler_has_the_shares_that_fit_it(seconds_W, hosts, speeds, monkeypatch):
    monkeypatch.setattr(comm, "addresses", lambda: ["a"] * len(seconds_W))
    if hosts:
        monkeypatch.setenv(MIN_HOSTS_VARIABLE, hosts)
    monitor = StragglerMonitor(None)
    assert monitor.judge(seconds_W) == ""
    warning = monitor.judge(seconds_W)
    assert "straggler: rank" in warning
    assert speeds in warning if speeds else "distributed.shares" not in warning
