"""Optimizers, parameter groups, and state by the model's parameter names."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ppdist.common.errors import CheckpointError, ConfigError
from ppdist.config.optimizer import OptimizerConfig, ParameterGroupConfig
from ppdist.distributed import paddle_api
from ppdist.models.base import ImageModel, expected_keys, matching_keys, weight_sizes

LR_FACTOR = "own_factor"  # beside Paddle's own "learning_rate" of a parameter
_POWERS = ("beta1_pow_acc", "beta2_pow_acc")  # these begin at beta, other accumulators at 0
_MASTER = re.compile(r"fp32_master_\d+")
_NORMS = (nn.BatchNorm1D, nn.BatchNorm2D, nn.LayerNorm, nn.GroupNorm)


def build_optimizer(
    model: nn.Layer, config: OptimizerConfig, lr: float, master_weights: bool
) -> paddle.optimizer.Optimizer:
    """Builds the optimizer over the trainable parameters of a model.

    Weight decay skips scales and shifts of normalisation layers, and with `decay_biases: false`
    every bias.  With `layer_decay` and `groups` a weight's rate is a multiple of the common one.

    Args:
        config: with decay, betas and epsilon for the total batch (`ScheduleSetup.scaled`).
        lr: the scaled peak rate; the trainer sets the rate of each step.
        master_weights: keep float32 copies of parameters held in a lower precision (AMP O2).
    """
    exempt = {
        id(parameter)
        for layer in model.sublayers()
        if isinstance(layer, _NORMS)
        for parameter in layer.parameters(include_sublayers=False)
    }
    if not config.decay_biases:
        exempt |= {id(parameter) for parameter in biases(model)}
    group_by_key = parameter_groups(model, config.groups) if config.groups else {}
    # Paddle sets weight decay per group of parameters, so there is one group for each decay.
    by_decay: dict[float, list[paddle.Tensor]] = {}
    for key, parameter in model.named_parameters():
        if not parameter.stop_gradient:
            factor = 0.0 if id(parameter) in exempt else 1.0
            if key in group_by_key:
                factor *= group_by_key[key].weight_decay_factor
            by_decay.setdefault(config.weight_decay * factor, []).append(parameter)
    common: dict[str, Any] = {
        "learning_rate": lr,
        "parameters": [
            {"params": by_decay[decay], "weight_decay": decay}
            for decay in sorted(by_decay, reverse=True)
        ],
        "multi_precision": master_weights,
    }
    optimizer: paddle.optimizer.Optimizer
    if config.name == "momentum":
        optimizer = paddle.optimizer.Momentum(
            momentum=config.momentum,
            use_nesterov=config.nesterov,
            use_multi_tensor=not master_weights,  # loading state replaces master weights
            **common,
        )
    else:
        optimizer = paddle.optimizer.AdamW(
            beta1=config.betas[0],
            beta2=config.betas[1],
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            **common,
        )
    # After Paddle has built its groups, because that resets the rates of all parameters.
    decay = config.layer_decay
    factors = layerwise_lr_factors(model.stages, decay) if decay is not None else {}
    for key, parameter in model.named_parameters():
        factor = factors.get(key, 1.0)
        if key in group_by_key:
            factor *= group_by_key[key].lr_factor
        parameter.optimize_attr |= {"learning_rate": factor, LR_FACTOR: factor}
    return optimizer


def parameter_groups(
    model: nn.Layer, groups: Sequence[ParameterGroupConfig]
) -> dict[str, ParameterGroupConfig]:
    """Returns the group of each parameter that has one, by its key.

    Raises: ConfigError: a group has no parameters.
    """
    keys = [*weight_sizes(model)]
    group_by_key: dict[str, ParameterGroupConfig] = {}
    for number, group in enumerate(groups):
        matching = matching_keys(group.match, keys)
        members = dict.fromkeys((key for key in matching if key not in group_by_key), group)
        if not members:
            reason = "every weight that it matches is in a group before it"
            if not matching:
                reason = f"no weight of this model; {expected_keys(group.match, keys)}"
            raise ConfigError(
                f"{group.match!r}: {reason}",
                code="parameter_group_empty",
                where=f"optimizer.groups.{number}.match",
                fix="correct it, or leave the group out; the first group that matches counts",
            )
        group_by_key |= members
    return group_by_key


def parameter_group_lines(model: nn.Layer, groups: Sequence[ParameterGroupConfig]) -> list[str]:
    """Describes the weights of each group and how they are trained, as lines for the log.

    Raises: ConfigError: see `parameter_groups`.
    """
    sizes, counts = weight_sizes(model), dict.fromkeys(map(id, groups), 0)
    for key, group in parameter_groups(model, groups).items():
        counts[id(group)] += sizes[key]
    return [
        f"parameter group {group.match}: {counts[id(group)]} weights, learning rate x "
        f"{group.lr_factor:g}, weight decay x {group.weight_decay_factor:g}"
        for group in groups
    ]


def layerwise_lr_factors(stages: dict[str, list[str]], decay: float) -> dict[str, float]:
    """Computes the factor of each entry's learning rate, in (0, 1].

    The first layers hold what a network has learned about images in general, and forget it if few
    images train all layers at the same rate:

        rate of stage l = rate * decay^(L - l),  l = 0 (the stem) ... L (the head)

    Args:
        stages: see `ImageModel.stages`.
        decay: factor from a stage to the stage before it.
    Sources: Howard and Ruder 2018, arXiv:1801.06146, section 3.2 (discriminative fine-tuning);
    Bao et al. 2021 (BEiT), arXiv:2106.08254, whose layers are blocks of a transformer where ours
    are the stages of a model.
    """
    last = len(stages) - 1
    return {
        key: decay ** (last - depth) for depth, keys in enumerate(stages.values()) for key in keys
    }


def layerwise_lr_decay(model: ImageModel, decay: float) -> list[str]:
    """Describes each stage's multiple of the learning rate, as a line for the log."""
    stages = model.stages
    factors = layerwise_lr_factors(stages, decay)
    descriptions = (f"{name} x {factors[keys[0]]:.3g}" for name, keys in stages.items())
    return [f"learning rates by stage: {', '.join(descriptions)}"]


def biases(model: nn.Layer) -> list[paddle.Tensor]:
    """Returns the trainable biases of all layers, including normalisation layers."""
    named = model.named_parameters()
    return [p for key, p in named if key.rpartition(".")[2] == "bias" and not p.stop_gradient]


def split_name(name: str, names: dict[str, str]) -> tuple[str, str]:
    """Splits Paddle's name of an accumulator into structured key and accumulator.

    Raises: CheckpointError: the name belongs to no parameter.
    """
    # Parameter names have underscores, too (`conv2d_3.w_0`), so the longest known prefix is the
    # name.
    end = name.rfind("_")
    while end > 0:
        if name[:end] in names:
            return names[name[:end]], name[end + 1 :]
        end = name.rfind("_", 0, end)
    raise CheckpointError(
        f"optimizer state {name!r} belongs to no parameter of the model",
        code="checkpoint_of_other_config",
    )


def structured_keys(model: nn.Layer) -> dict[str, str]:
    """Maps Paddle's generated names to structured keys."""
    return {parameter.name: key for key, parameter in model.named_parameters()}


def load_optimizer_arrays(
    optimizer: paddle.optimizer.Optimizer, model: nn.Layer, arrays: dict[str, np.ndarray]
) -> None:
    """Restores the result of `Updater.state`, replacing all state.

    Raises: CheckpointError: an entry belongs to no parameter of this model, or to an optimizer of
        another kind.
    """
    kind = "velocity" if isinstance(optimizer, paddle.optimizer.Momentum) else "moment1"
    # Momentum and AdamW name their accumulators differently.
    if arrays and not any(kind in entry.rpartition("/")[2] for entry in arrays):
        raise CheckpointError(
            "the checkpoint holds the state of another optimizer than optimizer.name",
            code="checkpoint_of_other_config",
            fix="resume with the configuration the run was started with",
        )
    generated = {key: name for name, key in structured_keys(model).items()}
    state: dict = {}
    masters: dict = {}
    for entry, array in arrays.items():
        key, _, accumulator = entry.rpartition("/")
        if key not in generated:
            raise CheckpointError(
                f"the checkpoint holds optimizer state of {key!r}, which this model does not have",
                code="checkpoint_of_other_config",
                fix="resume with the configuration the run was started with",
            )
        tensor = paddle.to_tensor(array)
        if _MASTER.fullmatch(accumulator):
            tensor.name = f"{generated[key]}_{accumulator}"  # Paddle names accumulators after it
            masters[generated[key]] = tensor
        else:
            state[f"{generated[key]}_{accumulator}"] = tensor
    if masters:
        state["master_weights"] = masters
    if state:
        optimizer.set_state_dict(state)
    else:
        _reset_state(optimizer, model)
    paddle_api.forget_loaded_state(optimizer)


def _reset_state(optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> None:
    """Resets all state to its values before step 1."""
    for name, tensors in paddle_api.accumulators(optimizer).items():
        first = paddle_api.first_power(optimizer, name)
        for tensor in tensors.values():
            tensor.fill_(first)
    masters = paddle_api.master_weights(optimizer)
    for parameter in model.parameters():
        if parameter.name in masters:
            paddle.assign(parameter.astype("float32"), masters[parameter.name])


def filter_optimizer_state(
    optimizer: paddle.optimizer.Optimizer, model: nn.Layer, arrays: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], str]:
    """Converts the result of `Updater.state` for the parameters that train now.

    Parameters that were frozen when the state was saved get the state before a first step; the
    state of parameters that are frozen now is left out.

    Returns: the arrays; a warning, else "".
    """
    parameters = dict(model.named_parameters())
    trains = {key: not parameter.stop_gradient for key, parameter in parameters.items()}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for entry, array in arrays.items():
        key, _, part = entry.rpartition("/")
        parts.setdefault(key, {})[part] = array
    filtered = {
        key: array for key, array in arrays.items() if trains.get(key.rpartition("/")[0], True)
    }
    # Low-precision parameters have other parts (masters) than float32 parameters.
    examples = {
        parameters[key].dtype: parts_of_key
        for key, parts_of_key in parts.items()
        if key in parameters
    }
    new = (
        [key for key, is_trained in trains.items() if is_trained and key not in parts]
        if arrays
        else []
    )
    for key in new:
        for part, array in examples.get(parameters[key].dtype, {}).items():
            filtered[f"{key}/{part}"] = _initial_accumulator(
                optimizer, part, array, parameters[key]
            )
    messages = []
    if new:
        messages.append(f"{len(new)} tensors were not trained before ({new[0]}, ...)")
    if frozen := [key for key, is_trained in trains.items() if key in parts and not is_trained]:
        messages.append(f"{len(frozen)} tensors are frozen from here on ({frozen[0]}, ...)")
    return filtered, " and ".join(messages)


def _initial_accumulator(
    optimizer: paddle.optimizer.Optimizer, part: str, example: np.ndarray, parameter: paddle.Tensor
) -> np.ndarray:
    """Builds an accumulator of a parameter with its value before the first step.

    Args: part: name of the accumulator; example: the same accumulator of another parameter.
    """
    for power in _POWERS:
        if power in part:
            return np.full_like(example, paddle_api.first_power(optimizer, power))
    if _MASTER.fullmatch(part):
        return parameter.astype("float32").numpy()
    return np.zeros(parameter.shape, example.dtype)
