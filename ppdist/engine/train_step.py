"""One optimizer step."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from ppdist.data.types import Batch
from ppdist.distributed import collectives, device, heartbeat, ranks
from ppdist.engine.clock import Clock
from ppdist.engine.gradients import Gradients
from ppdist.engine.loss_sums import LossSums, Totals, local_normalizers, sum_losses, zero_losses
from ppdist.engine.precision import Precision
from ppdist.engine.step_policy import StepPolicy, StepResult, Verdict
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel, Targets
from ppdist.optim.exchange import Exchange
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.running_statistics import RunningStatistics
from ppdist.optim.updater import Updater


class StepSettings(NamedTuple):
    """Numbers of a step.

    seed: seeds the model's random numbers, together with the step and the micro-batch.
    clip_norm: largest L2 norm of the gradient; None for no clipping.
    loss_divisor: keeps loss sums in the range of low precisions; cancels out exactly.
    spread: whether each micro-batch is spread over all ranks, which then share its batch norm.
    """

    seed: int
    clip_norm: float | None = None
    loss_divisor: float = 1.0
    spread: bool = False


class TrainStep:
    """Forward, backward, exchange, normalise, clip, update, running statistics, average.

    The loss gives a *sum* and its normalizer.  Dividing by the normalizer of all ranks and all
    micro-batches has to wait until the last of them is known, and division commutes with the
    gradient, so gradients of sums are accumulated and divided once:

        g = sum over ranks and micro-batches of grad(total) / max(1, sum of normalizers)
        w <- update(w, g * min(1, clip_norm / |g|))

    which is the gradient of one rank with one large batch, however the images are distributed.
    A loss that knows its normalizers from the targets alone gets their sums beforehand instead.
    Gradients of parameters that only a term with its own normalizer trains are divided by that one.

    Collective: every rank calls the step with at least one micro-batch, which may be blank, and
    reaches the same collectives, marked below.  All ranks decide alike, from sums over all ranks: a
    loss that is not finite on one rank is `broken` on all ranks, and none applies the step.
    """

    def __init__(
        self,
        model: ImageModel,
        loss: Loss,
        optimizer: Updater,
        exchange: Exchange,
        precision: Precision,
        policies: Sequence[StepPolicy],
        settings: StepSettings,
    ) -> None:
        """Args: policies: called in this order at each hook; in `around`, the last is outermost."""
        self.model = model
        self.wrapped = collectives.wrap(model)
        self.loss = loss
        self.optimizer = optimizer
        self.exchange = exchange
        self.precision = precision
        self.policies = policies
        self.statistics = RunningStatistics(model, settings.spread)
        self._settings = settings
        self._votes = [name for policy in policies for name in policy.votes]
        self._gradients = Gradients(model, loss.separate_keys, optimizer, precision)
        self._met_others = False  # within the passes of a micro-batch

    def __call__(
        self, batches: Iterable[Batch], step: int, rates: LearningRates, clock: Clock
    ) -> StepResult:
        """Makes optimizer step `step` (from 0) of this rank's micro-batches.  Collective."""
        self._gradients.drop()
        for policy in self.policies:
            policy.before_step(step, self.exchange.synchronised(step - 1))  # collective: EMA
        self.loss.prepare(self.model, step)
        micro_batches = list(batches)
        clock.lap("data")

        # Forward and backward: of this rank alone, unless SyncBN or NCCL meets in a pass.
        self.statistics.begin_step()
        normalizers = local_normalizers(self.loss, micro_batches)
        if normalizers is not None:
            normalizers = collectives.all_reduce_sum(normalizers)  # collective
        clock.lap("communication")
        sums = LossSums()
        for place, batch in enumerate(micro_batches, start=1):
            last = place == len(micro_batches)
            sums.add(self._learn(batch, step, normalizers, last, clock))  # collective: SyncBN, NCCL
            self.statistics.end_pass(len(micro_batches))
        self.statistics.end_passes(len(micro_batches))

        # Exchange; the host waits for the device once, in `read`: all but the update is queued.
        message = collectives.all_reduce_sum(self._pack_counts(micro_batches, sums))  # collective
        clock.lap("communication")
        # Square of the norm of the rank-mean gradient, without the loss scale.  An exchange that
        # keeps back a part counts it in units of the mean loss, for which it reads the factor.
        read_factor = partial(self._read_factor, message, sums)
        square = self._gradients.average(self.exchange, sums, message, read_factor)  # collective
        clock.lap("optimizer")
        *values, own_loss, square_norm = collectives.read(message, sums.loss, square)
        clock.lap("communication")

        # Normalise, clip, update; or undo.  Of verdicts, APPLY < SKIP < REPEAT, the strictest.
        totals = Totals.of(values, self._votes)
        losses, divisor = sums.normalise(totals.terms)
        factor, verdict = self._factor(divisor), self._decide(totals)
        norm = math.sqrt(square_norm) * factor if verdict is Verdict.APPLY else math.nan
        finite = not totals.broken and (verdict is not Verdict.APPLY or math.isfinite(norm))
        verdict = max(verdict, Verdict.APPLY if finite else Verdict.SKIP)
        applied, searching, not_finite = verdict is Verdict.APPLY, False, list[str]()
        if applied:
            self._update(factor, norm, rates)  # collective: a sharded optimizer
            self.statistics.count(sum(batch.real for batch in micro_batches), totals.micro_batches)
        else:
            bad = verdict is Verdict.SKIP and not finite
            recheck = partial(self._name_broken_gradients, micro_batches, step, normalizers)
            searching, not_finite = self._reject(bad, totals, sums, recheck)  # collective: SyncBN
        synchronised = self._finish(step, verdict)  # collective
        clock.lap("optimizer")
        return StepResult(
            losses=losses,
            images=round(totals.images),
            gradient_norm=norm,
            verdict=verdict,
            finite=finite,
            totals=totals.votes,
            searching=searching,
            synchronised=synchronised,
            own_loss=own_loss,
            own_images=[] if applied else [i for batch in micro_batches for i in batch.positions()],
            own_micro_batches=sum(batch.share for batch in micro_batches if batch.real),
            own_not_finite=not_finite,
        )

    def skip(self, step: int) -> None:
        """Skips a step (from 0) without opening its images.  Collective."""
        self._finish(step, Verdict.SKIP)

    # Forward and backward

    def _learn(
        self, batch: Batch, step: int, normalizers: Tensor | None, last: bool, clock: Clock
    ) -> LossOutput:
        """Accumulates the gradients of a micro-batch, in a pass that policies may change.

        Collective with SyncBN; with NCCL, whose `last` backward averages the gradients.
        """
        heartbeat.alive()
        exchanges = last and self.exchange.during_backward
        self._met_others = self.statistics.meet  # then a failed pass cannot be made again
        run = partial(self._pass, step, normalizers, exchanges, clock)
        for policy in self.policies:
            run = partial(policy.around, run, communicated=lambda: self._met_others)
        with nullcontext() if exchanges else collectives.local_gradients(self.wrapped):
            return run(batch)

    def _pass(
        self, step: int, normalizers: Tensor | None, exchanges: bool, clock: Clock, batch: Batch
    ) -> LossOutput:
        self._seed_draws(step, batch.number)
        self.statistics.begin_pass(self.model, batch.real)
        with self.precision.autocast():
            self.loss.before_forward(batch.images_B3HW)
            clock.lap("teacher")
            images = self.model.normalize(batch.images_B3HW)
            outputs = self.wrapped(*self.model.training_inputs(images, Targets.of(batch)))
        clock.lap("forward")
        targets = batch.boxes_BM4, batch.labels_BM, batch.mask_BM
        output: LossOutput = self.loss(outputs, *targets, step, normalizers)
        clock.lap("loss")
        self._met_others |= exchanges and ranks.world_size() > 1
        # A blank batch (end of an epoch, out of memory, no images) runs the same collectives, but
        # yields no gradient.
        with nullcontext() if batch.real else self._gradients.adding_zeros():
            self.precision.scale(sum_losses(output) / self._settings.loss_divisor).backward()
        clock.lap("backward")
        return output if batch.real else zero_losses(output)

    def _seed_draws(self, step: int, number: int) -> None:
        """Seeds the model's random numbers from seed, step and micro-batch.

        So they are the same on any number of ranks, and in a resumed run.  Ranks that share a
        micro-batch also use their rank, because they have different images of it.
        """
        which = (number, ranks.rank()) if self.statistics.spread else (number,)
        draws = np.random.SeedSequence([self._settings.seed, step, *which])
        paddle.seed(int(draws.generate_state(1)[0]))

    def _pack_counts(self, micro_batches: list[Batch], sums: LossSums) -> Tensor:
        """Packs this rank's part of `Totals`; a later stop request waits for the next step."""
        real = [batch for batch in micro_batches if batch.real]
        counts = [float(sum(batch.images_B3HW.shape[0] for batch in real)), float(len(real))]
        for policy in self.policies:
            votes = policy.vote(micro_batches)
            counts += [float(votes[name]) for name in policy.votes]
        finite = paddle.isfinite(sums.loss).astype("float32") * self.statistics.finite()
        return paddle.concat([device.put(counts), 1.0 - finite, *sums.terms.values()])

    def _decide(self, totals: Totals) -> Verdict:
        return max([Verdict.APPLY, *(policy.verdict(totals.votes) for policy in self.policies)])

    def _factor(self, divisor: float) -> float:
        """Returns what turns the rank-mean gradient of total / loss_divisor into the mean's."""
        return self._settings.loss_divisor * ranks.world_size() / divisor

    def _read_factor(self, message: Tensor, sums: LossSums) -> float:
        """Waits for `_factor`, including the loss scale; nan if no rank will apply the step."""
        totals = Totals.of(collectives.read(message), self._votes)
        if totals.broken or self._decide(totals) is not Verdict.APPLY:
            return math.nan
        factor = self._factor(sums.normalise(totals.terms).divisor)
        return factor / (self.precision.loss_scale or 1.0)  # 0: losses are not scaled

    def _update(self, factor: float, norm: float, rates: LearningRates) -> None:
        """Normalises, clips and applies the gradients.  Args: norm: before clipping."""
        clip_norm = self._settings.clip_norm
        if clip_norm is not None and norm > clip_norm:
            factor *= clip_norm / norm
        self._gradients.apply(factor, rates)

    def _finish(self, step: int, verdict: Verdict) -> bool:
        """Ends a step; ranks exchange weights if this is due and the step is not repeated.

        Collective.

        Returns: True if all ranks now hold the same weights.
        """
        synchronised = verdict is not Verdict.REPEAT and self.exchange.finish(step)  # collective
        if synchronised:
            self.statistics.average()  # collective: means over ranks
        for policy in self.policies:
            policy.after_update(step, verdict, synchronised)  # collective
        return synchronised

    def _reject(
        self, bad: bool, totals: Totals, sums: LossSums, recheck: Callable[[], list[str]]
    ) -> tuple[bool, list[str]]:
        """Undoes gradients and running statistics; halves the loss scale if `bad`.  Collective.

        Args: bad: whether a value was not finite.  recheck: see `_name_broken_gradients`.
        Returns: `searching` and `own_not_finite` of `StepResult`.
        """
        self.precision.reject(lowers_scale=bad)
        searching = bad and not totals.broken and self.precision.loss_scale >= 1.0
        if bad and totals.broken:
            not_finite = sums.not_finite() + self.statistics.not_finite()
        else:
            not_finite = recheck() if bad and not searching else []  # collective: SyncBN
        self._gradients.drop()
        self.statistics.undo()
        return searching, not_finite

    def _name_broken_gradients(
        self, micro_batches: list[Batch], step: int, normalizers: Tensor | None
    ) -> list[str]:
        """Names the gradients that are not finite for this rank's own images.  Collective.

        After the exchange all ranks hold the same gradients, so this rank computes its own again.
        """
        self._gradients.drop()
        self.statistics.undo()
        with collectives.local_gradients(self.wrapped):
            for batch in micro_batches:
                self._pass(step, normalizers, False, Clock(), batch)
        return self._gradients.not_finite()
