"""The search for a batch, on made-up memories, and the process that it starts."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict

import pytest

from ppdist.common import child
from ppdist.common.errors import DataError, failure_of
from ppdist.engine.auto_batch import (
    ADDRESSES,
    CARD,
    HOST,
    NO_MEMORY,
    fits,
    largest_batch,
    search,
    tightest,
    trial_of,
)
from tests.errors import raises

GIB = 1 << 30


class Made:
    """Trainings that take what a function says, and die above a number of images.

    As the process does, it stops before a batch that should not fit.
    """

    def __init__(self, takes, limits, dies_above=None):
        self.takes, self.limits, self.dies_above = takes, limits, dies_above
        self.asked, self.tried = [], []

    def __call__(self, batches):
        self.asked.append(list(batches))
        found = {}
        for batch in batches:
            if found and largest_batch(found, self.limits, batch) < batch:
                break
            self.tried.append(batch)
            if self.dies_above is not None and batch > self.dies_above:
                return found, "it ended with SIGKILL; buy memory"
            found[batch] = {HOST: self.takes(batch)}
        return found, ""


def line(batch):
    return 100 + 10 * batch


def steeper(batch):
    return line(batch) + (batch > 4) * batch**2


# What a batch takes, the limit, of which batch a process dies, the largest of use; what is found,
# and what each process is asked to try.
DOUBLED = [1, 2, 4, 8, 16, 32, 64]
SEARCHES = {
    "35 are not worth a trial": (line, 450, None, 64, 32, [DOUBLED]),
    "a process that begins with it": (line, 540, None, 64, 44, [DOUBLED, [44]]),
    "no more than is of use": (line, 500, None, 12, 12, [[1, 2, 4, 8, 12]]),
    "15 take 475, 16 take 516": (steeper, 500, None, 64, 15, [DOUBLED, [12], [14], [15]]),
    "a death halves the distance": (line, 10**6, 20, 64, 20, [DOUBLED, [24], [20], [22]]),
    "a death in small batches": (line, 10**6, 2, 64, 2, [DOUBLED, [3]]),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_processes_are_asked_for_what_may_fit(name):
    takes, limit, dies_above, most, images, asked = SEARCHES[name]
    made = Made(takes, {HOST: limit}, dies_above)
    assert search(made, {HOST: limit}, most).images == images
    assert made.asked == asked


def test_gaps_in_the_first_process_do_not_lower_the_batch():
    """Images of other shapes leave gaps in the heap of the process that tries several batches."""

    def trial(batches):
        each = 10 if len(batches) == 1 else 60
        return {batch: {HOST: 100 + each * batch} for batch in batches if each * batch <= 400}, ""

    assert search(trial, {HOST: 500}, 64).images == 40
    assert search(trial, {HOST: 10_000}, 24).images == 24


def test_no_trial_is_made_that_the_last_two_say_would_not_fit():
    for limit in range(141, 1000, 7):
        for takes in (line, lambda batch: 100 + (40 if batch <= 4 else 10) * batch):
            made = Made(takes, {HOST: limit})
            images = search(made, {HOST: limit}, 64).images
            assert all(takes(batch) <= limit for batch in made.tried)
            assert images == max(made.tried)


def test_every_kind_of_memory_limits():
    def trial(batches):
        return {b: {HOST: 10 * b, ADDRESSES: 1000 + b, CARD: 50 * b} for b in batches}, ""

    room = {HOST: 10_000, ADDRESSES: 2_000, CARD: 1_000}
    assert 18 <= search(trial, room, 500).images <= 20
    assert search(trial, {**room, ADDRESSES: 1_006}, 500).images == 6


def test_not_even_one_image_is_an_error_with_the_numbers():
    with raises("no_image_fits", "it takes 2 GiB", "1 GiB"):
        search(Made(lambda batch: GIB * (1 + batch), {HOST: GIB}), {HOST: GIB}, 8)
    with raises("no_image_fits", "SIGKILL; buy"):
        search(Made(line, {HOST: GIB}, dies_above=0), {HOST: GIB}, 8)


def test_a_line_needs_two_batches_and_one_promises_less():
    assert largest_batch({4: {HOST: 80}}, {HOST: 100}, 64) == 5
    assert largest_batch({2: {HOST: 60}, 4: {HOST: 80}}, {HOST: 100}, 64) == 6
    assert largest_batch({2: {HOST: 60}, 4: {HOST: 80}}, {HOST: 50}, 64) == 1
    assert largest_batch({2: {HOST: 80}, 4: {HOST: 80}}, {HOST: 100}, 64) == 64
    assert largest_batch({2: {HOST: 80}, 4: {HOST: 80}}, {HOST: 50}, 64) == 0


def test_the_tightest_kind_is_named():
    used, room = {HOST: GIB, ADDRESSES: 3 * GIB}, {HOST: 8 * GIB, ADDRESSES: 4 * GIB}
    assert tightest(used, room).startswith("3 GiB of 4 GiB")
    assert fits(used, room)
    assert not fits(used, {HOST: GIB - 1})


def end_as(monkeypatch, code):
    """The process does this instead of training."""
    real = child.Process

    def start(command, **more):
        return real([sys.executable, "-c", code, command[-1]], **more)

    monkeypatch.setattr(child, "Process", start)


TELLS_ONE = (
    "import json, os, sys, time\n"
    "from pathlib import Path\n"
    "folder = Path(sys.argv[1])\n"
    "job = json.loads((folder / 'job.json').read_text())\n"
    "line = json.dumps({'batch': job['batches'][0], 'used': {'memory of the host': 7}})\n"
    "(folder / 'took.jsonl').write_text(line + '\\n')\n"
)


def test_a_killed_process_leaves_what_it_had_told(monkeypatch):
    end_as(monkeypatch, f"{TELLS_ONE}os.kill(os.getpid(), {signal.SIGKILL.value})")
    trial = trial_of({}, {HOST: GIB}, time.monotonic() + 60)
    found, why = trial([1, 2])
    assert found == {1: {HOST: 7}}
    assert "SIGKILL" in why


def test_what_a_failed_process_said_is_in_the_message(monkeypatch):
    end_as(monkeypatch, "import sys; sys.exit('oneDNN: status 1')")
    trial = trial_of({}, {HOST: GIB}, time.monotonic() + 60)
    found, why = trial([1])
    assert not found and "exit code 1: oneDNN" in why


def test_out_of_memory_is_told_from_other_failures(monkeypatch):
    code = f"import sys; sys.stderr.write('out of memory'); sys.exit({NO_MEMORY})"
    end_as(monkeypatch, code)
    why = trial_of({}, {HOST: GIB}, time.monotonic() + 60)([1])[1]
    assert "exit code 3" in why


def test_a_mistake_of_the_users_is_raised_as_it_was_said(monkeypatch):
    mistake = json.dumps(asdict(failure_of(DataError("b", code="image_missing", where="a"))))
    code = f"import sys; open(sys.argv[1] + '/mistake', 'w').write({mistake!r}); sys.exit(2)"
    end_as(monkeypatch, code)
    trial = trial_of({}, {HOST: GIB}, time.monotonic() + 60)
    with raises("image_missing"):
        search(trial, {HOST: GIB}, 8)


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    end_as(monkeypatch, f"{TELLS_ONE}(folder.parent / str(os.getppid())); time.sleep(600)")
    began = time.monotonic()
    trial = trial_of({}, {HOST: GIB}, began + 2)
    late = (
        "training with it took longer than half of distributed.timeout_seconds; give a number, or "
        "raise that"
    )
    assert trial([1, 2])[1] == late
    assert trial([1]) == ({}, late)  # and no further process starts
    assert time.monotonic() - began < 30


def test_trial_is_one_rank_hidden_from_fleetrun(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PPDIST_EXIT_DIR", "/nowhere")
    code = (
        "import os, sys; sys.exit(str({'PADDLE_TRAINERS_NUM', 'PPDIST_EXIT_DIR'} & {*os.environ}))"
    )
    end_as(monkeypatch, code)
    assert "code 1: set();" in trial_of({}, {}, time.monotonic() + 60)([1])[1]
    assert os.environ["PADDLE_TRAINERS_NUM"] == "2"
