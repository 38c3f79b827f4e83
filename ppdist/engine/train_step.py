"""One optimizer step, from `clear_grad` to EMA."""

import math
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn

from ppdist.common.errors import StorageError, is_out_of_memory
from ppdist.config.train import AmpConfig
from ppdist.cpu.precision import Kernels, compute_in
from ppdist.data.types import Arrays, Batch, ImagesUnavailable
from ppdist.distributed import comm, device, heartbeat, paddle_api
from ppdist.distributed.sync_batch_norm import SyncBatchNorm2D
from ppdist.engine.distillation import Distillation
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel, Targets
from ppdist.optim.ema import EMA
from ppdist.optim.flat_storage import FlatGradients, FlatStorage
from ppdist.optim.grad_sync import AllReduceSync, Sharding
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import biases, set_rates

_NORMALIZER, _LOSS = "normalizer", "loss"
_SEPARATE = "separate "  # before the names of the loss that has a normalizer of its own


class Clock:
    """Wall seconds of the parts of a step.

    On an accelerator they are meaningful only with `synchronize`.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Books the time since the previous lap under a name."""
        if self.synchronize:
            device.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class StepResult:
    """Results of a step: sums over all ranks and micro-batches.

    Every rank has them.
    """

    losses: dict[str, float]  # `loss` and its parts, normalised like the gradient
    images: int
    gradient_norm: float  # before clipping
    applied: bool  # False: something was not finite somewhere and no rank updated
    stop_requested: bool  # some rank was asked to stop, and all hold the same weights now
    bad_images: dict[int, str]  # position -> why: what this rank alone met, and was not known
    bad_somewhere: bool  # some rank met one
    searching: bool  # not applied, because the loss scale of float16 was still too high
    given_up: bool  # some rank had no memory, or no images, for it: as if there had been no step
    ran_out: bool  # this rank, of memory
    outage: StorageError | None  # why this rank had no images
    own_loss: float  # sum over this rank's images, not normalised
    own_images: list[int]  # positions of the images of this rank, where the step was not applied
    not_finite: list[str]  # names of terms of this rank that were not finite and stopped the step
    own_micro_batches: float  # of images, of this rank; of one that is spread, an even share is 1
    time_is_up: bool = False  # decided by rank 0; all ranks hold the same weights now


class NormalisedLosses(NamedTuple):
    """What a step's sums over all ranks and micro-batches come to.

    losses: `loss` and its parts, normalised.
    divisor: of the gradients.
    separate: what gradients of `Loss.separate_keys` are multiplied by before, as their divisor is
        another.
    """

    losses: dict[str, float]
    divisor: float
    separate: float


class _Tally(NamedTuple):
    """Sums that ranks exchange in a step, in transfer and reading order."""

    images: float
    micro_batches: float  # of images, not padding
    stops: float  # ranks that were asked to stop
    late: float  # 1: rank 0 says that the time is up
    bad_images: float
    short: float  # ranks of too little memory, or without images
    broken: float  # ranks whose loss or running statistics are not finite
    sums: dict[str, float]  # see `add_up`

    @classmethod
    def of(cls, values: list[float], names: Iterable[str]) -> "_Tally":
        sums = dict(zip(names, values[_COUNTS:], strict=True))
        return cls._make([*values[:_COUNTS], sums])


_COUNTS = len(_Tally._fields) - 1  # before the sums


class TrainStep:
    """Forward, backward, gradient averaging, finite check, clipping, update, EMA.

    The loss gives a *sum* and its normalizer.  Dividing by the normalizer of all ranks and all
    micro-batches has to wait until the last of them is known, and division commutes with the
    gradient, so gradients of sums are accumulated and divided once:

        g = sum over ranks and micro-batches of grad(total) / max(1, sum of normalizers)

    which is the gradient of one rank with one large batch, however the images were dealt out.
    A loss that knows its divisors from the targets alone gets them summed beforehand instead, and
    parameters that a term with a normalizer of its own trains, and nothing else, have that divisor.

    Running statistics of batch norm make one update a step, too, by the mean over its M micro-
    batches, of whatever ranks, of what each was normalised by:

        running <- rho * running + (1 - rho) / M * sum over micro-batches of statistic

    Collective: every rank calls the step with at least one micro-batch, if need be a blank one, and
    reaches the same collectives: one gradient all-reduce (inside the last backward, or after it)
    and one or two small ones.  Where batch norm meets in forward and backward all have equally
    many.

    The host reads once from the device, whether to apply and by what to divide, when all but the
    update is queued; see `_read`.  A loss with a Hungarian matching reads in each micro-batch, too.
    """

    def __init__(
        self,
        *,
        model: ImageModel,
        loss: Loss,
        optimizer: paddle.optimizer.Optimizer,
        ema: EMA | None,
        amp: AmpConfig,
        clip_norm: float | None,
        grad_sync: AllReduceSync,
        sharding: Sharding | None,
        loss_divisor: float,
        spread: bool,
        seed: int,
        distillation: Distillation | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """
        Args:
            grad_sync: makes the gradients of all ranks one.
            sharding: each rank updates its share of the parameters; None: all of them.
            loss_divisor: keeps loss sums in the range of low precisions; cancels out exactly.
            spread: each micro-batch is spread over all ranks, whose batch norm meets in it.
            seed: of what the model draws at random, with the step and the micro-batch.
            distillation: a teacher; None: the ground truth alone teaches.
            kernels: what oneDNN layers compute `amp` with, on a CPU; None: Paddle's autocast.
        """
        self.model = model
        self.wrapped = comm.wrap(model)
        self.loss = loss
        self.optimizer = optimizer
        self._fleet_optimizer = comm.wrap_optimizer(optimizer)
        self.ema = ema
        self.amp = amp
        self.clip_norm = clip_norm
        self.grad_sync = grad_sync
        self.sharding = sharding
        self.loss_divisor = loss_divisor
        self.distillation = distillation
        self.kernels = kernels
        self._updates = 0  # since the ranks held the same weights
        self.scaler = paddle.amp.GradScaler(
            enable=amp.enabled and amp.dtype == "float16", init_loss_scaling=1024.0
        )
        self._biases = biases(model)
        self._parameters = [p for p in model.parameters() if not p.stop_gradient]
        named = model.named_parameters()
        self._separate = [
            p for key, p in named if loss.separate_keys and key.startswith(loss.separate_keys)
        ]
        statistics = running_statistics(model)
        self._statistics = FlatStorage(statistics) if statistics else None
        if self._statistics is not None:
            self._places = self._statistics.places()
        self._sync_norms = [n for n in model.sublayers() if isinstance(n, SyncBatchNorm2D)]
        self._spread = spread and comm.world_size() > 1
        self._norms_meet = bool(statistics) and self._spread
        # Micro-batches since the ranks held the same statistics: this rank's, all ranks'.
        self._counted = self._counted_everywhere = 0.0
        self._seed = seed
        self._in_backward = False
        self._flat_gradients: FlatGradients | None = None  # of the last step

    def __call__(
        self,
        batches: Iterator[Batch],
        numbers: Sequence[int],
        step: int,
        rates: LearningRates,
        stop: bool,
        clock: Clock,
        known_bad: Container[int] = (),
        time_is_up: bool = False,
    ) -> StepResult:
        """Takes this rank's micro-batches from `batches` and makes one optimizer step.

        Args:
            numbers: which micro-batches of the step they are; see `TrainSampler.numbers`.
            known_bad: positions of images that all ranks know to be bad.
            time_is_up: what rank 0 tells the others; theirs is False.
        """
        self.optimizer.clear_grad()
        if self._flat_gradients is not None:
            self._flat_gradients.release()
        equal = self.grad_sync.synchronised(step - 1)  # the ranks' weights
        if equal and self.ema is not None and self.ema.is_due_to_restart(step):
            self.ema.restart(self._masters())
        self.loss.prepare(self.model, step)
        heartbeat.at("waiting for its images")
        micro_batches, outage = _taken(batches, len(numbers))
        heartbeat.at("")
        clock.lap("data")
        before = None if self._statistics is None else self._statistics.gather().clone()
        global_normalizers = self._global_normalizers(micro_batches)
        clock.lap("communication")
        sums, fitted = self._gradients(
            micro_batches, numbers, step, before, global_normalizers, clock
        )
        bad_images: dict[int, str] = {}
        for batch in micro_batches:
            bad_images |= {at: why for at, why in batch.bad_images.items() if at not in known_bad}
        real = [batch for batch in micro_batches if batch.real]
        images = sum(batch.images_B3HW.shape[0] for batch in real)
        finite = paddle.isfinite(sums[_LOSS]).astype("float32")
        if self._statistics is not None:
            finite *= paddle.isfinite(self._statistics.gather().sum()).astype("float32")
        short = not fitted or outage is not None
        own = images, len(real), stop, time_is_up, len(bad_images), short
        counts = [device.put([float(each) for each in own]), 1.0 - finite, *sums.values()]
        summed = comm.all_reduce_sum(paddle.concat(counts))
        clock.lap("communication")
        square = self._reduce(summed, list(sums))
        clock.lap("optimizer")
        *values, own_loss, square = _read(paddle.concat([summed, sums[_LOSS], square]))
        clock.lap("communication")
        tally = _Tally.of(values, sums)
        result = normalise_losses(tally.sums)
        norm, applied = math.nan, False
        if tally.short:
            forget_unscaling(self.scaler)
        else:
            norm, applied = self._update(rates, result.divisor, square, tally.broken == 0)
        searching = not (applied or tally.short or tally.broken) and loss_scale(self.scaler) >= 1.0
        not_finite: list[str] = []
        if applied:
            self._counted += len(real)
            self._counted_everywhere += tally.micro_batches
        else:
            if tally.broken:
                not_finite = self._broken_terms(sums)
            self._undo(before)
            if not (tally.short or tally.broken or searching):
                not_finite = self._broken_gradients(
                    micro_batches, numbers, step, global_normalizers
                )
                self._undo(before)
        if not tally.short:
            self._synchronise(step, applied)
        clock.lap("optimizer")
        # Local SGD: a request is made again in each step until one ends with the same weights.
        may_end = self.grad_sync.synchronised(step)
        return StepResult(
            losses=result.losses,
            images=round(tally.images),
            gradient_norm=norm,
            applied=applied,
            stop_requested=may_end and tally.stops > 0,
            bad_images=bad_images,
            bad_somewhere=tally.bad_images > 0,
            searching=searching,
            given_up=tally.short > 0,
            ran_out=not fitted,
            outage=outage,
            own_loss=own_loss,
            own_images=[] if applied else _positions(micro_batches),
            not_finite=not_finite,
            own_micro_batches=counted(micro_batches, self._spread, tally.images),
            time_is_up=may_end and tally.late > 0,
        )

    def skip(self, step: int) -> None:
        """Skips a step (0-based).  Collective."""
        self._synchronise(step, False)

    def forget(self) -> None:
        """Drops state kept between steps.

        For callers that have overwritten the weights.
        """
        self.optimizer.clear_grad()
        self._updates = 0
        self._counted = self._counted_everywhere = 0.0

    def _gradients(
        self,
        micro_batches: list[Batch],
        numbers: Sequence[int],
        step: int,
        before: Tensor | None,
        global_normalizers: paddle.Tensor | None,
        clock: Clock,
    ) -> tuple[dict[str, paddle.Tensor], bool]:
        """Adds up the gradients of this rank's micro-batches, and averages their statistics.

        Args:
            numbers: of the micro-batches in the step.
            before: the running statistics, which each of them moves for itself.
        Returns: sums of the normalizer, the loss and its parts; False: there was too little memory,
            and these are of less than all images.
        """
        sums: dict[str, paddle.Tensor] = {}
        fitted = True
        moved: Tensor | float = 0.0
        for micro, batch in enumerate(micro_batches):
            heartbeat.alive()
            self._draw_anew(step, numbers[micro])
            communicates = micro == len(micro_batches) - 1 and self.grad_sync.during_backward
            with nullcontext() if communicates else comm.local_gradients(self.wrapped):
                if fitted:
                    output = self._if_it_fits(batch, step, global_normalizers, clock, communicates)
                    fitted = output is not None
                if not fitted:
                    output = self._forward_backward(
                        _blank_batch(batch), step, global_normalizers, clock
                    )
            assert output is not None
            add_up(sums, output)
            if self._statistics is not None and before is not None and len(micro_batches) > 1:
                moved = self._statistics.gather() + moved
                self._set_statistics(before)
        if isinstance(moved, Tensor):
            self._set_statistics(moved / len(micro_batches))
        return sums, fitted

    def _draw_anew(self, step: int, number: int) -> None:
        """Makes what the model draws a function of seed, step and micro-batch.

        So it is the same on any number of ranks, and in a resumed run.  Ranks that share a micro-
        batch draw by their share, too.

        Args: number: of the micro-batch in the step.
        """
        which = (number, comm.rank()) if self._spread else (number,)
        draws = np.random.SeedSequence([self._seed, step, *which])
        paddle.seed(int(draws.generate_state(1)[0]))

    def _if_it_fits(
        self,
        batch: Batch,
        step: int,
        global_normalizers: paddle.Tensor | None,
        clock: Clock,
        communicates: bool,
    ) -> LossOutput | None:
        """Forward and backward; None: this rank has too little memory for it.

        Then a blank image can stand in, so that this rank reaches all collectives of the step and
        tells the others.

        Raises: MemoryError: it cannot, because ranks meet within forward or backward, and nobody
            knows which of these meetings were missed.
        """
        self._in_backward = False
        try:
            return self._forward_backward(batch, step, global_normalizers, clock)
        except Exception as error:
            meets = self._norms_meet or (communicates and self._in_backward)
            if not is_out_of_memory(error) or (meets and comm.world_size() > 1):
                raise
        # After the clause: the exception holds frames, and these hold the memory.
        device.release_memory()
        return None

    def _broken_terms(self, sums: dict[str, Tensor]) -> list[str]:
        """Names the terms of this rank that are not finite.

        They are parts of the loss, or the whole loss if no part is the cause, and running
        statistics.
        """
        counts = (_NORMALIZER, _SEPARATE + _NORMALIZER)
        names = [name for name, value in sums.items() if not math.isfinite(value.item())]
        names = [name.removeprefix(_SEPARATE) for name in names if name not in counts]
        names = sorted({*names} - {_LOSS}) or names
        if self._statistics is not None and not paddle.isfinite(self._statistics.gather()).all():
            names.append("running statistics")
        return names

    def _broken_gradients(
        self,
        micro_batches: list[Batch],
        numbers: Sequence[int],
        step: int,
        global_normalizers: Tensor | None,
    ) -> list[str]:
        """Names the gradients that this rank's images make not finite.  Collective.

        After the exchange all ranks hold the same gradients, so this rank computes its own again.
        """
        if self._flat_gradients is not None:
            self._flat_gradients.release()
        with comm.local_gradients(self.wrapped):
            for batch, number in zip(micro_batches, numbers, strict=True):
                self._draw_anew(step, number)
                self._forward_backward(batch, step, global_normalizers, Clock())
        return [
            f"gradient of {name}"
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
            and not bool(paddle.isfinite(parameter.grad.astype("float32")).all())
        ]

    @paddle.no_grad()
    def _undo(self, before: Tensor | None) -> None:
        """Undoes everything of a step that was not applied.

        Non-finite running statistics would stay so forever, and a step made again must not move
        them twice.
        """
        self.optimizer.clear_grad()
        if before is not None:
            self._set_statistics(before)

    @paddle.no_grad()
    def _set_statistics(self, values_F: Tensor) -> None:
        assert self._statistics is not None
        self._statistics.scatter(paddle.assign(values_F, self._statistics.gather()))

    @paddle.no_grad()
    def _global_normalizers(self, micro_batches: list[Batch]) -> paddle.Tensor | None:
        """What the loss counts in all targets of the step.  Collective.

        All targets are those of every micro-batch and rank.  One kind of loss always counts,
        another never, so the collective is reached by all or none.
        """
        counts = []
        for batch in micro_batches:
            size = batch.images_B3HW.shape[2], batch.images_B3HW.shape[3]
            count = self.loss.local_normalizers(
                batch.boxes_BM4, batch.labels_BM, batch.mask_BM, size
            )
            if count is None:
                return None
            counts.append(count if batch.real else paddle.zeros_like(count))
        return comm.all_reduce_sum(paddle.add_n(counts))

    def _forward_backward(
        self, batch: Batch, step: int, global_normalizers: paddle.Tensor | None, clock: Clock
    ) -> LossOutput:
        # A blank image must not enter running statistics.  Synchronised ones need all ranks in
        # their collectives, where such a rank then counts for nothing.
        self.model.train() if batch.real or self._spread else self.model.eval()
        for norm in self._sync_norms:
            norm.counts = batch.real
        taught = None
        with self._autocast():
            if self.distillation is not None:  # first: it keeps little, the student much
                taught = self.distillation.ask(batch.images_B3HW)
                clock.lap("teacher")
            images = self.model.normalize(batch.images_B3HW)
            outputs = self.wrapped(*self.model.training_inputs(images, Targets.of(batch)))
        clock.lap("forward")
        output = self.loss(
            outputs, batch.boxes_BM4, batch.labels_BM, batch.mask_BM, step, global_normalizers
        )
        if self.distillation is not None:
            output = self.distillation.teach(self.loss, output, outputs, taught, global_normalizers)
        clock.lap("loss")
        self._in_backward = True
        # A rank past the end of an epoch: the same graph and collectives, but no say.
        with nullcontext() if batch.real else adding_zeros(self._parameters):
            self.scaler.scale(whole(output) / self.loss_divisor).backward()
        clock.lap("backward")
        return output if batch.real else blank(output)

    def _autocast(self) -> AbstractContextManager[None]:
        """Forward passes of this step inside are in the precision of `amp`."""
        if self.kernels is not None:
            return compute_in(self.kernels)
        cast: AbstractContextManager[None] = paddle.amp.auto_cast(
            enable=self.amp.enabled, dtype=self.amp.dtype, level=self.amp.level
        )
        return cast

    @paddle.no_grad()
    def _reduce(self, summed: Tensor, names: list[str]) -> Tensor:
        """Reduces the gradients of all ranks to float32 ones.  Collective.

        Args:
            summed: the tally over all ranks, on the device.
            names: of the sums in it.
        Returns: the square of their norm, [1], of sums divided by `loss_divisor` and averaged.
        """
        make_float32(self._parameters)
        if self._separate:
            factor = _separate_factor(summed, names)
            for parameter in self._separate:
                if parameter.grad is not None:
                    parameter.grad.multiply_(factor)
        there = [p for p in self._parameters if p.grad is not None]
        factor = math.nan
        if self.grad_sync.needs_factor:
            tally = _Tally.of(_read(summed), names)
            if not tally.short and not tally.broken:
                factor = self._factor(normalise_losses(tally.sums).divisor)
                factor /= loss_scale(self.scaler) or 1.0
        self.grad_sync.gradients([p.grad for p in there], factor)
        self.scaler.unscale_(self._fleet_optimizer)
        if self._flat_gradients is None or not _same(there, self._flat_gradients.parameters):
            self._flat_gradients = FlatGradients(there)
            paddle_api.forget_update_lists(self.optimizer)
        self._flat_gradients.collect()
        return self.grad_sync.norm_square(self._flat_gradients.square())

    @paddle.no_grad()
    def _update(
        self, rates: LearningRates, divisor: float, square: float, finite: bool
    ) -> tuple[float, bool]:
        """Divides, clips and applies the gradients.  Collective.

        The decision is the same on every rank, because all hold the same norm and the same tally.
        Args: square: see `_reduce`.
        Returns: the norm before clipping; whether the gradients were applied.
        """
        factor = self._factor(divisor)
        norm = math.sqrt(square) * factor
        applied = finite and math.isfinite(norm)
        if applied:
            if self.clip_norm is not None and norm > self.clip_norm:
                factor *= self.clip_norm / norm
            assert self._flat_gradients is not None
            self._flat_gradients.scale_(factor)
            set_rates(self.optimizer, self._biases, rates)
            with nullcontext() if self.sharding is None else self.sharding.only_mine():
                self.scaler.step(self._fleet_optimizer)
            if self.sharding is not None:
                self.sharding.exchange()
        self.scaler.update()
        if not applied:
            lower_scale(self.scaler)
        return norm, applied

    def _factor(self, divisor: float) -> float:
        """Factor from the rank-mean gradient to that of the mean loss.

        The rank mean is over grad(total / loss_divisor).
        """
        return self.loss_divisor * comm.world_size() / divisor

    def _synchronise(self, step: int, applied: bool) -> None:
        """Synchronises statistics and EMA of ranks after an update.  Collective."""
        self._updates += applied
        self.grad_sync.updated(step)
        if self.grad_sync.synchronised(step):
            if self._updates:  # else they are as they were, and a mean of equals may round
                self._average_statistics()
            if self.ema is not None:
                self.ema.update(self._masters(), self._updates)
            self._updates = 0
            self._counted = self._counted_everywhere = 0.0

    def _average_statistics(self) -> None:
        """Averages running statistics over ranks, by their micro-batches.  Collective.

        Without SyncBN each rank has moved them by its own.
        """
        if self._statistics is None or self._spread or comm.world_size() == 1:
            return
        own = self._statistics.gather()
        # Without the gaps: what else is in a message changes the order of sums over sockets.
        mean = paddle.gather(own, self._places)
        weight = self._counted / self._counted_everywhere * comm.world_size()
        if weight != 1.0:
            mean.scale_(weight)
        comm.mean_tensors([mean])
        self._statistics.scatter(paddle.assign(paddle.scatter(own, self._places, mean), own))

    def _masters(self) -> dict[str, paddle.Tensor]:
        """Float32 masters of low-precision parameters (AMP O2), by state-dict key."""
        masters = paddle_api.master_weights(self.optimizer)
        named = self.model.named_parameters()
        return {key: masters[p.name] for key, p in named if p.name in masters}


def _taken(batches: Iterator[Batch], count: int) -> tuple[list[Batch], StorageError | None]:
    """Micro-batches of a step, and why the last of them are blank.

    They are blank where their images are unavailable.
    """
    taken: list[Batch] = []
    try:
        for _ in range(count):
            taken.append(next(batches))
    except ImagesUnavailable as away:
        return [*taken, *[away.blank] * (count - len(taken))], away
    return taken, None


def counted(micro_batches: list[Batch], spread: bool, images: float) -> float:
    """This rank's micro-batches of images; see `StepResult.own_micro_batches`.

    Args: images: of the step, of all ranks.
    """
    real = [batch for batch in micro_batches if batch.real]
    if not spread or not real:
        return len(real)
    own = sum(batch.images_B3HW.shape[0] for batch in real)
    return len(micro_batches) * own * comm.world_size() / images


def _blank_batch(batch: Batch) -> Batch:
    """Batch without an image, shaped like another's first; see `Batch`."""
    return replace(batch, **{n: getattr(batch, n)[:1] for n in Arrays._fields}, real=False)


def _positions(micro_batches: list[Batch]) -> list[int]:
    """Positions of the images in the set's records."""
    found = [batch.image_index_B.numpy().ravel().tolist() for batch in micro_batches]
    return [int(index) for indices in found for index in indices if index >= 0]


def _read(values: Tensor) -> list[float]:
    """Copies values to the host, which waits here for the device.

    So it waits for the other ranks, too: on an accelerator a collective is only queued, and it is
    here that an early rank waits for the late ones, and that a hung rank is noticed.
    """
    meets = comm.world_size() > 1
    with heartbeat.Waiting("the sums of a step") if meets else nullcontext():
        return [float(value) for value in values.numpy()]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))


def running_statistics(model: nn.Layer) -> list[Tensor]:
    """Means and variances of batch norm that training moves, float32."""
    norms = (nn.BatchNorm1D, nn.BatchNorm2D)
    layers = [layer for layer in model.sublayers() if isinstance(layer, norms)]
    layers = [layer for layer in layers if not paddle_api.normalises_by_running(layer)]  # they stay
    return [tensor for layer in layers for tensor in paddle_api.running_statistics(layer)]


# Sums of a step, and what divides them


def whole(output: LossOutput) -> Tensor:
    """Loss to differentiate: 0-D, all of a micro-batch's loss."""
    return (
        output.total if output.separate_loss is None else output.total + output.separate_loss.total
    )


def blank(output: LossOutput) -> LossOutput:
    """Returns zeros under the same names.

    They are no products with 0: 0 x NaN is NaN, and a blank image may produce it in evaluation
    mode.
    """
    return LossOutput(
        total=paddle.zeros_like(output.total),
        normalizer=paddle.zeros_like(output.normalizer),
        parts={name: paddle.zeros_like(part) for name, part in output.parts.items()},
        separate_loss=None if output.separate_loss is None else blank(output.separate_loss),
    )


@contextmanager
def adding_zeros(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context in which a backward pass adds zeros to the gradients, whatever it computes.

    The hook of a leaf sees the gradient of one pass before it is added to earlier ones, and before
    an exchange inside the backward pass takes the sum.
    """
    hooks = [parameter.register_hook(paddle.zeros_like) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def add_up(sums: dict[str, Tensor], output: LossOutput) -> None:
    """Adds a micro-batch to the sums, [1] each.

    The normalizer comes first; the names are the same every time.
    """
    terms = {_NORMALIZER: output.normalizer, _LOSS: whole(output), **output.parts}
    if output.separate_loss is not None:
        separate = output.separate_loss
        terms |= {_SEPARATE + _NORMALIZER: separate.normalizer, _SEPARATE + _LOSS: separate.total}
        terms |= {_SEPARATE + name: part for name, part in separate.parts.items()}
    for name, value in terms.items():
        added = value.detach().reshape([1])
        sums[name] = sums[name] + added if name in sums else added


def normalise_losses(sums: dict[str, float]) -> NormalisedLosses:
    """Divides what `add_up` summed, over all ranks."""
    divisor = max(1.0, sums[_NORMALIZER])
    losses = {
        name: value / divisor
        for name, value in sums.items()
        if name != _NORMALIZER and not name.startswith(_SEPARATE)
    }
    if _SEPARATE + _NORMALIZER not in sums:
        return NormalisedLosses(losses, divisor, 1.0)
    own = max(1.0, sums[_SEPARATE + _NORMALIZER])
    total = sums[_SEPARATE + _LOSS]
    losses[_LOSS] = (sums[_LOSS] - total) / divisor + total / own
    for name, value in sums.items():
        if name.startswith(_SEPARATE) and name not in (_SEPARATE + _NORMALIZER, _SEPARATE + _LOSS):
            losses[name.removeprefix(_SEPARATE)] = value / own
    return NormalisedLosses(losses, divisor, divisor / own)


def _separate_factor(summed: Tensor, names: list[str]) -> Tensor:
    """What `normalise_losses` calls `separate`, 0-D float32, without waiting for it."""
    at, own = (_COUNTS + names.index(name) for name in (_NORMALIZER, _SEPARATE + _NORMALIZER))
    divisors = paddle.clip(summed.astype("float64"), min=1.0)
    return (divisors[at] / divisors[own]).astype("float32")


# Low precision


def make_float32(parameters: list[paddle.Tensor]) -> None:
    """Gives parameters of lower precision (AMP O2) float32 gradients.

    So unscaling, clipping and the update lose nothing.
    Not `master_grad` of `paddle.amp.decorate`, which does the same after every backward: the
    gradient all-reduce takes gradients in the precision of their parameters, so after the first
    of several micro-steps it would find another one.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != paddle.float32:
            wide = gradient.astype("float32")
            parameter.clear_gradient(False)  # it does not change its precision in place
            parameter.grad = wide


def loss_scale(scaler: paddle.amp.GradScaler) -> float:
    """Loss scale for float16; 0: losses are not scaled."""
    return float(scaler.state_dict()["scale"][0]) if scaler.is_enable() else 0.0


def forget_unscaling(scaler: paddle.amp.GradScaler) -> None:
    """Makes nothing of `unscale_` before a step that is made again."""
    if scaler.is_enable():
        state = scaler.state_dict()
        scaler.update()  # which counts it for a good one
        scaler.load_state_dict(state)


def lower_scale(scaler: paddle.amp.GradScaler) -> None:
    """Halves the loss scale after a skipped step.

    `update` took that step for a good one.  GradScaler hears of an overflow only in its own `step`,
    which still updates where nothing but the loss was not finite; and what it prints of an overflow
    is an error from numpy 2.4 on.
    """
    if scaler.is_enable():
        state = scaler.state_dict()
        lower = state["scale"] * scaler.get_decr_ratio()
        scaler.load_state_dict({**state, "scale": lower, "incr_count": 0})
