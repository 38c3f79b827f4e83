"""Keys and values of earlier versions that are gone, and what to do instead.

    REMOVED["distributed.window"] = Removed(8, "leave it out: the window is 8 everywhere")
    REMOVED["train.rate"] = Removed(0.1, "it is called optimizer.lr now", renamed="optimizer.lr")
    GONE_VALUES["data.cache", "tape"] = GoneValue("none", "use a faster disk")

A row counts where the schema of the file no longer knows the key (for that model, loss or tracker),
and whichever way a configuration comes: a file, -o, a run's folder, a checkpoint, a model card, an
export.  What has the old default is dropped silently.  Another value that somebody types is an
error, which says what to do; one that an earlier version stored is a warning, and the run goes on.
A renamed key gives its value to the new one, with a line that says the new name, but for defaults
that an earlier version stored.
Removed options of a command stand in migration.yml, below `commands`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ppdist.config.errors import dotted
from ppdist.config.schema import SectionType, field_at
from ppdist.config.yaml import Node, Problem, describe_value, merge, tree_of

_LOGGER = logging.getLogger("ppdist.config")


class Removed(NamedTuple):
    """A key, or a whole section, that was removed.

    default: the old default, as a JSON value; for a section, a mapping of its keys.
    hint: what to do instead, as half a sentence: `use x`, `leave it out: ...`.
    renamed: the key that has the same meaning now; it receives the value, whatever it is.
    synonyms: other values that meant the same as the default.
    """

    default: Any
    hint: str
    renamed: str = ""
    synonyms: tuple[Any, ...] = ()


class GoneValue(NamedTuple):
    """A value that a key no longer takes.

    now: the new value in a stored configuration; DROPPED: the key or list item is removed.
    hint: as in `Removed`.
    """

    now: Any
    hint: str


DROPPED = object()

_PUBLISHED = "leave it out: it is what the published recipes of all sizes have"
_TEMPERATURE = "leave it out: it is the one of the method's paper; change the weight beside it"

REMOVED: Mapping[str, Removed] = {  # by key path; `*` stands for each item of a list
    "checkpoint.fallback_dir": Removed(
        None, "put output_dir on a disk with room for checkpoint.keep + 2 checkpoints"
    ),
    "accuracy": Removed(
        None,
        "leave it out: float files equal the model; with int8 mAP is measured before and after",
        synonyms=(0,),
    ),
    "baselines": Removed({}, "leave it out: `ppdist tune show` has one table of all settings"),
    "checkpoint.on_every_host": Removed(
        False,
        "leave it out: the first host of --ips has the checkpoints; put output_dir on storage that "
        "all hosts have, so that a job goes on without that host, too",
    ),
    "distributed.sync_every": Removed(
        None,
        "it is called distributed.local_sgd_steps now",
        renamed="distributed.local_sgd_steps",
    ),
    "distill.boxes.temperature": Removed(None, _TEMPERATURE, synonyms=(10.0,)),
    "distill.features.temperature": Removed(4.0, _TEMPERATURE),
    "distill.logits.temperature": Removed(1.0, _TEMPERATURE),
    "layout": Removed(
        "flat", "leave it out, and lay the files out as docs/deploy.md, Triton, shows"
    ),
    "optimizer.betas_scaling": Removed("none", "write the betas of your batch"),
    "optimizer.weight_decay_scaling": Removed(
        "auto", "leave it out, or set optimizer.lr_scaling: none and scale both yourself"
    ),
    "train.deterministic": Removed(
        False,
        "leave it out and set FLAGS_cudnn_deterministic=1 FLAGS_embedding_deterministic=1 in the "
        "environment",
    ),
    "train.cpu_convolutions": Removed(
        "auto", "it is called train.cpu_kernels now", renamed="train.cpu_kernels"
    ),
    "train.gpu": Removed(
        {"cudnn_search": False, "layout_autotune": False, "tf32": None},
        "leave it out and set what you measured in the environment: "
        "FLAGS_cudnn_exhaustive_search=1, NVIDIA_TF32_OVERRIDE=0",
    ),
    "data.bad_images_limit": Removed(
        0.001, "leave it out; `ppdist data check DATA --fix DIR` writes a set without bad images"
    ),
    "data.compare_images": Removed("some", "leave it out; compare copies of the set by sha256sum"),
    "train.auto_batch_memory": Removed(0.8, "leave it out, or give batch_size_per_card a number"),
    "data.cache_dir": Removed(
        None, "leave it out and set XDG_CACHE_HOME in the environment: its folder ppdist"
    ),
    "data.augment.mosaic_images": Removed(4, "leave it out: a mosaic has four images"),
    "log.histograms": Removed(
        False, "leave it out; the numbers of each evaluation are in metrics.jsonl"
    ),
    "log.tensorboard": Removed(False, "add it to the list: log.trackers: [tensorboard]"),
    "log.trackers.*.project": Removed(
        "ppdist",
        "leave it out and set WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or SWANLAB_PROJ_NAME in the "
        "environment",
    ),
    "log.trackers.*.offline": Removed(
        False, "leave it out and set WANDB_MODE=offline or SWANLAB_MODE=offline in the environment"
    ),
    "log.trackers.*.run": Removed(None, "leave it out: a run is called as the folder output_dir"),
    "log.trackers.*.tracking_uri": Removed(
        None, "leave it out and set MLFLOW_TRACKING_URI in the environment"
    ),
    "schedule.flat_fraction": Removed(0.5, "leave it out: the rate falls in the second half"),
    "early_stopping.min_delta": Removed(0.0, "raise early_stopping.patience instead"),
    "model.auto_anchor": Removed(True, "give model.anchors, which stay"),
    "loss.alpha": Removed(0.75, _PUBLISHED),
    "loss.anchor_threshold": Removed(
        4.0, "leave it out; give model.anchors that suit the set (`ppdist data anchors`)"
    ),
    "loss.atss_topk": Removed(9, _PUBLISHED),
    "loss.class_cost": Removed(2.0, _PUBLISHED),
    "loss.ddf_gain": Removed(1.5, _PUBLISHED),
    "loss.fgl_gain": Removed(0.15, _PUBLISHED),
    "loss.gamma": Removed(None, _PUBLISHED),
    "loss.giou_cost": Removed(2.0, _PUBLISHED),
    "loss.giou_gain": Removed(2.0, _PUBLISHED),
    "loss.l1_cost": Removed(5.0, _PUBLISHED),
    "loss.l1_gain": Removed(5.0, _PUBLISHED),
    "loss.tal_alpha": Removed(1.0, _PUBLISHED),
    "loss.tal_beta": Removed(6.0, _PUBLISHED),
}
GONE_VALUES: Mapping[tuple[str, Any], GoneValue] = {  # by key path and value
    ("distributed.shares", "auto"): GoneValue(
        None, "ranks share evenly; give the list that the warning of a straggler has"
    ),
    ("int8", "signed"): GoneValue(
        True, "set true; for TensorRT export onnx and let trtexec calibrate it (docs/deploy.md)"
    ),
    ("log.trackers.*.name", "clearml"): GoneValue(
        DROPPED,
        "name tensorboard, wandb, mlflow or swanlab, or a tracker of your own (docs/extend.md)",
    ),
}

# These files are beside the config.yml of a checkpoint and of a run.
_RUN_FILES = ("manifest.json", "environment.json")
_EXPORT_FILE = "infer.yml"


def is_stored(file: str) -> bool:
    """Returns True if ppdist wrote the file into a run, a checkpoint or an export."""
    path = Path(file)
    return path.name == _EXPORT_FILE or (
        path.name == "config.yml" and any((path.parent / name).is_file() for name in _RUN_FILES)
    )


def without_removed(
    tree: Node, schema: SectionType, problems: list[Problem], *, stored: bool
) -> Node:
    """Returns the tree without removed keys and values.

    Args:
        problems: receives a problem for each one that a user typed and that is not the old default.
        stored: True if ppdist wrote the tree; items that -o adds still count as typed.
    """
    for name, row in REMOVED.items():
        for path, node in _nodes_at(tree, name.split(".")):
            if field_at(schema, path, tree) is not None or _is_ignored(schema, path):
                continue
            tree = _replace_node(tree, path, None)
            is_default = any(_equals(node.plain(), old) for old in (row.default, *row.synonyms))
            if row.renamed:
                # The new name wins where a tree has both, as -o on top of a file of an earlier
                # version.
                tree = merge(_nest(row.renamed.split("."), node), tree)
                if not is_default or _is_typed(node, stored):
                    _warn_once(f"{node.key_place}: {dotted(path)}: {row.hint}")
            elif not is_default:
                _report(path, node, row.hint, problems, stored=stored)
    for (name, value), value_row in GONE_VALUES.items():
        # From the last item of a list to the first, because dropping one moves those after it.
        for path, node in reversed([*_nodes_at(tree, name.split("."))]):
            if not _equals(node.plain(), value) or _is_ignored(schema, path):
                continue
            _report(path, node, value_row.hint, problems, stored=stored)
            if value_row.now is DROPPED:
                tree = _replace_node(tree, _dropped_path(path), None)
            else:
                tree = _replace_node(
                    tree, path, replace(tree_of(value_row.now, node.place), text=node.text)
                )
    return tree


def _nodes_at(
    tree: Node, parts: Sequence[str], above: tuple[str | int, ...] = ()
) -> list[tuple[tuple[str | int, ...], Node]]:
    """Returns the paths, with their nodes, that match a key path with `*`."""
    if not parts:
        return [(above, tree)]
    # A list may hold several items with the key, so that one row gives several nodes.
    head, *rest = parts
    if head == "*":
        items = tree.value if isinstance(tree.value, list) else []
        return [row for at, item in enumerate(items) for row in _nodes_at(item, rest, (*above, at))]
    child = tree.child(head)
    return [] if child is None else _nodes_at(child, rest, (*above, head))


def _is_ignored(schema: SectionType, path: Sequence[str | int]) -> bool:
    """Returns True if the schema reads only some sections, and this key is in another."""
    return schema.model_config.get("extra") == "ignore" and path[0] not in schema.model_fields


def _replace_node(tree: Node, path: Sequence[str | int], new: Node | None) -> Node:
    """Returns the tree with the node at a path replaced by `new`; None removes it."""
    head, *rest = path
    child = tree.child(head)
    assert child is not None
    changed = _replace_node(child, rest, new) if rest else new
    if isinstance(tree.value, list):
        items: list[Node | None] = [*tree.value]
        items[int(head)] = changed
        return replace(tree, value=[item for item in items if item is not None])
    assert isinstance(tree.value, dict)
    keys = {**tree.value, str(head): changed}
    return replace(tree, value={key: node for key, node in keys.items() if node is not None})


def _dropped_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Returns the path up to its last list item, which is dropped entirely; else the whole path."""
    last = max((at for at, part in enumerate(path) if isinstance(part, int)), default=None)
    return path if last is None else path[: last + 1]


def _nest(parts: Sequence[str], node: Node) -> Node:
    """Wraps a node in one mapping for each key of a path."""
    for part in reversed(parts):
        node = Node({part: node}, node.place, node.key_place)
    return node


def _equals(value: Any, default: Any) -> bool:
    """Compares a value with a default; for a section, only the keys that are written count."""
    if isinstance(value, dict) and isinstance(default, dict):
        return all(key in default and _equals(value[key], default[key]) for key in value)
    # In Python True == 1, but in a configuration a flag is no number.
    is_flag = isinstance(value, bool) or isinstance(default, bool)
    return bool(value == default) and (not is_flag or type(value) is type(default))


def _report(
    path: Sequence[str | int], node: Node, hint: str, problems: list[Problem], *, stored: bool
) -> None:
    """Reports a removed key: an error if a user typed it, a warning if it is stored."""
    key = dotted(path)
    if _is_typed(node, stored):
        problems.append(
            Problem(
                node.key_place,
                f"{key}: found {describe_value(node)}, which is gone; {hint}",
                "removed_key",
            )
        )
    else:
        _warn_once(f"{node.key_place}: {key}: {describe_value(node)} no longer counts; {hint}")


def _is_typed(node: Node, stored: bool) -> bool:
    """Returns True if a user wrote the node: in a configuration file, or in an item of -o."""
    return not stored or node.place.source.startswith("-o ")


@cache
def _warn_once(line: str) -> None:
    """Warns once per process, which may read a configuration several times."""
    _LOGGER.warning("%s", line)
