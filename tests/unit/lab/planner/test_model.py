"""The planner's model: formulas by hand, parts that add up."""

import math
from dataclasses import replace

import pytest

from ppdist.lab.planner.model import (
    Cluster,
    Job,
    Link,
    all_reduce_seconds,
    clusters_up_to,
    network_seconds,
    predict,
    slowest_of,
    step_time,
)

GIGABIT = 1e9 / 8
JOB = Job(
    fixed_seconds=0.01,
    image_seconds=0.02,
    batch=8,
    jitter=0.05,
    parallel_seconds=0.004,
    parameters=50e6,
    images=100_000,
    epochs=10.0,
)


def cluster(hosts: int, cards: int, gigabits: float = 25.0) -> Cluster:
    return Cluster(hosts, cards, Link(20e-6, gigabits * GIGABIT))


# Network


@pytest.mark.parametrize(
    ("millions", "milliseconds"),
    [(7.9, (38, 15, 4, 2)), (23.5, (113, 45, 11, 6)), (52.2, (251, 100, 25, 12.5))],
)
def test_gradients_across_hosts_take_a_known_time(millions, milliseconds):
    for gigabits, expected in zip((10, 25, 100, 200), milliseconds):
        joined = Cluster(4, 8, Link(0.0, gigabits * GIGABIT))
        seconds = all_reduce_seconds(4e6 * millions, joined)
        assert 1000 * seconds == pytest.approx(expected, rel=0.04, abs=0.5)


def test_one_host_sends_nothing():
    assert all_reduce_seconds(1e9, cluster(1, 8)) == network_seconds(JOB, cluster(1, 8)) == 0
    expected = 6 * 20e-6 + 1.5 * 4e6 / (25 * GIGABIT)
    assert all_reduce_seconds(4e6, cluster(4, 8)) == pytest.approx(expected)


# Step


def test_the_slowest_of_n_is_that_of_the_tables():
    expected = {1: 0, 2: 0.56, 4: 1.03, 8: 1.42, 16: 1.77, 32: 2.07, 64: 2.345, 256: 2.83}
    for count, deviations in expected.items():
        assert slowest_of(count) == pytest.approx(deviations, abs=0.01)


def test_a_step_by_hand():
    step = step_time(JOB, cluster(4, 8))
    assert step.compute == pytest.approx(0.17)
    assert step.stragglers == pytest.approx(0.05 * 0.17 * slowest_of(32))
    assert step.parallel == 0.004
    alone = step_time(JOB, cluster(1, 1))
    assert alone.seconds == alone.compute == pytest.approx(0.17)


def test_the_network_hides_behind_backward():
    slow, fast = cluster(4, 8, 10), cluster(4, 8, 100)
    last_bucket = all_reduce_seconds(1 << 20, fast)
    assert network_seconds(JOB, fast) == pytest.approx(last_bucket)
    whole = all_reduce_seconds(200e6, slow)
    assert network_seconds(JOB, slow) == pytest.approx(whole - 0.9 * 2 / 3 * 0.17)
    assert network_seconds(replace(JOB, overlap=0.0), slow) == pytest.approx(whole)


def test_a_slow_loader_is_waited_for():
    step = step_time(replace(JOB, card_input=20.0), cluster(4, 8))
    assert step.compute + step.stragglers + step.input == pytest.approx(8 / 20)
    assert step_time(JOB, cluster(4, 8)).input == 0
    assert step_time(replace(JOB, card_input=1e6), cluster(4, 8)).input == 0


@pytest.mark.parametrize(
    ("limit", "changes", "gigabits"),
    [
        ("compute", {"jitter": 0.0}, 100),
        ("stragglers", {"jitter": 0.3}, 100),
        ("input", {"card_input": 20.0}, 100),
        ("network", {}, 1),
        ("parallel", {"parallel_seconds": 0.1}, 100),
    ],
)
def test_each_limit_is_named_where_it_bites(limit, changes, gigabits):
    assert step_time(replace(JOB, **changes), cluster(4, 8, gigabits)).limit == limit


# Training


def test_hours_and_rates_are_those_of_the_steps():
    prediction = predict(JOB, cluster(4, 8))
    assert prediction.total_batch == 256
    steps = 10 * math.ceil(100_000 / 256)
    assert 3600 * prediction.hours == pytest.approx(steps * prediction.step.seconds)
    assert prediction.gpu_hours == pytest.approx(32 * prediction.hours)
    assert prediction.images_per_second == pytest.approx(256 / prediction.step.seconds)
    assert prediction.efficiency == pytest.approx(0.17 / prediction.step.seconds)
    assert predict(replace(JOB, images=0), cluster(4, 8)).hours == 0


def test_cards_double_inside_a_host_then_hosts_do():
    names = [str(joined) for joined in clusters_up_to(cluster(6, 8))]
    assert names == ["1", "2", "4", "8", "2 x 8", "4 x 8", "6 x 8"]
    assert [str(joined) for joined in clusters_up_to(cluster(1, 1))] == ["1"]
