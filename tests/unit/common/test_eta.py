"""The time left against a clock that is turned by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from ppdist.common.eta import (
    ETA,
    EVALUATION,
    IMAGES,
    PLOTTING,
    SAVING,
    START_AND_END,
    TRAINING,
    duration,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Run:
    """A run as it might be, in seconds."""

    epochs: int = 40
    steps_per_epoch: int = 50
    step: float = 0.2
    noise: float = 0.3  # images of several sizes
    first_step: float = 20.0  # compiling
    first_of_epoch: float = 1.5
    evaluation: float = 12.0  # longer than the steps of an epoch
    save: float = 0.8
    save_every: int = 35
    images: tuple[int, int] = (400, 16)  # in an evaluation, in a step
    start: int = 0
    stall_at: int = -1

    def errors(self) -> dict[int, float]:
        """By step the relative error of what is left, against how long it then took."""
        clock, generator = Clock(), np.random.default_rng(0)
        total = self.epochs * self.steps_per_epoch
        meter = ETA(total, clock)
        meter.expect(self.steps_per_epoch, self.save_every, *self.images)
        if self.start:
            meter.remember(self.evaluation)
        said: dict[int, tuple[float, float]] = {}
        for step in range(self.start + 1, total + 1):
            seconds = self.step * generator.uniform(1 - self.noise, 1 + self.noise)
            if step == self.start + 1:
                seconds += self.first_step
            elif step % self.steps_per_epoch == 1:
                seconds += self.first_of_epoch
            clock.now += seconds + (300.0 if step == self.stall_at else 0.0)
            meter.record_step(step, 0.01)
            left = meter.seconds_left(step)
            if left is not None:
                said[step] = clock.now, left
            if step % self.steps_per_epoch == 0:
                with meter.spending(EVALUATION, step):
                    clock.now += self.evaluation
                    if step < total / 2:  # a new best
                        with meter.spending(SAVING, step):
                            clock.now += self.save
            if step % self.save_every == 0 or step == total:
                with meter.spending(SAVING, step):
                    clock.now += self.save
        end = clock.now
        return {step: left / max(end - at, 1e-9) - 1 for step, (at, left) in said.items()}


def worst(run: Run, after: float) -> float:
    """Of the steps from this part of the run to nine tenths of it; then little is left."""
    total = run.epochs * run.steps_per_epoch
    first = run.start + math.ceil(after * (total - run.start))
    return max(abs(error) for step, error in run.errors().items() if first <= step <= 0.9 * total)


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        pytest.param(Run(evaluation=1.0), marks=pytest.mark.slow),
        pytest.param(Run(epochs=300, steps_per_epoch=7, noise=0.5), marks=pytest.mark.slow),
        Run(start=1000),  # resumed in the middle
        pytest.param(Run(first_of_epoch=0.0, save_every=1999), marks=pytest.mark.slow),
        Run(stall_at=60),  # somebody stopped the process for five minutes
    ],
    ids=["slow evaluation", "fast", "short epochs", "resumed", "rare saves", "a stall"],
)
def test_eta_is_within_tenth_after_twentieth_of_run(run):
    assert worst(run, 0.05) < 0.10


def test_eta_before_first_evaluation_uses_its_images():
    # A twentieth of 4 epochs lies before the first: 1,400 images at half of 0.2 s / 16.
    run = Run(epochs=4, steps_per_epoch=500, evaluation=8.75, images=(1400, 16))
    assert worst(run, 0.05) < 0.10
    blind = Run(epochs=4, steps_per_epoch=500, evaluation=8.75, images=(0, 16))
    assert worst(blind, 0.05) > worst(run, 0.05)


def test_every_second_is_booked_once():
    clock = Clock()
    meter = ETA(10, clock)
    clock.now += 4.0  # building the model
    with meter.spending(EVALUATION, 0):  # which a stop had skipped
        clock.now += 1.0
    meter.begin_steps()
    clock.now += 7.0
    meter.record_step(1, 2.0)
    with meter.spending(EVALUATION, 1):
        clock.now += 3.0
        with meter.spending(SAVING, 1):
            clock.now += 1.0
        clock.now += 3.0
    with meter.spending(PLOTTING, 1):
        clock.now += 20.0
    clock.now += 0.5
    assert meter.seconds() == {
        TRAINING: 5.0, IMAGES: 2.0, EVALUATION: 7.0, SAVING: 1.0, PLOTTING: 20.0,
        START_AND_END: 4.5,
    }  # fmt: skip


def test_a_run_with_nothing_left_to_train_trained_for_no_time():
    clock = Clock()
    meter = ETA(10, clock)
    clock.now += 4.0
    assert meter.seconds() == {TRAINING: 0.0, START_AND_END: 4.0}


def test_steps_that_are_made_again_do_not_confuse_it():
    clock = Clock()
    meter = ETA(100, clock)
    for step in [*range(1, 50), *range(10, 40)]:
        clock.now += 1.0
        meter.record_step(step, 0.0)
    assert meter.seconds_left(39) == pytest.approx(61.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59, "59s"), (247, "4m 07s"), (7500, "2h 05m"), (180000, "2d 2h"), (-3, "0s")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
