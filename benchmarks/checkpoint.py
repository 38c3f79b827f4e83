"""Measures what checkpoints cost a training that continues while they are written."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.clock import Clock
from ppdist.engine.state import capture_state

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig

Report = dict[str, Any]


def measure_saving(config: "ExperimentConfig", *, saves: int, scratch: Path) -> Report:
    """Takes and writes checkpoints of a run, interleaved with steps.  Collective.

    Each round: a step; a snapshot, then a step while it is written; a snapshot and the wait until
    it is written, which is what a run would do that has no thread for it.

    Args:
        saves: number of rounds.
        scratch: folder for what a run writes.

    Returns: medians.  `standing_still_seconds`: taking the snapshot and handing it over.
        `seconds_more`, `cpu_seconds_more` (of this rank, all threads): of snapshot, step and write
        over the step before.  `writing_seconds`: the write with nothing beside it.
        `percent_of_a_minute`: for one checkpoint a minute; `cpu` is what training loses where all
        cores compute and nothing else runs.
    """
    with redirect_stdout(sys.stderr):
        experiment = build_training(
            config, output_dir=scratch, evaluate=False, command=["benchmark"]
        )
        experiment.log.close()
    trainer = experiment.trainer
    steps = trainer.batch_source.steps(0, None)
    schedule, state, writer = trainer.schedule, trainer.state, trainer.saving.writer

    def step() -> None:
        rates = schedule.lr_scheduler.rates(state.step)
        trainer.train_step(next(steps), state.step, rates, Clock(synchronize=True))
        state.step += 1

    def save() -> None:
        snapshot = capture_state(trainer.train_step, state, schedule)
        if comm.is_main():
            writer.hand_over(snapshot)

    def write() -> None:
        failure = comm.run_on_main(writer.finish)
        if failure:
            raise RuntimeError(failure)

    step()
    rounds = []
    for _ in range(saves):
        beside = (_timed(step), _timed(save), _timed(step), _timed(write))
        step()
        save()
        rounds.append((*beside, _timed(write)))
    bytes_written = comm.run_on_main(lambda: _folder_bytes(trainer.saving.folder / "last"))
    return {**_compute_figures(rounds), "bytes": bytes_written, "saves": saves}


class _Spent(NamedTuple):
    wall: float  # seconds
    cpu: float


def _timed(work: Callable[[], None]) -> _Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return _Spent(time.perf_counter() - wall, time.process_time() - cpu)


def _compute_figures(rounds: Sequence[tuple[_Spent, ...]]) -> Report:
    """Computes the figures from rounds of a step, a snapshot, a step beside its write, the rest of
    that write, and another write.
    """
    extra = [
        (save.wall + beside.wall - step.wall, save.cpu + beside.cpu + rest.cpu - step.cpu)
        for step, save, beside, rest, _ in rounds
    ]
    seconds = {
        "step_seconds": median(step.wall for step, *_ in rounds),
        "standing_still_seconds": median(save.wall for _, save, *_ in rounds),
        "seconds_more": median(wall for wall, _ in extra),
        "cpu_seconds_more": median(cpu for _, cpu in extra),
        "writing_seconds": median(write.wall for *_, write in rounds),
    }
    costs = {
        "standing_still": seconds["standing_still_seconds"],
        "cpu": seconds["cpu_seconds_more"],
        "waiting_for_the_write": seconds["standing_still_seconds"] + seconds["writing_seconds"],
    }
    percents = {name: 100 * cost / 60 for name, cost in costs.items()}
    return {**seconds, "percent_of_a_minute": percents}


def _folder_bytes(folder: Path) -> int:
    return sum(os.path.getsize(path) for path in folder.iterdir())
