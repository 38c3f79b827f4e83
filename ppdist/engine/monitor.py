"""Built-in callbacks: metrics, epoch lines, evaluations, heartbeat, stragglers."""

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import paddle

from ppdist.common.eta import duration
from ppdist.common.files import write_json
from ppdist.common.job import MIN_HOSTS_VARIABLE
from ppdist.common.records import loss_text
from ppdist.common.run_log import RunLog
from ppdist.distributed import comm, device, heartbeat
from ppdist.engine.callbacks import Callback, TrainingRun
from ppdist.engine.clock import StepSeconds
from ppdist.engine.step_policy import StepResult
from ppdist.engine.step_sums import EpochMeans, StepSums, mean

_LOGGER = logging.getLogger("ppdist.engine")
_GIB = 1 << 30
_RECENT = 20  # steps averaged for the speed on the console
_WINDOW = 15  # steps per comparison of ranks
_SLOW = 1.43  # times as long as the others: a score of 0.7
_MOST_SPEEDS = 16  # that fit in a readable line
_TABLE_WIDTH, _ETA_WIDTH = 80, 7  # columns


class HeartbeatCallback(Callback):
    """A callback that reports this rank's step and its results to fleetrun's heartbeat."""

    def on_train_begin(self, run: TrainingRun) -> None:
        heartbeat.plan(run.total_steps)

    def on_step_begin(self, step: int) -> None:
        heartbeat.beat("step", step - 1)

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        heartbeat.record_step(
            loss=result.losses["loss"],
            images=result.images,
            bad=not result.finite and not result.searching,
            step_seconds=seconds.wall,
            own_seconds=seconds.compute,
            data_seconds=seconds.data,
            micro_batches=result.own_micro_batches,
        )


class _Step(NamedTuple):
    result: StepResult
    seconds: StepSeconds


class MetricsLogger(Callback):
    """A callback that updates the progress line each step and writes metrics.jsonl at intervals.

    A record contains means, speed and times.  All ranks run this callback, because a record
    includes the times of each rank; only rank 0 writes.
    """

    def __init__(self, log: RunLog, every: int, steps_per_epoch: int) -> None:
        """Sets the interval between records.

        Args: every: steps between records; the last step is always recorded.
        """
        self._log = log
        self._every = every
        self._steps_per_epoch = steps_per_epoch
        self._sums = StepSums()  # since the last record, even from before a resume
        self._steps: list[_Step] = []  # since then in this process, for this rank's times
        self._recent: deque[_Step] = deque(maxlen=_RECENT)

    def restore(self, saved: StepSums | None, step: int) -> None:
        """Continues the sums saved in the checkpoint of this step; None: it has no sums."""
        self._sums = StepSums.resumed(saved, step, self._every)
        self._steps.clear()
        self._recent.clear()

    def sums(self) -> StepSums:
        """Returns a copy of the sums so far, for a checkpoint."""
        return self._sums.model_copy(deep=True)

    def on_train_begin(self, run: TrainingRun) -> None:
        self._total_steps = run.total_steps

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        self._sums.add(result, seconds, lr)
        self._steps.append(_Step(result, seconds))
        self._recent.append(_Step(result, seconds))
        speed = _images_per_second(self._recent)
        loss = f"{result.losses['loss']:.3f}"
        fields = {"loss": loss, "lr": f"{lr:.2e}", "img/s": f"{speed:.1f}"}
        self._log.progress(step, fields, seconds.data)
        if step % self._every == 0 or step == self._total_steps:
            self._write(step, lr)

    def _write(self, step: int, lr: float) -> None:
        steps, self._steps, sums = self._steps, [], self._sums
        record: dict[str, Any] = {
            "step": step,
            "epoch": step / self._steps_per_epoch,
            **sums.mean_losses(),
            "lr": lr,
            "gradient_norm": mean(sums.gradient_norm, sums.steps),
            "images_per_second": sums.images_per_second,
            "data_seconds": sums.data_seconds / sums.steps,
            "step_seconds": sums.wall_seconds / sums.steps,
            **({"partial": True} if sums.partial else {}),
        }
        if step % self._every == 0:  # else the run ends; an extended run completes them
            self._sums = StepSums(after=step)
        self._log.metrics(record)
        self._log.metrics({"step": step, **_gather_rank_seconds(steps)})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _images_per_second(steps: Sequence[_Step]) -> float:
    """Computes the images per second of all ranks together, over at least one step."""
    return sum(step.result.images for step in steps) / sum(step.seconds.wall for step in steps)


def _gather_rank_seconds(steps: Sequence[_Step]) -> dict[str, list[float]]:
    """Gathers each rank's mean times over some steps.  Collective."""
    means = {
        "rank_step_seconds": _mean([step.seconds.wall for step in steps]),
        "rank_own_seconds": _mean([step.seconds.compute for step in steps]),
        "rank_data_seconds": _mean([step.seconds.data for step in steps]),
        "rank_micro_batch_seconds": _micro_batch_seconds(steps),
    }
    all_WN = comm.all_gather(paddle.to_tensor([*means.values()], dtype="float32")).numpy()
    # Sent as float32: further digits are noise.
    return {
        name: [round(float(value), 6) for value in all_WN[:, column]]
        for column, name in enumerate(means)
    }


def _micro_batch_seconds(steps: Sequence[_Step]) -> float:
    """Computes the mean compute time per micro-batch of this rank; 0 if it had none."""
    steps_with_images = [step for step in steps if step.result.own_micro_batches > 0]
    count = sum(step.result.own_micro_batches for step in steps_with_images)
    return sum(step.seconds.compute for step in steps_with_images) / count if count else 0.0


class EpochLogger(Callback):
    """A callback that logs a table row and a metrics.jsonl line per epoch.

    The table is at most 80 columns wide.
    """

    def __init__(
        self, log: RunLog, means: EpochMeans, steps_per_epoch: int, shown: Sequence[str] = ()
    ) -> None:
        """
        Args:
            means: collects the epoch's numbers.
            shown: evaluation metrics that get a column, space permitting.
        """
        self._log = log
        self._means = means
        self._steps_per_epoch = steps_per_epoch
        self._shown = shown

    def on_train_begin(self, run: TrainingRun) -> None:
        self._epochs = -(-run.total_steps // self._steps_per_epoch)
        self._done_steps = run.done_steps
        self._results: Mapping[str, float] = {}  # results of the epoch's evaluation

    def on_evaluate_end(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        if self._means.ends(step):
            self._results = metrics
            return
        # Mid-epoch, or before the first step if a stop had skipped an evaluation that was due.
        names = [name for name in ("val_loss", *self._shown) if name in metrics]
        scores = "".join(f"  {name} {metrics[name]:.4f}" for name in names)
        self._log.info(f"after step {step}:{scores}")

    def on_epoch_end(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        columns = _fit_columns(_build_columns(epoch, self._epochs, numbers, self._shown))
        time_left = self._log.time_left(step)
        heads = " ".join(column.head.rjust(column.width) for column in columns)
        texts = " ".join(column.text.rjust(column.width) for column in columns)
        pairs = [f"{column.head} {column.text}" for column in columns if column.text]
        self._log.row(
            f"{heads} {'ETA':>{_ETA_WIDTH}}",
            f"{texts} {time_left:>{_ETA_WIDTH}}".rstrip(),
            "  ".join([*pairs, *([f"ETA {time_left}"] if time_left else [])]),
        )
        self._log.detail(
            f"epoch {epoch} took {duration(numbers['seconds'])}, {numbers['data_share']:.0%} of "
            f"it waiting for images; memory {numbers['memory_gib']:.1f} GiB"
        )
        if "partial" in numbers:
            self._log.info(
                f"epoch {epoch}: its means are those of the steps since the run was resumed, "
                "because the checkpoint has no sums of the others"
            )
        epoch_numbers = {
            name: value for name, value in numbers.items() if name not in self._results
        }
        if -(-self._done_steps // self._steps_per_epoch) == epoch:  # the run ended in this epoch
            self._log.forget(self._done_steps, "epoch_end")
        self._log.metrics({"step": step, "epoch_end": {"epoch": epoch, **epoch_numbers}})
        self._results = {}


class _Column(NamedTuple):
    head: str
    text: str
    width: int
    rank: int  # the highest is dropped first if the row is too wide


def _build_columns(
    epoch: int, epochs: int, numbers: Mapping[str, float], shown: Sequence[str]
) -> list[_Column]:
    """Builds the columns of an epoch's row, without the ETA."""
    parts = [name for name in numbers if name.startswith("loss_")]
    scores = [
        _Column(name, _format_score(numbers.get(name)), 6, 3 + at) for at, name in enumerate(shown)
    ]
    columns = [
        _Column("epoch", f"{epoch}/{epochs}", max(5, 2 * len(str(epochs)) + 1), 0),
        _Column("loss", loss_text(numbers["loss"]), 6, 0),
        *(
            _Column(name.removeprefix("loss_")[:6], loss_text(numbers[name]), 6, 5 + at)
            for at, name in enumerate(parts)
        ),
        _Column("lr", f"{numbers['lr']:.1e}", 7, 2),
        _Column("img/s", f"{numbers['images_per_second']:.4g}", 5, 2),
    ]
    if device.on_accelerator():
        columns.append(_Column("GPU mem", f"{numbers['memory_gib']:.1f}G", 7, 2))
    if shown:
        columns.append(_Column("val", loss_text(numbers.get("val_loss")), 6, 8))
    return [*columns, *scores]


def _fit_columns(columns: list[_Column]) -> list[_Column]:
    """Drops columns, the least important first, until the rest fits beside the ETA."""
    while sum(column.width + 1 for column in columns) + _ETA_WIDTH > _TABLE_WIDTH:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _format_score(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


class EvaluationLogger(Callback):
    """A callback that records evaluations: metrics.jsonl, pictures, the best one's evaluation.json.

    A failure here must not end the run; it only causes a warning, once.
    """

    def __init__(
        self,
        log: RunLog,
        steps_per_epoch: int,
        show: Callable[[Path, int], None],
        analyse: Callable[[int], dict[str, Any]],
    ) -> None:
        """
        Args:
            show: writes pictures of the evaluation after a step to a folder.
            analyse: returns the content of evaluation.json for a step; called on rank 0 only.
        """
        self._log = log
        self._steps_per_epoch = steps_per_epoch
        self._show, self._analyse = show, analyse

    def on_train_begin(self, run: TrainingRun) -> None:
        self._output_dir = run.output_dir
        self._done_steps = run.done_steps

    def on_evaluate_end(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        if step == self._done_steps:  # an earlier attempt may have caught up with it, too
            self._log.forget(step, "eval_seconds")
        self._log.metrics({"step": step, "epoch": step / self._steps_per_epoch, **metrics})
        self._show(self._output_dir / "plots", step)
        if is_best:
            comm.run_on_main(lambda: self._write_analysis(step))

    def _write_analysis(self, step: int) -> None:
        try:
            analysis = self._analyse(step)
            write = partial(write_json, self._output_dir / "evaluation.json", analysis)
            self._log.put("evaluation.json", write)
        except Exception as error:
            _LOGGER.debug("evaluation.json", exc_info=True)
            self._log.warn_once("evaluation.json", error)


class StragglerMonitor(Callback):
    """A callback that reports stragglers: ranks that are slow in two successive comparisons.

    Compares the ranks every 15 steps.  A rank's compute time is its step time without waits in
    collectives, divided by its number of micro-batches, which may differ between ranks.
    On a GPU, it covers only the host (images, kernel launches): a slow card goes undetected.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._steps: list[_Step] = []  # since the last comparison
        self._slow, self._named = set[int](), set[int]()

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        self._steps.append(_Step(result, seconds))
        if len(self._steps) < _WINDOW:
            return
        per_step = [_micro_batch_seconds([past_step]) for past_step in self._steps]
        usual, self._steps = median([value for value in per_step if value > 0] or [0.0]), []
        seconds_W = comm.all_gather(paddle.to_tensor([usual], dtype="float32")).numpy().ravel()
        if warning := self.judge([float(value) for value in seconds_W]):
            self._log.warning(warning)

    def judge(self, seconds_W: list[float]) -> str:
        """Returns a warning that names new stragglers, the same on every rank; usually "".

        Args: seconds_W: each rank's compute time per micro-batch; 0: it had none.
        """
        # The lower median: with two ranks, the slower one is compared to the faster one.
        usual = median_low([seconds for seconds in seconds_W if seconds > 0] or [1.0])
        slow_before = self._slow
        self._slow = {rank for rank, seconds in enumerate(seconds_W) if seconds / usual > _SLOW}
        stragglers = sorted((self._slow & slow_before) - self._named)
        if not stragglers:
            return ""
        self._named |= set(stragglers)
        longest = max(seconds_W[rank] for rank in stragglers)
        return (
            f"straggler: {comm.ranks_named(stragglers, comm.addresses())}, with a compute time of "
            f"{longest:.3g} s per micro-batch, {longest / usual:.1f} times that of the others "
            f"({usual:.3g} s), which wait for it; check its host for other programs, throttling "
            f"by heat, and slow storage{_advise_shares(seconds_W)}"
        )


def _advise_shares(seconds_W: Sequence[float]) -> str:
    """Suggests the `distributed.shares` that would make the steps of all ranks equally long.

    Returns: the advice; "" if the times are not conclusive (on cards, or if a rank has no
        micro-batches), or if the number of ranks may change, because the list has one entry per
        rank.
    """
    unknown = device.on_accelerator() or min(seconds_W) <= 0 or len(seconds_W) > _MOST_SPEEDS
    if unknown or MIN_HOSTS_VARIABLE in os.environ:
        return ""
    fastest = min(seconds_W)
    speeds = ", ".join(f"{max(0.01, fastest / seconds):.2g}" for seconds in seconds_W)
    return (
        f"; if it is slower by nature, set `distributed.shares` to [{speeds}]: it gets fewer of a "
        "step's micro-batches"
    )
