"""Where in a saved object the weights are; of Paddle's and torch's pickles alike."""

from collections.abc import Callable
from pathlib import Path

from ppdist.errors import WeightsError
from ppdist.models.inert_pickle import Made, describe, entry_count, mapping, shown

# Where people keep a state dict or a model in what they save.  In this order: where there is an
# average (`ema`), the originals evaluate it and not the model.
WRAPPERS = (
    "ema", "model", "state_dict", "model_state_dict", "net", "module", "weights", "params",
)  # fmt: skip
MAX_ENTRIES = 20_000  # of a dict or model with weights; a YOLOv5x has about 1,500
_NESTED = 2  # wrappers in wrappers, as in {"ema": {"module": ...}}


def find_weights(
    content: object, tensors_of: Callable[[Made], list[tuple[str, object]]], nested: int = _NESTED
) -> list[tuple[str, object]]:
    """Key and described tensor of every weight in what was saved.

    They are looked for under WRAPPERS one after the other, then in `content` itself; of an object
    first in itself, then under WRAPPERS in its `__dict__` (an object that keeps averages).

    Args:
        tensors_of: the weights that a dict, or an object such as a model, holds directly.
    """
    if not isinstance(content, Made) or entry_count(content) > MAX_ENTRIES:
        return []
    inside = mapping(content)
    own = tensors_of(content)
    if inside is None and own:
        return own
    inside = mapping(content.state) or {} if inside is None else inside
    for key in WRAPPERS if nested else ():
        found = find_weights(inside.get(key), tensors_of, nested - 1)
        if found:
            return found
    return own


def nothing_found(path: Path, content: object) -> WeightsError:
    """The error of a file without weights, saying what is in it."""
    keys = list(mapping(content) or ())
    inside = ", ".join(f"'{shown(key)}'" for key in keys[:5]) or describe(content)
    return WeightsError(
        "no weights in it: expected a state dict, a model, or one of them under "
        f"{', '.join(WRAPPERS)}; found {inside}",
        code="weights_no_state_dict",
        where=str(path),
    )
