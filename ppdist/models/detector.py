"""What every detector offers: normalise, forward, decode, fuse."""

import math
from typing import Any

import paddle
from paddle import Tensor, nn

from ppdist.models.blocks import RepConv


class Detector(nn.Layer):
    """Base of all detectors.

        outputs = model(model.normalize(images_B3HW))     # the same tuple in train and eval mode
        loss = criterion(outputs, ...)                    # training
        scores_BNC, boxes_BN4 = model.decode(outputs)     # inference

    Attributes:
        num_classes: C.
        strides: pixels per cell of each output level, in the order of the outputs.
        pixel_mean, pixel_std: RGB, in units of 0..255; see `normalize`.
        class_layers: state-dict key prefixes of the layers whose shape depends on C; weights of
            another class count leave exactly these fresh.
    """

    class_layers: tuple[str, ...] = ()

    def __init__(
        self,
        num_classes: int,
        strides: tuple[int, ...],
        pixel_mean: tuple[float, float, float],
        pixel_std: tuple[float, float, float],
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.strides = strides
        self.pixel_mean = list(pixel_mean)
        self.pixel_std = list(pixel_std)
        self._statistics: dict[str, tuple[Tensor, Tensor]] = {}

    def normalize(self, images_B3HW: Tensor) -> Tensor:
        """RGB images 0..255, uint8 or float, to float32 with (value - mean) / std per channel."""
        images = images_B3HW.astype("float32")
        if len(set(self.pixel_std)) == 1 and not any(self.pixel_mean):
            return images * (1.0 / self.pixel_std[0])
        mean, std = self._pixel_statistics(images)
        return (images - mean) / std

    def _pixel_statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation [1, 3, 1, 1] beside the images, copied to their device once."""
        if not paddle.in_dynamic_mode():
            return _channels(self.pixel_mean), _channels(self.pixel_std)
        place = str(images.place)
        if place not in self._statistics:
            self._statistics[place] = _channels(self.pixel_mean), _channels(self.pixel_std)
        return self._statistics[place]

    def forward(self, images_B3HW: Tensor) -> Any:
        """Raw outputs of normalised images; H and W are multiples of the largest stride."""
        raise NotImplementedError

    def decode(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Raw outputs to scores_BNC in 0..1 and boxes_BN4, xyxy in input pixels, not clipped."""
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Weights, biases and norm scales, frozen ones too; running statistics are not counted."""
        return sum(
            math.prod(value.shape)
            for key, value in self.state_dict().items()
            if not key.endswith(("._mean", "._variance"))
        )

    def fuse(self) -> None:
        """Re-parameterises in place for deployment; eval outputs stay the same to rounding."""
        for layer in self.sublayers():
            if isinstance(layer, RepConv):
                layer.fuse()
        self.eval()


def _channels(values: list[float]) -> Tensor:
    return paddle.to_tensor(values, dtype="float32").reshape([1, 3, 1, 1])
