"""A class loss against its definition: the value, and the gradient by differences."""

from collections.abc import Callable

import numpy as np
from paddle import Tensor


def assert_value_and_slopes(
    got: Tensor, x: Tensor, by_definition: Callable[[np.ndarray], float]
) -> None:
    """Args: got: the loss of the logits x [2, 3, 6 or more]; both float64."""
    logits = x.numpy()
    got.backward()
    np.testing.assert_allclose(float(got), by_definition(logits), rtol=1e-6)
    for place in [(0, 0, 3), (0, 1, 5), (1, 2, 0), (1, 1, 2)]:
        ahead, behind = logits.copy(), logits.copy()
        ahead[place] += 1e-5
        behind[place] -= 1e-5
        slope = (by_definition(ahead) - by_definition(behind)) / 2e-5
        np.testing.assert_allclose(x.grad.numpy()[place], slope, rtol=1e-5, atol=1e-8)
