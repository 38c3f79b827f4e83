"""Layers of both families in plain numpy and float64: what the models are checked against.

Weights are looked up by the original's state-dict keys, so the layer numbering of YOLOv5 is checked
with them.  Images are [B, C, H, W].
"""

import numpy as np

from tests.reference.formulas import parity_value


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def conv(
    x: np.ndarray, weight_OIkk: np.ndarray, stride: int = 1, padding: int | None = None
) -> np.ndarray:
    """Cross-correlation with zero padding, (k - 1) / 2 unless given."""
    kernel = weight_OIkk.shape[2]
    pad = (kernel - 1) // 2 if padding is None else padding
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))
    return np.einsum(
        "bihwkl,oikl->bohw", windows[:, :, ::stride, ::stride], weight_OIkk, optimize=True
    )


def max_pool(x: np.ndarray, kernel: int) -> np.ndarray:
    """Stride 1, same size."""
    pad = kernel // 2
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)], constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3)).max((4, 5))


def twice(x: np.ndarray) -> np.ndarray:
    """Nearest neighbour."""
    return x.repeat(2, axis=2).repeat(2, axis=3)


def mean(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=(2, 3), keepdims=True)


class Net:
    """Conv and norm by key, with the weights of the formulas; shapes come from the inputs.

    Attributes:
        training: norms use the batch's own statistics.
        epsilon, mean_key, variance_key: of the norms, as the original's framework has them.
        asked: key and shape of every weight that was used.
    """

    def __init__(self, training: bool, epsilon: float, mean_key: str, variance_key: str) -> None:
        self.training, self.epsilon = training, epsilon
        self.mean_key, self.variance_key = mean_key, variance_key
        self.asked: dict[str, list[int]] = {}

    def get(self, key: str, *shape: int) -> np.ndarray:
        self.asked[key] = list(shape)
        value = parity_value(key, shape)
        assert value is not None
        return value.astype("float64")

    def norm(self, x: np.ndarray, key: str) -> np.ndarray:
        size = x.shape[1]
        if self.training:
            centre, variance = x.mean(axis=(0, 2, 3)), x.var(axis=(0, 2, 3))
        else:
            centre = self.get(f"{key}.{self.mean_key}", size)
            variance = self.get(f"{key}.{self.variance_key}", size)
        scale = self.get(f"{key}.weight", size) / np.sqrt(variance + self.epsilon)
        shift = self.get(f"{key}.bias", size) - centre * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)

    def plain_conv_norm(
        self,
        x: np.ndarray,
        key: str,
        out: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
    ) -> np.ndarray:
        weight = self.get(f"{key}.conv.weight", out, x.shape[1], kernel, kernel)
        return self.norm(conv(x, weight, stride, padding), f"{key}.bn")

    def conv_norm(
        self,
        x: np.ndarray,
        key: str,
        out: int,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
    ) -> np.ndarray:
        return silu(self.plain_conv_norm(x, key, out, kernel, stride, padding))

    def biased(self, x: np.ndarray, key: str, out: int, kernel: int = 1) -> np.ndarray:
        """A convolution with bias and nothing behind it."""
        weight = self.get(f"{key}.weight", out, x.shape[1], kernel, kernel)
        return conv(x, weight) + self.get(f"{key}.bias", out).reshape(1, -1, 1, 1)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def bce(logit: np.ndarray, target: np.ndarray | float) -> np.ndarray:
    """-t log p - (1 - t) log(1 - p) with p = sigmoid(logit)."""
    return softplus(logit) - target * logit


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of xyxy boxes, broadcast; negative sides have no overlap and no area."""
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    common = sides.clip(0).prod(-1)
    areas = [(x[..., 2:] - x[..., :2]).clip(0).prod(-1) for x in (a, b)]
    return common / (areas[0] + areas[1] - common + 1e-9)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)
