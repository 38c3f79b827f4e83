"""What a training step will take of memory, estimated before the first one is made.

    weights and statistics, their gradients, the optimizer's moments, the average
    + for each image of a micro-batch: the image, what forward keeps for backward, what the loss
      computes with
    + on the host: what a rank keeps to go back to, and what is being written

What forward keeps is counted, not guessed: Paddle says which tensors it saves.  A small image is
enough, because all of it grows with the number of pixels.  The rest are constants that were fitted
to measured steps; docs/batch.md says how far off it was on others.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle

from ppdist import dist
from ppdist.config.train import AmpConfig
from ppdist.engine.memory import CARD, room, shown
from ppdist.log import RunLog
from ppdist.models.detector import ImageModel

_FLOAT = 4  # bytes
_SIDE = 2  # of the small image, in multiples of the model's
_IN_LOSS = 4  # times the outputs: decoded, scored, and gradients of both
_IN_BACKWARD = 1.2  # times activations: gradients on their way, and gaps that the heap leaves
_LIBRARIES = 60 << 20  # what oneDNN and its like take with the first step


@dataclass(frozen=True)
class Estimate:
    """Bytes of a rank by what they hold, for a micro-batch of so many images."""

    images: int
    size: tuple[int, int]  # height, width in pixels
    weights: int
    gradients: int
    moments: int
    average: int
    activations: int  # of all images, themselves included

    @property
    def step(self) -> int:
        """On the device, bytes."""
        return self.weights + self.gradients + self.moments + self.average + self.activations

    @property
    def kept(self) -> int:
        """On the host: weights, moments and average to go back to, and those being written."""
        return 2 * (self.weights // 2 + self.moments + self.average) + _LIBRARIES

    @property
    def total(self) -> int:
        """Where all lies in the memory of the host."""
        return self.step + self.kept

    def line(self, on_card: bool) -> str:
        """For the log."""
        height, width = self.size
        device = f"{shown(self.step)} on its card and {shown(self.kept)} on the host"
        return (
            f"a step is estimated to take {device if on_card else shown(self.total)} of each rank: "
            f"weights {shown(self.weights)}, gradients {shown(self.gradients)}, moments "
            f"{shown(self.moments)}, average {shown(self.average)}, {self.images} images of "
            f"{height} x {width} pixels {shown(self.activations)}, kept and being written "
            f"{shown(self.kept)}"
        )


def tell_memory(expect: Callable[[], Estimate], log: RunLog) -> None:
    """Logs what a step will take, and warns of ranks that have less; every rank calls it.

    It ends no run: where the estimate cannot be made, a warning says so, and training shows.

    Args: expect: makes the estimate; each rank by itself.
    """
    try:
        expected = expect()
        line = expected.line(dist.on_gpu())
        own = list(shortages(expected, room(dist.local_size())))
    except Exception as error:  # whatever it is, a run that would train goes on
        line, own = "", [f"rank {dist.rank()} cannot estimate what memory a step takes: {error!r}"]
    warnings_W = dist.exchange(own)
    if line:
        log.info(line)
    for warning in (each for warnings in warnings_W for each in warnings):
        log.warning(warning)


def estimate(
    model: ImageModel,
    *,
    images: int,
    sizes: Sequence[tuple[int, int]],
    moments: int,
    averaged: bool,
    amp: AmpConfig,
    frozen: Collection[str] = (),
) -> Estimate:
    """Makes one small forward pass and changes nothing; a rank may do it by itself.

    Args:
        model: as built: on eager convolutions, batch norms not yet synchronised.
        images: of a micro-batch.
        sizes: (height, width) in pixels that training uses; the largest counts.
        moments: values that the optimizer keeps for each weight (momentum 1, AdamW 2).
        averaged: there is an EMA.
        amp: with it activations are counted in its precision.
        frozen: state-dict keys of what will not be trained.
    """
    state = {key: _bytes(tensor) for key, tensor in model.state_dict().items()}
    everything, still = sum(state.values()), sum(state[key] for key in frozen)
    learn = {key: each for key, each in model.named_parameters() if not each.stop_gradient}
    trained = sum(_bytes(each) for key, each in learn.items() if key not in frozen)
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    side = _SIDE * model.size_multiple
    with _held([each for key, each in learn.items() if key in frozen]):
        kept, outputs = saved_bytes(model, side, amp)
    inputs = 3 * side * side * (1 + 2 * _FLOAT)  # uint8, float32, normalised
    each = (kept + inputs + _IN_LOSS * outputs) * height * width / side**2
    return Estimate(
        images=images,
        size=(height, width),
        weights=2 * everything,  # and those that evaluation uses
        gradients=trained,
        moments=moments * trained,
        average=everything - still if averaged else 0,
        activations=round(_IN_BACKWARD * images * each),
    )


@contextmanager
def _held(weights: Sequence[paddle.Tensor]) -> Iterator[None]:
    """They get no gradient inside."""
    try:
        for each in weights:
            each.stop_gradient = True
        yield
    finally:
        for each in weights:
            each.stop_gradient = False


def saved_bytes(model: ImageModel, side: int, amp: AmpConfig) -> tuple[int, int]:
    """What forward saves for backward of one square image of so many pixels a side, and what comes
    out.

    In eval mode, which saves the same tensors and leaves running statistics alone.
    """
    found: dict[int, int] = {}

    def pack(tensor: paddle.Tensor) -> paddle.Tensor:
        found[tensor.data_ptr()] = _bytes(tensor)
        return tensor

    training = [layer for layer in model.sublayers(include_self=True) if layer.training]
    model.eval()
    image = paddle.zeros([1, 3, side, side], dtype="uint8")
    try:
        with (
            paddle.amp.auto_cast(enable=amp.enabled, dtype=amp.dtype),
            paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            outputs = model(model.normalize(image))
    finally:
        for layer in training:
            layer.training = True
    weights = {tensor.data_ptr() for tensor in model.state_dict().values()}
    saved = sum(size for address, size in found.items() if address not in weights)
    return saved, sum(map(_bytes, _tensors(outputs)))


def shortages(expected: Estimate, free: dict[str, int]) -> Iterator[str]:
    """A warning for each kind of memory of which this rank has less.

    Args: free: what it may still take, by kind.
    """
    needed = dict.fromkeys(free, expected.kept if CARD in free else expected.total)
    needed[CARD] = expected.step
    for kind, limit in free.items():
        if needed[kind] > limit:
            yield (
                f"rank {dist.rank()} (host {dist.host()}) has {shown(limit)} left of the {kind}, "
                f"and a step is estimated to take {shown(needed[kind])}; to try out what fits: "
                f"train.batch_size_per_card=auto train.total_batch=B, B the images of a step"
            )


def _tensors(outputs: Any) -> Iterator[paddle.Tensor]:
    """Those in nested tuples, lists and dictionaries."""
    if isinstance(outputs, paddle.Tensor):
        yield outputs
    elif outputs is not None:
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _tensors(part)


def _bytes(tensor: paddle.Tensor) -> int:
    return math.prod(tensor.shape) * int(tensor.element_size())
