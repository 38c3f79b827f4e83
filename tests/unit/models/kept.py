"""A builder of models that builds each of them once."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from paddle import nn


def built_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """A builder that gives the same model for the same arguments, with the values it began with.

    Building costs twenty times what setting values does.  For tests that change values alone, and
    that never need two models of the same arguments at a time.
    """
    kept: dict[Any, tuple[nn.Layer, dict[str, np.ndarray]]] = {}

    @wraps(build)
    def take(*args: Any, **keys: Any) -> nn.Layer:
        which = args, tuple(sorted(keys.items()))
        if which not in kept:
            model = build(*args, **keys)
            kept[which] = model, {key: each.numpy() for key, each in model.state_dict().items()}
        model, start = kept[which]
        for key, value in model.state_dict().items():
            value.set_value(start[key])
        return model

    return take
