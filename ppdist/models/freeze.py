"""Frozen parts of a model: weights and statistics that training leaves as they are."""

import math
from collections.abc import Sequence

from paddle import nn

from ppdist.errors import ConfigError
from ppdist.models.stages import stages_of

_NORMS = (nn.BatchNorm1D, nn.BatchNorm2D, nn.SyncBatchNorm)
Freeze = int | Sequence[str] | None  # see `frozen_keys`


def freeze(model: nn.Layer, what: Freeze) -> frozenset[str]:
    """Stops the training of parts of a model, in place; every rank calls it alike, before an
    optimizer is built.

    Their weights get no gradient and so neither an update nor decay; their batch norms normalise
    by the running statistics and leave them alone, also in training mode.  Nothing is computed
    backwards for what comes before the first weight that trains.

    Args: what: see `frozen_keys`.
    Returns: state-dict keys of what does not change any more.
    Raises: ConfigError: see `frozen_keys`.
    """
    keys = frozen_keys(model, what)
    for key, parameter in model.named_parameters():
        if key in keys:
            parameter.stop_gradient = True
    for name, layer in model.named_sublayers():
        if isinstance(layer, _NORMS) and f"{name}._mean" in keys:
            layer._use_global_stats = True
    return keys


def frozen_keys(model: nn.Layer, what: Freeze) -> frozenset[str]:
    """The state-dict keys that `train.freeze` means.

    Args:
        what: so many stages of the backbone, counted from the image (the stem is the first; see
            `stages_of`), or the beginnings of keys, whole names between dots, such as `backbone` or
            `neck.fpn_stages.0`.  None: nothing.
    Raises: ConfigError: the backbone has fewer stages, no weight has such a key, or nothing is left
        to train.
    """
    if what is None:
        return frozenset()
    keys = list(model.state_dict())
    if isinstance(what, int):
        stages = stages_of(keys)
        backbone = [name for name in stages if name.startswith("backbone")]
        if what > len(backbone):
            raise ConfigError(
                f"{what}: the backbone of this model has {len(backbone)} stages "
                f"({', '.join(backbone)})",
                code="freeze_too_many_stages",
                where="train.freeze",
                fix=(
                    "to freeze more than it, give the beginnings of keys, such as [backbone, "
                    f"{next(n for n in stages if n not in backbone)}]"
                ),
            )
        frozen = frozenset(key for name in backbone[:what] for key in stages[name])
    else:
        frozen = frozenset(key for prefix in what for key in _beginning_with(prefix, keys))
    if all(key in frozen for key, each in model.named_parameters() if not each.stop_gradient):
        raise ConfigError(
            "nothing is left to train",
            code="freeze_leaves_nothing",
            where="train.freeze",
            fix="freeze less",
        )
    return frozen


def _beginning_with(prefix: str, keys: list[str]) -> list[str]:
    """Raises: ConfigError: none does."""
    beginning = prefix.rstrip(".")
    found = [key for key in keys if key == beginning or key.startswith(f"{beginning}.")]
    if beginning and found:
        return found
    # As far as the key is right, what could go on there.
    parts = beginning.split(".")
    known, after = "", keys
    while parts and (inside := [k for k in keys if k.startswith(f"{known}{parts[0]}.")]):
        known += f"{parts.pop(0)}."
        after = inside
    choices = dict.fromkeys(key.removeprefix(known).split(".")[0] for key in after)
    raise ConfigError(
        f"no weight of this model has a key that begins with {prefix!r}; expected "
        f"{known or 'one of '}{'{' if known else ''}{', '.join(choices)}{'}' if known else ''}",
        code="freeze_unknown_key",
        where="train.freeze",
    )


def freezing(model: nn.Layer, what: Freeze) -> list[str]:
    """A line for the log: what of the model is frozen; nothing where nothing is.

    Raises: ConfigError: see `frozen_keys`.
    """
    keys = frozen_keys(model, what)
    if not keys:
        return []
    sizes = {key: math.prod(value.shape) for key, value in _weights(model).items()}
    frozen = sum(size for key, size in sizes.items() if key in keys)
    whole = [name for name, inside in stages_of(model.state_dict()).items() if keys >= {*inside}]
    which = f" ({', '.join(whole)})" if whole else ""
    return [
        f"frozen: {frozen} of {sum(sizes.values())} weights{which}; they and their running "
        f"statistics stay as they are"
    ]


def _weights(model: nn.Layer) -> dict:
    """Parameters by key, without the running statistics, which Paddle counts among them."""
    named = model.named_parameters()
    return {key: each for key, each in named if not key.endswith(("._mean", "._variance"))}
