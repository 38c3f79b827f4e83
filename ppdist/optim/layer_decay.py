"""Learning rates that fall from the prediction towards the image, for fine-tuning.

What a network has learnt of images in general sits in its first layers, and is forgotten when few
images move all layers alike:

    rate of stage l = rate * decay^(L - l),  l = 0 (the stem) ... L (the head)

Sources: Howard and Ruder 2018, arXiv:1801.06146, section 3.2 (discriminative fine-tuning);
Bao et al. 2021 (BEiT), arXiv:2106.08254, whose layers are blocks of a transformer where ours are
the stages of `models/stages.py`.
"""

from collections.abc import Iterable

from paddle import nn

from ppdist.models.stages import stages_of


def layer_factors(keys: Iterable[str], decay: float | None) -> dict[str, float]:
    """What to multiply the rate of each entry by: state-dict key -> (0, 1]; empty without a decay.

    Args:
        keys: of a model's state dict, in its order.
        decay: from a stage to the one before it; None: all alike.
    """
    if decay is None:
        return {}
    stages = stages_of(keys)
    last = len(stages) - 1
    return {
        key: decay ** (last - depth)
        for depth, inside in enumerate(stages.values())
        for key in inside
    }


def layer_rates(model: nn.Layer, decay: float | None) -> list[str]:
    """A line for the log: which stage learns at which multiple of the rate; nothing without."""
    factors = layer_factors(model.state_dict(), decay)
    if not factors:
        return []
    stages = stages_of(factors)
    of_stages = (f"{name} x {factors[inside[0]]:.3g}" for name, inside in stages.items())
    return [f"learning rates by stage: {', '.join(of_stages)}"]
