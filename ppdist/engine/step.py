"""One optimizer step, from micro-batches to updated weights, the same on one rank and on many."""

import math
import time
from collections.abc import Container, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import paddle
from paddle import nn
from pydantic import Field

from ppdist import dist
from ppdist.config import Section
from ppdist.data.sample import Batch
from ppdist.losses import Loss, LossOutput
from ppdist.models.detector import ImageModel
from ppdist.optim.averaging import Averaging
from ppdist.optim.ema import EMA
from ppdist.optim.optimizer import biases, set_rates
from ppdist.optim.schedule import Rates
from ppdist.optim.sharding import Sharding


class AmpConfig(Section):
    """Automatic mixed precision; GPUs only (Paddle has no such kernels on CPU)."""

    enabled: bool = Field(default=False, description="Compute in a lower precision on GPUs.")
    dtype: Literal["float16", "bfloat16"] = Field(
        default="float16", description="float16 needs loss scaling (done); bfloat16 does not."
    )
    level: Literal["O1", "O2"] = Field(
        default="O1", description="O1: chosen operators; O2: the whole model, float32 masters."
    )


class Clock:
    """Wall seconds of the parts of a step; on a GPU they mean something with `synchronize` only."""

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Books the time since the previous lap under a name."""
        if self.synchronize and dist.on_gpu():
            paddle.device.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step: sums over all ranks and micro-batches."""

    losses: dict[str, float]  # `loss` and its parts, normalised like the gradient
    images: int
    gradient_norm: float  # before clipping
    applied: bool  # False: something was not finite somewhere and no rank updated
    synchronised: bool  # all ranks hold the same weights now
    stop_requested: bool  # some rank was asked to stop
    bad_images: dict[int, str]  # position -> why: what this rank alone met, and was not known
    bad_somewhere: bool  # some rank met one


class TrainStep:
    """Forward, backward, gradient averaging, finite check, clipping, update, EMA.

    The loss gives a *sum* and its normalizer.  Dividing by the normalizer of all ranks and all
    micro-batches has to wait until the last of them is known, and division commutes with the
    gradient, so gradients of sums are accumulated and divided once:

        g = sum over ranks and micro-batches of grad(total) / max(1, sum of normalizers)

    which is the gradient of one rank with one large batch, however the images were dealt out.
    A loss that knows its divisors from the targets alone gets them summed beforehand instead.
    Every rank calls the step with the same number of micro-batches and reaches the same
    collectives: one gradient all-reduce (inside the last backward, or after it) and one or two
    small ones.
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
        averaging: Averaging,
        sharding: Sharding | None,
        loss_divisor: float,
        average_statistics: bool,
    ) -> None:
        """
        Args:
            averaging: makes the gradients of all ranks one.
            sharding: each rank updates its share of the parameters; None: all of them.
            loss_divisor: keeps loss sums in the range of low precisions; cancels out exactly.
            average_statistics: average running statistics of batch norm over ranks with the
                weights, so that ranks without SyncBN stay identical.  Nothing to do on one rank.
        """
        self.model = model
        self.wrapped = dist.wrap(model)
        self.loss = loss
        self.optimizer = optimizer
        self.ema = ema
        self.amp = amp
        self.clip_norm = clip_norm
        self.averaging = averaging
        self.sharding = sharding
        self._updates = 0  # since the ranks held the same weights
        self.loss_divisor = loss_divisor
        self.scaler = paddle.amp.GradScaler(
            enable=amp.enabled and amp.dtype == "float16", init_loss_scaling=1024.0
        )
        self._biases = biases(model)
        self._parameters = [p for p in model.parameters() if not p.stop_gradient]
        self._statistics = _running_statistics(model) if average_statistics else []

    def __call__(
        self,
        batches: Iterator[Batch],
        count: int,
        step: int,
        rates: Rates,
        stop: bool,
        clock: Clock,
        known_bad: Container[int] = (),
    ) -> StepResult:
        """Takes `count` micro-batches from `batches` and makes one optimizer step.

        Args: known_bad: positions of images that all ranks know to be bad.
        """
        self.optimizer.clear_grad()
        self.loss.prepare(self.model, step)
        images = 0
        bad_images: dict[int, str] = {}
        sums: dict[str, paddle.Tensor] = {}
        micro_batches = [next(batches) for _ in range(count)]
        clock.lap("data")
        totals = self._totals(micro_batches)
        clock.lap("communication")
        for micro, batch in enumerate(micro_batches):
            communicates = micro == count - 1 and self.averaging.during_backward
            with nullcontext() if communicates else dist.local_gradients(self.wrapped):
                output = self._forward_backward(batch, step, totals, clock)
            images += batch.images_B3HW.shape[0] if batch.real else 0
            bad_images |= {at: why for at, why in batch.bad_images.items() if at not in known_bad}
            terms = {"normalizer": output.normalizer, "loss": output.total, **output.parts}
            for name, value in terms.items():
                sums[name] = sums.get(name, paddle.zeros([1])) + value.detach().reshape([1])
        finite = paddle.isfinite(sums["loss"]).astype("float32")
        counts = paddle.to_tensor([float(images), float(stop), float(len(bad_images))])
        facts = [counts, 1.0 - finite, *sums.values()]
        tally = dist.all_reduce_sum(paddle.concat(facts)).numpy()
        clock.lap("communication")
        total_images, stops, bad, broken, normalizer, *values = (float(value) for value in tally)
        divisor = max(1.0, normalizer)
        norm, applied = self._update(rates, divisor, broken == 0)
        self._synchronise(step, applied)
        clock.lap("optimizer")
        names = [name for name in sums if name != "normalizer"]
        return StepResult(
            losses={name: value / divisor for name, value in zip(names, values)},
            images=round(total_images),
            gradient_norm=norm,
            applied=applied,
            synchronised=self.averaging.synchronised(step),
            stop_requested=stops > 0,
            bad_images=bad_images,
            bad_somewhere=bad > 0,
        )

    @paddle.no_grad()
    def _totals(self, micro_batches: list[Batch]) -> paddle.Tensor | None:
        """What the loss counts in the targets of all micro-batches and ranks; every rank calls it.

        One kind of loss counts always, another never, so the collective is reached by all or none.
        """
        counts = []
        for batch in micro_batches:
            size = batch.images_B3HW.shape[2], batch.images_B3HW.shape[3]
            count = self.loss.counts(batch.boxes_BM4, batch.labels_BM, batch.mask_BM, size)
            if count is None:
                return None
            counts.append(count * float(batch.real))
        return dist.all_reduce_sum(paddle.add_n(counts))

    def _forward_backward(
        self, batch: Batch, step: int, totals: paddle.Tensor | None, clock: Clock
    ) -> LossOutput:
        # A blank image must not enter running statistics.  Synchronised ones are the exception:
        # while any rank has images their collectives need all, so there it counts as one more.
        needed = batch.real_somewhere and not self._statistics
        self.model.train() if batch.real or needed else self.model.eval()
        with paddle.amp.auto_cast(
            enable=self.amp.enabled, dtype=self.amp.dtype, level=self.amp.level
        ):
            outputs = self.wrapped(self.model.normalize(batch.images_B3HW))
        clock.lap("forward")
        output = self.loss(outputs, batch.boxes_BM4, batch.labels_BM, batch.mask_BM, step, totals)
        if not batch.real:  # a rank past the end of an epoch: same graph, same collectives, no say
            output = LossOutput(
                total=output.total * 0.0,
                normalizer=output.normalizer * 0.0,
                parts={name: part * 0.0 for name, part in output.parts.items()},
            )
        clock.lap("loss")
        self.scaler.scale(output.total / self.loss_divisor).backward()
        clock.lap("backward")
        return output

    @paddle.no_grad()
    def _update(self, rates: Rates, divisor: float, finite: bool) -> tuple[float, bool]:
        """Divides, checks, clips and applies the gradients; the same decision on every rank,
        because all ranks hold the same norm and the same tally."""
        _make_float32(self._parameters)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Gradients will be the mean over ranks of grad(total / loss_divisor).
        factor = self.loss_divisor * dist.world_size() / divisor
        loss_scale = self.scaler.state_dict()["scale"][0] if self.scaler.is_enable() else 1.0
        self.averaging.gradients(gradients, factor / float(loss_scale) if finite else math.nan)
        self.scaler.unscale_(self.optimizer)
        norm = self.averaging.norm(_norm(gradients) * factor)
        applied = finite and math.isfinite(norm)
        if applied:
            if self.clip_norm is not None and norm > self.clip_norm:
                factor *= self.clip_norm / norm
            for gradient in gradients:
                gradient.scale_(factor)
            set_rates(self.optimizer, self._biases, rates)
            with nullcontext() if self.sharding is None else self.sharding.only_mine():
                self.scaler.step(self.optimizer)
            if self.sharding is not None:
                self.sharding.exchange()
        self.scaler.update()
        if not applied:
            _lower_scale(self.scaler)
        return norm, applied

    def _synchronise(self, step: int, applied: bool) -> None:
        """What all ranks have in common after an update; every rank calls it."""
        self._updates += applied
        self.averaging.updated(step)
        if self.averaging.synchronised(step):
            dist.mean_tensors(self._statistics)
            if self.ema is not None:
                self.ema.update(self._masters(), self._updates)
            self._updates = 0

    def _masters(self) -> dict[str, paddle.Tensor]:
        """Float32 masters of low-precision parameters (AMP O2), by state-dict key."""
        masters = self.optimizer._master_weights
        named = self.model.named_parameters()
        return {key: masters[p.name] for key, p in named if p.name in masters}


def _make_float32(parameters: list[paddle.Tensor]) -> None:
    """Gives parameters of lower precision (AMP O2) float32 gradients, so that unscaling, clipping
    and the update lose nothing.

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


def _lower_scale(scaler: paddle.amp.GradScaler) -> None:
    """Halves the loss scale after a step that was not applied; `update` took it for a good one.

    GradScaler hears of an overflow only in its own `step`, which still updates where nothing but
    the loss was not finite; and what it prints of an overflow is an error from numpy 2.4 on.
    """
    if scaler.is_enable():
        state = scaler.state_dict()
        lower = state["scale"] * scaler.get_decr_ratio()
        scaler.load_state_dict({**state, "scale": lower, "incr_count": 0})


def _norm(gradients: list[paddle.Tensor]) -> float:
    # dot: (g ** 2).sum() took 13 times as long on a CPU
    flat = [gradient.flatten().astype("float32") for gradient in gradients]
    return math.sqrt(float(paddle.stack([paddle.dot(g, g) for g in flat]).sum()))


def _running_statistics(model: nn.Layer) -> list[paddle.Tensor]:
    norms = (nn.BatchNorm1D, nn.BatchNorm2D)
    layers = [layer for layer in model.sublayers() if isinstance(layer, norms)]
    return [tensor for layer in layers for tensor in (layer._mean, layer._variance)]
