"""The planner's model: formulas by hand, parts that add up."""

import math
import random
from dataclasses import replace

import pytest

from ppdist.planner.what_if import (
    ANY_LINK,
    PARTS,
    Cluster,
    Job,
    Link,
    all_reduce_seconds,
    all_reduces,
    clusters_up_to,
    epochs_needed,
    failure_factor,
    input_seconds,
    network_seconds,
    predict,
    ring_seconds,
    slowest_of,
    step_time,
    tree_seconds,
    what_ifs,
)

GIGABIT = 1e9 / 8
JOB = Job(
    fixed_seconds=0.01,
    image_seconds=0.02,
    batch=8,
    jitter=0.05,
    parallel_seconds=0.004,
    parameters=50e6,
    sync_bn_layers=100,
    images=100_000,
    epochs=10.0,
    reference_batch=64,
    critical_batch=1000.0,
    evaluation_images=5000,
    evaluation_rate=50.0,
    scoring_seconds=3.0,
    startup_seconds=20.0,
)


def cluster(hosts: int, cards: int, gigabits: float = 25.0) -> Cluster:
    return Cluster(hosts, cards, Link(2e-6, 100e9), Link(20e-6, gigabits * GIGABIT))


def flat(cards: int) -> Cluster:
    return Cluster(1, cards, ANY_LINK, ANY_LINK)


# Network


def test_a_ring_and_a_tree_take_what_formulas_say():
    link = Link(1e-5, 1e9)
    assert ring_seconds(8, 64e6, link) == pytest.approx(14e-5 + 2 * 7 / 8 * 0.064)
    assert tree_seconds(8, 64e6, link) == pytest.approx(6e-5 + 0.128)


@pytest.mark.parametrize(
    ("millions", "milliseconds"),
    [(7.9, (38, 15, 4, 2)), (23.5, (113, 45, 11, 6)), (52.2, (251, 100, 25, 12.5))],
)
def test_gradients_across_hosts_take_a_known_time(millions, milliseconds):
    for gigabits, expected in zip((10, 25, 100, 200), milliseconds):
        joined = Cluster(4, 8, ANY_LINK, Link(0.0, gigabits * GIGABIT))
        found = all_reduces(4e6 * millions, joined)["two levels"]
        assert 1000 * found == pytest.approx(expected, rel=0.04, abs=0.5)


def test_two_levels_beat_a_flat_ring():
    found = all_reduces(1e3, cluster(4, 8))
    assert found["two levels"] < found["ring"] / 5
    assert all_reduce_seconds(1e9, cluster(1, 1)) == 0
    one_each = all_reduces(4e6, cluster(4, 1))
    assert one_each["ring"] == pytest.approx(6 * 20e-6 + 1.5 * 4e6 / (25 * GIGABIT))


# Step


def test_the_slowest_of_n_is_that_of_the_tables():
    for count, expected in {
        1: 0,
        2: 0.56,
        4: 1.03,
        8: 1.42,
        16: 1.77,
        32: 2.07,
        64: 2.345,
        256: 2.83,
    }.items():
        assert slowest_of(count) == pytest.approx(expected, abs=0.01)


def test_a_step_by_hand():
    step = step_time(JOB, cluster(4, 8))
    assert step.compute == pytest.approx(0.17)
    assert step.stragglers == pytest.approx(0.05 * 0.17 * slowest_of(32))
    assert step.parallel == 0.004
    reduced = 2 * math.log2(8) * 2e-6 + 2 * math.log2(4) * 20e-6
    assert step.sync_bn == pytest.approx(2 * 100 * reduced)
    alone = step_time(JOB, cluster(1, 1))
    assert alone.seconds == alone.compute == pytest.approx(0.17)


def test_the_network_hides_behind_backward():
    slow, fast = cluster(4, 8, 10), cluster(4, 8, 100)
    last_bucket = all_reduce_seconds(1 << 20, fast)
    assert network_seconds(JOB, fast) == pytest.approx(last_bucket)
    assert network_seconds(JOB, slow) == pytest.approx(
        all_reduce_seconds(200e6, slow) - 0.9 * 2 / 3 * 0.17
    )
    unhidden = replace(JOB, overlap=0.0)
    assert network_seconds(unhidden, slow) == pytest.approx(all_reduce_seconds(200e6, slow))
    half = network_seconds(replace(unhidden, gradient_bytes=2), slow)
    assert half == pytest.approx(network_seconds(unhidden, slow) / 2, rel=0.01)


def test_the_slowest_reader_feeds_the_step():
    assert input_seconds(JOB, cluster(4, 8)) == 0
    for key, seconds in (
        ("card_input", 8 / 40),
        ("host_input", 64 / 40),
        ("total_input", 256 / 40),
    ):
        job = replace(JOB, **{key: 40.0})
        assert input_seconds(job, cluster(4, 8)) == pytest.approx(seconds)
        step = step_time(job, cluster(4, 8))
        assert step.compute + step.stragglers + step.input == pytest.approx(
            max(seconds, 0.1876), 1e-3
        )
    assert step_time(replace(JOB, card_input=1e6), cluster(4, 8)).input == 0


def test_accumulation_repeats_arithmetic_alone():
    one, four = step_time(JOB, cluster(4, 8)), step_time(replace(JOB, accumulate=4), cluster(4, 8))
    assert four.compute == pytest.approx(4 * one.compute)
    assert four.stragglers == pytest.approx(2 * one.stragglers)
    assert four.network == one.network and four.parallel == one.parallel
    assert four.sync_bn == pytest.approx(4 * one.sync_bn)


# Run


def test_epochs_grow_as_mlperf_reference_points():
    job = replace(JOB, epochs=3.70, reference_batch=0, critical_batch=1830.0)
    assert epochs_needed(job, 256) == pytest.approx(3.70 + 0.00202 * 256, abs=0.01)
    assert epochs_needed(job, 2560) == pytest.approx(8.87, abs=0.02)
    whole = replace(job, whole_epochs=True)
    assert [epochs_needed(whole, batch) for batch in (256, 512, 1024)] == [4, 5, 6]
    assert epochs_needed(JOB, 64) == 10
    assert epochs_needed(JOB, 1000) == pytest.approx(10 * 2 / 1.064)
    assert epochs_needed(replace(JOB, critical_batch=None), 4096) == 10


@pytest.mark.parametrize("hosts, cards", [(1, 1), (1, 4), (1, 8), (4, 8)])
def test_the_parts_of_the_hours_add_up(hosts, cards):
    job = replace(JOB, card_input=45.0)
    found = predict(job, cluster(hosts, cards))
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == pytest.approx(found.hours)
    steps = found.epochs * math.ceil(100_000 / found.total_batch)
    evaluations = math.ceil(found.epochs) * (5000 / 50 / (hosts * cards) + 3)
    assert 3600 * found.hours == pytest.approx(steps * found.step.seconds + evaluations + 20)
    assert found.gpu_hours == pytest.approx(found.hours * hosts * cards)
    assert found.images_per_second == pytest.approx(found.total_batch / found.step.seconds)


def test_evaluation_on_one_card_does_not_shrink():
    on_one = replace(JOB, sharded_evaluation=False)
    ratio = [predict(on_one, flat(n)).parts["evaluation"] for n in (1, 32)]
    assert ratio[1] >= ratio[0]
    assert predict(JOB, flat(32)).parts["evaluation"] < 0.2 * ratio[1]


@pytest.mark.parametrize(
    ("limit", "changes", "gigabits"),
    [
        ("compute", {"jitter": 0.0, "sync_bn_layers": 0}, 100),
        ("stragglers", {"jitter": 0.3}, 100),
        ("input", {"card_input": 20.0}, 100),
        ("network", {}, 1),
        ("sync_bn", {"sync_bn_layers": 1000}, 100),
        ("parallel", {"parallel_seconds": 0.1}, 100),
        ("evaluation", {"sharded_evaluation": False}, 100),
        ("epochs", {"critical_batch": 200.0}, 100),
        ("startup", {"startup_seconds": 3600.0}, 100),
    ],
)
def test_each_limit_is_named_where_it_bites(limit, changes, gigabits):
    job = replace(JOB, critical_batch=None, startup_seconds=0.0)
    if limit != "evaluation":
        job = replace(job, evaluation_images=0)
    assert predict(replace(job, **changes), cluster(4, 8, gigabits)).limit == limit


def test_what_would_help_most_comes_first():
    slow = cluster(4, 8, 1)
    before = predict(JOB, slow)
    changes = what_ifs(JOB, slow)
    assert [found.hours for _, found in changes] == sorted(found.hours for _, found in changes)
    found = dict(changes)
    assert {"bfloat16 gradients", "a link twice as fast between hosts"} & set(list(found)[:3])
    assert found["bfloat16 gradients"].step.compute == before.step.compute
    assert found["bfloat16 gradients"].hours < before.hours
    assert found["no SyncBN"].step.sync_bn == 0
    assert "twice the loader workers" not in found and "evaluation on all cards" not in found
    alone = dict(what_ifs(replace(JOB, card_input=20.0), cluster(1, 1)))
    assert set(alone) == {"twice the loader workers", "half as many evaluations",
                          "twice the batch per card", "half the batch per card"}  # fmt: skip


def test_cards_double_inside_a_host_then_hosts_do():
    names = [str(found) for found in clusters_up_to(cluster(6, 8))]
    assert names == ["1", "2", "4", "8", "2 x 8", "4 x 8", "6 x 8"]
    assert [str(found) for found in clusters_up_to(cluster(1, 1))] == ["1"]


# Failures


def test_failures_cost_what_drawing_them_costs():
    """A day's work in pieces of half an hour, on 16 hosts of which each fails once in 48 hours."""
    job = replace(
        JOB, host_hours=48.0, away_seconds=300.0, restart_seconds=60.0, checkpoint_seconds=20.0
    )
    draw, between, spent, pieces = random.Random(0), 3600 * 48 / 16, 0.0, 4000
    for _ in range(pieces):
        while (failed := draw.expovariate(1 / between)) < 1800 + 20:
            while (again := draw.expovariate(1 / between)) < 360:
                spent += again
            spent += failed + 360
        spent += 1800 + 20
    assert spent / (pieces * 1800) == pytest.approx(failure_factor(job, 16, 1800), rel=0.02)


def test_who_goes_on_does_not_wait_for_the_lost_host():
    waits = replace(JOB, host_hours=24.0, away_seconds=3600.0, restart_seconds=60.0)
    goes_on = replace(waits, goes_on=True)
    assert failure_factor(waits, 1, 600) == failure_factor(goes_on, 1, 600)  # nobody is left
    found = failure_factor(goes_on, 16, 600)
    # An hour in 25 without a host, two restarts and half of ten minutes each hour and a half.
    assert found == pytest.approx(25 / 24 * (1 + (60 + 60 + 300) / 5400), rel=0.01)
    assert failure_factor(waits, 16, 600) > 1.9
    assert failure_factor(JOB, 16, 600) == 1


def test_a_published_run_of_2048_hosts_leaves_minutes_for_each_failure():
    """Llama 3 405B: 466 interruptions in 54 days, above 90 % effective time (arXiv:2407.21783)."""
    host = 54 * 24 / 466 * 2048
    quick = replace(JOB, host_hours=host, restart_seconds=600.0)
    slow = replace(quick, restart_seconds=900.0)
    assert 1 / failure_factor(quick, 2048, 600) > 0.90 > 1 / failure_factor(slow, 2048, 600)


def test_shares_by_speed_shorten_the_wait_for_a_slow_card():
    cluster = Cluster(1, 3, ANY_LINK, ANY_LINK)
    job = Job(0.1, 0.0, batch=1, accumulate=5, speeds=(1.0, 1.0, 0.5))
    assert step_time(job, cluster).compute == pytest.approx(0.5)
    assert step_time(job, cluster).stragglers == pytest.approx(0.5)  # 5 of 0.2 s
    shared = step_time(replace(job, by_speed=True), cluster)  # 6, 6 and 3
    assert shared.stragglers == pytest.approx(0.1)
    assert "micro-batches by speed (distributed.shares)" in dict(what_ifs(job, cluster))
