"""Trial steps of a planned training, from which its time is estimated."""

from itertools import islice

from ppdist.common.errors import StorageError
from ppdist.common.eta import ETA, duration
from ppdist.cpu.precision import BFLOAT16, Kernels
from ppdist.distributed import comm
from ppdist.engine.build import (
    Decisions,
    build_batch_source,
    build_train_step,
    intervals,
    speed_up_cpu,
    trial_policies,
)
from ppdist.engine.clock import Clock
from ppdist.engine.messages import evaluation_interval
from ppdist.engine.schedule_setup import counted
from ppdist.engine.step_policy import Verdict
from ppdist.optim.lr_scheduler import LearningRates

_MOST_STEPS, _LEAST_STEPS = 10, 2  # the ETA leaves out the first, which allocates and compiles
_SECONDS = 10.0  # after this no further step starts: a preview should not take minutes


def rehearse(decisions: Decisions, kernels: Kernels = BFLOAT16) -> str:
    """Estimates the duration of a run from a few steps at a learning rate of 0.  Collective.

    The model's running statistics change nevertheless, so train with a different model.

    Returns: a line for the user: the duration, or the reason why it is unknown.
    Raises: UserError: the run would reject its teacher.
    """
    config, schedule = decisions.config, decisions.schedule
    speed_up_cpu(config, [decisions.model])
    names = decisions.data.train_set.class_names
    source = build_batch_source(config, decisions.data.train_set, schedule)
    step = build_train_step(config, schedule, decisions.model, kernels, names, trial_policies())
    step.loss.begin()
    rates = LearningRates(0.0, 0.0, config.optimizer.momentum)
    eta, clock = ETA(schedule.total_steps), Clock()
    val_set = decisions.data.val_set
    images = 0 if val_set is None else len(val_set.records)
    _, evaluate_every = intervals(config, schedule, step.exchange)
    eta.expect(evaluate_every if images else 0, 0, images, schedule.total_batch)
    resumed_steps = decisions.start.step or 0  # steps done so far by the run to resume
    done_steps = 0
    for number, batches in enumerate(islice(source.steps(0, None), _MOST_STEPS)):
        try:
            given_up = step(batches, number, rates, Clock()).verdict is Verdict.REPEAT
        except StorageError:  # on all ranks
            given_up = True
        if given_up:
            return "time not known: a step had too little memory, or no images"  # on some rank
        clock.lap("steps")
        done_steps = number + 1
        eta.record_step(done_steps, 0.0)
        # Rank 0 decides for all ranks, because their clocks differ.
        enough = done_steps > _LEAST_STEPS
        if enough and comm.run_on_main(lambda: clock.seconds["steps"] > _SECONDS):
            break
    seconds = eta.seconds_left(resumed_steps)
    if seconds is None:
        return "time not known: the run has one step, and the first step of a run is not typical"
    steps = counted(schedule.total_steps - resumed_steps, "step")
    evaluations = f" and an evaluation {evaluation_interval(config)}" if images else ""
    return f"time: about {duration(seconds)} on this machine for {steps}{evaluations} (an estimate)"
