"""Steps that are skipped because the run crashed there twice."""

import math
import os
import re

from ppdist.common.errors import ConfigError
from ppdist.common.job import SKIP_STEP_VARIABLE
from ppdist.common.run_log import RunLog
from ppdist.engine.bad_steps import BadSteps
from ppdist.engine.data import BatchSource
from ppdist.engine.run_policy import RunPolicy
from ppdist.engine.state import TrainState
from ppdist.engine.train_step import TrainStep


class SkippedSteps(RunPolicy):
    """The policy that skips the steps that fleetrun names, without opening their images."""

    def __init__(
        self, train_step: TrainStep, batch_source: BatchSource, bad_steps: BadSteps, log: RunLog
    ) -> None:
        self._steps = parse_steps(os.environ.get(SKIP_STEP_VARIABLE, ""))
        self._train_step = train_step
        self._batch_source = batch_source
        self._bad_steps = bad_steps
        self._log = log

    def skips(self, state: TrainState) -> bool:
        step = state.step + 1
        if step not in self._steps:
            return False
        images = self._batch_source.images_of(state.step, state.class_scores)
        self._train_step.skip(state.step)
        first_images, _ = self._bad_steps.add(step, "left out", images, math.nan)
        self._log.warning(
            f"step {step} is skipped, because the run ended there twice; its images: {first_images}"
        )
        return True


def parse_steps(text: str) -> set[int]:
    """Parses step numbers such as `7,12`.

    Raises: ConfigError: the text does not have this form.
    """
    if text and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text, re.ASCII):
        raise ConfigError(
            f"{SKIP_STEP_VARIABLE}={text}: expected the numbers of steps, from 1, as in 7,12",
            code="skip_step_invalid",
            fix="fleetrun --max_restart sets it automatically",
        )
    return {int(step) for step in text.split(",") if step}
