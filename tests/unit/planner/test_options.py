"""What tools/plan.py makes of measured rows: they come back, and nothing is assumed unsaid."""

import argparse
import json
from dataclasses import replace

import pytest

from ppdist.common.errors import ConfigError
from ppdist.planner import tables
from ppdist.planner.options import add_cluster, add_job, add_rows, question
from ppdist.planner.what_if import (
    Cluster,
    Job,
    Link,
    epochs_needed,
    network_seconds,
    predict,
    step_time,
    what_ifs,
)
from tests.errors import raises

SLOW = ["--parameters", "50", "--sync-bn", "150", "--inside-gbytes", "2"]


def ask(*words):
    parser = argparse.ArgumentParser()
    for add in (add_rows, add_cluster, add_job):
        add(parser)
    return question(parser.parse_args([str(word) for word in words]))


def milliseconds(asked, cards, batch):
    on = replace(asked.cluster, hosts=1, cards=cards)
    return 1000 * step_time(replace(asked.job, batch=batch), on).seconds


@pytest.mark.parametrize("more", [[], SLOW, [*SLOW, "--parallel-ms", "7"]])
@pytest.mark.parametrize(
    "rows", [{(8, 8): 300}, {(1, 8): 250, (2, 8): 290}, {(1, 8): 250, (1, 16): 470, (2, 8): 310}]
)
def test_a_row_that_is_asked_for_comes_back(rows, more):
    words = [f"{cards}x{batch}={ms}" for (cards, batch), ms in rows.items()]
    if len(rows) > 1:
        more = more[:-2] if "--parallel-ms" in more else more  # the rows tell it
    asked = ask("--rows", *words, "--cards", 8, "--batch", 8, *more)
    for (cards, batch), ms in rows.items():
        assert milliseconds(asked, cards, batch) == pytest.approx(ms, rel=1e-6)


def test_one_card_waits_for_no_slowest():
    asked = ask("--rows", "8x8=300", "--cards", 8)
    assert milliseconds(asked, 1, 8) == pytest.approx(300 / (1 + 0.096 * 1.4236), rel=1e-4)
    assert "no fixed cost of several cards" in "\n".join(asked.assumed)
    alone = ask("--rows", "8x8=300", "--cards", 1)
    assert milliseconds(alone, 1, 8) == milliseconds(asked, 1, 8)


def test_an_assumed_jitter_gives_way_to_rows():
    asked = ask("--rows", "1x8=250", "2x8=255", "--cards", 2)
    assert milliseconds(asked, 2, 8) == pytest.approx(255)
    assert 0.03 < asked.job.jitter < 0.0355
    assert "the rows leave room for 3.4 % only" in "\n".join(asked.assumed)


def test_a_row_that_is_missed_is_named():
    asked = ask("--rows", "1x8=250", "2x8=255", "--cards", 2, "--jitter", 0.096)
    assert "1x8 comes out -1.7 % off" in asked.assumed[-1]


def test_a_row_faster_than_its_network_is_refused():
    with raises("rows_do_not_fit", "8x8=300 ms"):
        ask("--rows", "8x8=300", "--cards", 8, "--parameters", 500, "--inside-gbytes", 1)


def scaling(folder, ranks, device="cpu"):
    """A report of one and several ranks: 590 ms alone, 41 ms more for the gradients of two."""
    result = {}
    for count in ranks:
        reduced = {"gradient_all_reduce_seconds": 0.041} if count > 1 else {}
        seconds = 0.59 if count == 1 else 0.637
        variant = {"images_per_step": 4 * count, "step_seconds": seconds, "seconds": {"data": 0.0}}
        result[str(count)] = {
            "images_per_second": 4 * count / seconds,
            "last_round": {"parameters": 7.9e6, "variants": {"base": variant}, **reduced},
        }
    path = folder / "cpu.json"
    machine = {"ranks": max(ranks), "device": device}
    path.write_text(json.dumps({"what": "scaling", "machine": machine, "result": result}))
    return path


def test_cpu_ranks_have_the_measured_link(tmp_path):
    asked = ask("--benchmark", scaling(tmp_path, (1, 2)), "--cards", 2)
    step = step_time(asked.job, asked.cluster)
    assert step.network == pytest.approx(0.041)
    assert step.seconds == pytest.approx(0.637)
    assert any(line.startswith("inside a host 0.771 GB/s") for line in asked.assumed)
    with raises("option_missing"):
        ask("--benchmark", scaling(tmp_path, (1,)), "--cards", 2)
    ask("--benchmark", scaling(tmp_path, (1,)), "--cards", 2, "--inside-gbytes", 1)
    ask("--benchmark", scaling(tmp_path, (1,), "gpu:0"), "--cards", 2)


def test_what_was_given_is_not_listed_as_assumed():
    rows = ["--rows", "1x8=250", "2x8=290", "--cards", 2]
    for given, left in (
        (
            ["--inside-gbytes", 10],
            "inside a host 2.5 us a hop (NVLink of an A100 host): --inside-us",
        ),
        (["--inside-us", 3], "inside a host 200 GB/s (NVLink of an A100 host): --inside-gbytes"),
    ):
        assert ask(*rows, *given).assumed[0].startswith(left)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "1x8=250", "1x16=470"], "the rows have 8, 16 images a card: .* Give --batch"),
        (["--rows", "1x8=250", "--critical-batch", 1830], "1830: give --reference-batch too"),
    ],
)
def test_what_only_the_user_knows_is_asked_for(words, message):
    with pytest.raises(ConfigError, match=message) as error:
        ask(*words, "--cards", 1)
    assert error.value.code == "option_missing"


JOB = Job(
    fixed_seconds=0.0,
    image_seconds=0.02,
    batch=8,
    parameters=50e6,
    images=1000,
    epochs=0.4,
    reference_batch=64,
    critical_batch=500.0,
)
CLUSTER = Cluster(1, 8, Link(0.0, 5e9), Link(0.0, 5e9))


def test_gradients_of_two_bytes_hide_nothing():
    assert network_seconds(replace(JOB, gradient_bytes=2), CLUSTER) == pytest.approx(0.035)
    assert network_seconds(JOB, CLUSTER) < 0.001
    said = tables.helps(JOB, predict(JOB, CLUSTER))
    assert "bfloat16 gradients (+" in said.split("Worse: ")[1]


def test_epochs_are_those_of_the_trainer():
    assert epochs_needed(JOB, 8) == 0.4
    assert epochs_needed(JOB, 500) == pytest.approx(0.4 * 2 / 1.128)
    assert epochs_needed(replace(JOB, whole_epochs=True), 8) == 1


def test_what_harms_is_kept_apart():
    job = replace(JOB, images=100_000, critical_batch=None, parallel_seconds=0.1)
    assert "twice the accumulation" in dict(what_ifs(job, CLUSTER))
    helping, _, rest = tables.helps(job, predict(job, CLUSTER)).partition("Worse: ")
    assert "twice the accumulation" in helping and "half the batch per card" not in helping
    assert "half the batch per card (+" in rest
    best = replace(job, parallel_seconds=0.0, parameters=0.0, batch=1, images=1001)
    assert tables.helps(best, predict(best, CLUSTER)).startswith(
        "None of the changes that were tri"
    )
