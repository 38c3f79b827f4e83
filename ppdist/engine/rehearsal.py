"""A few steps of a planned training, which tell its time."""

from ppdist.common.eta import ETA, duration
from ppdist.cpu.precision import BFLOAT16, Kernels
from ppdist.distributed import comm
from ppdist.engine.build import Decisions, build_batch_source, build_train_step, speed_up_cpu
from ppdist.engine.train_step import Clock
from ppdist.optim.lr_scheduler import LearningRates

_MOST_STEPS, _LEAST_STEPS = 10, 2  # the first is not counted: it makes what others find made
_SECONDS = 10.0  # after which no further step is made


def rehearse(decided: Decisions, kernels: Kernels = BFLOAT16) -> str:
    """Makes some steps at a rate of 0. Collective.

    Returns: how long the run will take, for the user; "": not known.
    Raises: UserError: the run would refuse its teacher.
    """
    config, schedule = decided.config, decided.schedule
    speed_up_cpu(config, [decided.model])
    names = decided.train_set.class_names
    step = build_train_step(config, schedule, decided.model, kernels, names)
    if step.distillation is not None:
        step.distillation.check(step.loss)
    source = build_batch_source(config, decided.train_set, schedule)
    rates = LearningRates(0.0, 0.0, config.optimizer.momentum)
    eta, clock = ETA(schedule.total_steps), Clock()
    _expect(eta, decided)
    batches = source.batches(0, None)
    made = 0
    for number in range(min(_MOST_STEPS, schedule.total_steps)):
        if step(batches, source.numbers(number), number, rates, False, Clock()).ran_out:
            return ""  # the run would go on with fewer images at a time
        clock.lap("steps")
        made = number + 1
        eta.stepped(made, 0.0)
        if made > _LEAST_STEPS and comm.run_on_main(lambda: clock.seconds["steps"] > _SECONDS):
            break
    left = eta.left(0)
    if left is None:
        return ""
    return (
        f"about {duration(left)} on this machine: {schedule.total_steps} steps and the "
        f"evaluations, by {made} steps that were tried"
    )


def _expect(eta: ETA, decided: Decisions) -> None:
    """Evaluations between steps, as the trainer makes them."""
    every = decided.config.evaluate.every_epochs * decided.schedule.steps_per_epoch
    images = 0 if decided.val_set is None else len(decided.val_set.records)
    eta.expect(max(1, round(every)) if images else 0, 0, images, decided.schedule.total_batch)
