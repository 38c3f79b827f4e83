"""Zero configuration: a recipe fitted to data, as an ordinary config.

fit_recipe   layout of the data -> shipped recipe -> changes for the number of images
             -> -o items -> an ExperimentConfig, and the text of its file
with_data    any configuration, with the data of a layout or of another configuration
"""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ppdist.common.addresses import is_remote
from ppdist.common.errors import ConfigError, DataError, WeightsError
from ppdist.common.files import bytes_of, make_folder, replace_file, writing
from ppdist.common.job import launched_rank
from ppdist.common.process import printable, say
from ppdist.config.data import DataConfig
from ppdist.config.experiment import ExperimentConfig, apply_overrides, load_config
from ppdist.config.migration import is_weights_as_model, refuse_options
from ppdist.config.parse import override_items, parse_plain, parse_tree
from ppdist.config.schema import matching_sections, sections_in
from ppdist.config.section import Task
from ppdist.config.shipped import find_config, near, recipes, short_names
from ppdist.config.train import max_micro_batch
from ppdist.config.yaml import BASE_KEY, Node, Place, Reader, dump, merge, tree_of
from ppdist.data.datasets.annotations import abbreviate
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.layout import VAL_FRACTION, Layout, find_layout, is_layout
from ppdist.data.datasets.selection import find_classes, selected_names
from ppdist.models.zoo import is_name, published, zoo

FILE = "recipe.yml"  # in output_dir
_FILE_OF_PLAN = "recipe-dry-run.yml"  # in output_dir, beside the recipe of a run
ASIDE = "old-*"  # in output_dir: earlier runs
_COMMON = ("yolov5n", "yolov5s", "ppyoloe_plus_s", "dfine_s")  # recipes to name first
# A recipe for COCO is changed if there are fewer training images than this: 5 % of COCO, or half
# of VOC 2007 + 2012.
_FEW_IMAGES = 8000
# Images that training from scratch on the 205 images of BCCD processed until the results were good:
# 12,000 (PP-YOLOE) to 31,000 (YOLOv5), see configs/examples/bccd_*.yml.  In a larger set, an epoch
# has more images as well.
_IMAGES_SEEN = 30_000
_IMAGES_SEEN_TUNING = 10_000  # docs/dev/recipes.md: weights of another task save two thirds
_EPOCHS, _EPOCHS_TUNING, _MOST_EPOCHS = 100, 50, 300
_WARMUP_SHARE = 0.1  # of all steps: the longest least warm-up
# When fine-tuning, layers near the image get a lower learning rate: docs/dev/few_images.md, "From
# weights".
_LAYER_DECAY_TUNING = 0.8
_EVALUATIONS = 20
_WARMUP_PHASE = 30  # on few images, warm-up takes one of every 30 epochs of the run


class Choice(NamedTuple):
    """A key of the config, its value, and the reason for it ("" if no reason is shown)."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Recipe:
    """A recipe fitted to data.

    config: the configuration of the run.
    text: the same configuration as YAML, for `load_config`.
    rows: (name, value, reason) for a table.
    notes: choices about the data that may surprise the user.
    """

    config: ExperimentConfig
    text: str
    rows: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run besides its data or configuration; None if not specified.

    model: name of a shipped recipe, or a YAML file.  epochs: "+50" extends a run.
    steps: length of the run in optimizer steps instead; "+500" extends a run, too.
    batch: images per card.  image_size: (height, width) in pixels.
    classes, single_class, fraction: as in `data`.
    """

    model: str | None = None
    epochs: float | str | None = None
    batch: int | Literal["auto"] | None = None
    weights: str | None = None
    image_size: tuple[int, int] | None = None
    output_dir: str | None = None
    steps: int | str | None = None
    classes: Sequence[str | int] | None = None
    single_class: bool | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        """Applies to values passed from Python the same checks as to those of the command line.

        Raises: ConfigError: a value is invalid.
        """
        size, invalid_option = self.image_size, ""
        # `type` instead of `isinstance`, because True is an instance of int.
        if self.batch not in (None, "auto") and (type(self.batch) is not int or self.batch < 1):
            invalid_option, expected = (
                "batch",
                'a whole number, 1 or more, or "auto" (what fits into memory)',
            )
        elif isinstance(self.epochs, int | float) and not self.epochs > 0:
            invalid_option, expected = "epochs", "a number above 0"
        elif not isinstance(self.steps, str | None) and (
            type(self.steps) is not int or self.steps < 1
        ):
            invalid_option, expected = "steps", "a whole number, 1 or more"
        elif size is not None and (
            isinstance(size, str)
            or len(size) != 2
            or not all(type(side) is int and side >= 32 for side in size)
        ):
            invalid_option, expected = (
                "image_size",
                "one whole number, 32 or more, or (height, width)",
            )
        if invalid_option:
            raise ConfigError(
                f"expected {expected}",
                code="option_invalid",
                where=f"{invalid_option}={getattr(self, invalid_option)!r}",
            )

        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                "a run has one length",
                code="options_conflict",
                where=f"epochs {self.epochs} and steps {self.steps}",
                fix="give one of them",
            )

    def items(self, *names: str) -> list[str]:
        """Returns the options with these names, or all options, as -o items."""
        values = {OPTION_KEYS[name]: getattr(self, name) for name in names or OPTION_KEYS}
        if self.classes is not None and "data.classes" in values:
            values["data.classes"] = list(self.classes)
        return override_items({key: value for key, value in values.items() if value is not None})


OPTION_KEYS = {  # of TrainOptions
    "epochs": "train.epochs",
    "batch": "train.batch_size_per_card",
    "weights": "model.pretrained",
    "image_size": "model.image_size",
    "output_dir": "output_dir",
    "steps": "train.steps",
    "classes": "data.classes",
    "single_class": "data.single_class",
    "fraction": "data.fraction",
}


def fit_recipe(
    layout: Layout, options: TrainOptions, overrides: Sequence[str], world: int
) -> Recipe:
    """Chooses a shipped recipe for this data.

    The same data always result in the same recipe.

    Args:
        overrides: -o items; they take precedence.
        world: number of ranks.
    Raises: ConfigError: there is no such recipe, or it is for another task; an item is invalid; the
        data have no requested class.
    """
    assert options.model is not None
    name, short_name, file = _find_recipe(options.model)
    overrides = [*options.items("output_dir"), *overrides]
    reader = Reader()
    base = reader.read_file(file)
    nodes = [reader.read_override(item) for item in overrides]
    place = Place(f"--model {options.model}")
    typed_tree = reduce(merge, filter(None, nodes), Node({}, place, place))
    options = _apply_typed(options, typed_tree)
    section = _read_model_section(options, base)
    _require_same_task(section, layout, options)
    held_images = 0 if layout.val is not None else max(1, round(VAL_FRACTION * layout.images))
    images = max(1, layout.images - held_images)
    choices = _choose_data(layout, layout.images - images, options, base)
    images = max(1, round((options.fraction or 1) * images))
    run_choices, epochs, steps_per_epoch = _choose_run(images, options, base, world, section)
    choices += run_choices
    in_steps = options.steps is not None
    choices += _choose_intervals(epochs, steps_per_epoch, in_steps, typed_tree)
    out = f"output/{layout.name}_{short_name}"
    choices.append(Choice("output_dir", out, "the names of data and model"))
    # The choices override the shipped recipe, and -o items override both.
    tree = merge(tree_of(_nest_choices(choices), place), typed_tree)
    config = parse_tree(merge(base, tree), ExperimentConfig, reader.problems)
    # Values as validated: `-o output_dir=2024` is text there, and image_size: 640 a square.
    chosen_values = _select_keys(tree, config.model_dump(mode="json"))
    typed_rows = [(item.partition("=")[0], item.partition("=")[2], "-o") for item in overrides]
    overridden = {key for key, _, _ in typed_rows}
    rows = [
        ("data", f"{layout.format}, {layout.images} images", str(layout.root)),
        ("recipe", name, f"--model {options.model}"),
        *(
            _describe_choice(choice, chosen_values)
            for choice in choices
            if choice.reason and choice.key not in overridden
        ),
        *typed_rows,
        *((what, "", reason) for what, reason in layout.notes),
    ]
    # Names come from untrusted files: a line break would end the comment that contains them.
    printable_rows = [
        (_join_lines(what), _join_lines(value), _join_lines(reason)) for what, value, reason in rows
    ]
    notes = tuple(_join_lines(f"{what}: {reason}") for what, reason in layout.notes)
    text = _format_recipe(name, chosen_values, printable_rows)
    return Recipe(config, text, tuple(printable_rows), notes)


def _apply_typed(options: TrainOptions, typed_tree: Node) -> TrainOptions:
    """Replaces options with -o values of the same settings, so that all choices fit these values.

    Args: typed: the merged -o items.
    """
    epochs = _read_value(typed_tree, "train.epochs")
    batch = _read_value(typed_tree, "train.batch_size_per_card")
    weights = _read_value(typed_tree, "model.pretrained")
    steps = _read_value(typed_tree, "train.steps")
    classes = _read_value(typed_tree, "data.classes")
    single_class = _read_value(typed_tree, "data.single_class")
    fraction = _read_value(typed_tree, "data.fraction")
    return replace(
        options,
        epochs=epochs if isinstance(epochs, int | float) and epochs > 0 else options.epochs,
        steps=steps if type(steps) is int and steps > 0 else options.steps,
        classes=classes if isinstance(classes, list) else options.classes,
        single_class=single_class if isinstance(single_class, bool) else options.single_class,
        fraction=fraction
        if isinstance(fraction, float) and 0 < fraction <= 1
        else options.fraction,
        batch=batch if batch == "auto" or (type(batch) is int and batch > 0) else options.batch,
        weights=weights if isinstance(weights, str) else options.weights,
    )


def _find_recipe(model: str) -> tuple[str, str, str]:
    """Finds a recipe by its name or file.

    Returns: its name, as `_BASE_` accepts it; a short name for folders; its file.
    Raises: ConfigError: there is no such recipe.
    """
    file = find_config(model)
    shipped = {str(path): name for name, path in recipes().items()}
    if file in shipped:
        shorts = {name: short for short, name in short_names().items()}
        return shipped[file], shorts.get(shipped[file], Path(shipped[file]).stem), file
    if file == model and model.endswith((".yml", ".yaml")) and os.path.isfile(model):
        return os.path.abspath(model), Path(model).stem, model
    close_names = near(model)
    if is_weights_as_model("train", "model", model):
        refuse_options("train", [f"model={model}"], ())
    fix = (
        f"did you mean {close_names[0]}?" if close_names else f"expected {', '.join(_COMMON)}, ..."
    )
    raise ConfigError(
        "no such file" if model.endswith((".yml", ".yaml")) else "no recipe is called so",
        code="model_unknown",
        where=f"--model {model}",
        fix=f"{fix} `ppdist config list` has all",
    )


def _require_matching_weights(name: str, weights: str) -> None:
    """Checks that missing weights are not named like the published weights of another recipe.

    Raises: WeightsError: they are named like those of another recipe.
    """
    entry, expected_name = published(weights), f"{name}_coco"
    # A name in the model zoo identifies its model, and is checked with that model.
    absent = not os.path.exists(weights) and not is_name(weights)
    if entry and absent and entry.name != expected_name and expected_name in zoo():
        raise WeightsError(
            f"no such file; those published under that name ({entry.name}) do not fit {name}",
            code="weights_not_found",
            where=weights,
            fix=f"write `--weights {expected_name}`",
        )


def read_task(options: TrainOptions) -> Task:
    """Returns the task of a recipe, before data are read.

    Raises: ConfigError: there is no such recipe, or it has no model; WeightsError: the weights are
        missing, and named like those of another recipe.
    """
    assert options.model is not None
    _, short_name, file = _find_recipe(options.model)
    section = _read_model_section(options, Reader().read_file(file))
    if options.weights:
        _require_matching_weights(short_name, options.weights)
    task: Task = section.task
    return task


def _read_model_section(options: TrainOptions, base: Node) -> Any:
    """Returns the class of a recipe's `model` section.

    Raises: ConfigError: it has no model.
    """
    sections = sections_in(ExperimentConfig.open_plugins(base, []).model_fields["model"].annotation)
    section: Any = matching_sections(sections, base.child("model"))[0]
    if _read_value(base, "model.name") is None:
        raise ConfigError(
            "names no model",
            code="model_missing",
            where=f"--model {options.model}",
            fix="choose a recipe of `ppdist config list`",
        )
    return section


def _require_same_task(section: Any, layout: Layout, options: TrainOptions) -> None:
    """Checks that a recipe is for the same task as the data.

    Raises: ConfigError: it classifies whole images, and the data have boxes, or vice versa.
    """
    if (section.task == "classify") == (layout.format == "folder"):
        return
    classifies = section.task == "classify"
    raise ConfigError(
        "is a recipe for classifiers, but the data have boxes"
        if classifies
        else "is a recipe for boxes, but the data are folders of classes",
        code="model_without_boxes",
        where=f"--model {options.model}",
        fix=f"choose a {'detector' if classifies else 'classifier'} (ppdist config list)",
    )


def _choose_data(
    layout: Layout, held_images: int, options: TrainOptions, base: Node
) -> list[Choice]:
    """Chooses the keys of `data`, and the keys of `model` that follow from the data and options.

    Args: held_images: number of images split off for validation if the set has no such split.
    """
    reason = (
        f"no validation split: {held_images} images validate, by their file names; the others train"
    )
    choices = [
        Choice(f"data.{key}", value, reason if key == "val_fraction" else "")
        for key, value in layout.section().items()
    ]
    numbers = find_classes(options.classes or (), layout.class_names, str(layout.root))
    names = abbreviate([layout.class_names[number] for number in numbers], 5)
    count, reason = len(numbers), f"of the data: {names}"
    if options.single_class:
        count, reason = 1, f"one for all of {names}"
    choices.append(Choice("model.num_classes", count, reason))
    if options.classes:
        chosen = f"--classes: {len(numbers)} of {len(layout.class_names)}, the others are left out"
        choices.append(Choice("data.classes", list(options.classes), chosen))
    if options.single_class:
        choices.append(Choice("data.single_class", True, "--single-cls"))
    if options.fraction is not None:
        share = "--fraction: of the training images, the same whatever the seed is"
        choices.append(Choice("data.fraction", float(options.fraction), share))
    if options.weights is not None:
        choices.append(Choice("model.pretrained", options.weights, "--weights"))
    if options.image_size is not None:
        choices.append(Choice("model.image_size", list(options.image_size), "--image-size"))
        usual_size = _read_value(base, "model.image_size")
        sizes = _read_value(base, "train.multi_scale")
        if usual_size and sizes:
            step = math.gcd(*(side for size in sizes for side in size))
            scaled = [
                [
                    max(step, step * round(side * new_side / usual_side / step))
                    for side, new_side, usual_side in zip(size, options.image_size, usual_size)
                ]
                for size in sizes
            ]
            distinct = [size for at, size in enumerate(scaled) if size not in scaled[:at]]
            reason = "sizes of training, in proportion to --image-size"
            choices.append(Choice("train.multi_scale", distinct, reason))
    return choices


def _choose_run(
    images: int, options: TrainOptions, base: Node, world: int, section: Any
) -> tuple[list[Choice], float, int]:
    """Chooses epochs, batch size, warm-up and optimizer for the number of images.

    Args:
        images: number of images in the training split.
        base: the shipped recipe.
        section: class of the recipe's `model`, which has its task and its settings for few images.
    Returns: the choices, the number of epochs, and about how many steps an epoch has.
    """
    on_few: Mapping[str, Any] = section.few_images
    recipe_epochs = _read_value(base, "train.epochs")
    if not isinstance(recipe_epochs, int | float):
        raise ConfigError(
            "does not set train.epochs, of which its warm-up and other phases are fractions",
            code="model_without_epochs",
            where=f"--model {options.model}",
            fix="set it there: the epochs (of COCO, say) that its other values were tuned for",
        )
    tuning = bool(options.weights) or bool(_read_value(base, "model.pretrained"))
    batch, batch_reason = _choose_batch(
        images, options, _read_value(base, "train.batch_size_per_card") or 8, world
    )
    # `auto` is resolved when the run starts, usually to about 8 images.
    on_all = world * (batch if isinstance(batch, int) else 8)
    steps_per_epoch = math.ceil(images / on_all)
    if isinstance(options.steps, int):
        epochs, steps = options.steps / steps_per_epoch, options.steps
        reason = f"--steps: {epochs:.3g} epochs of about {steps_per_epoch}"
        choices = [Choice("train.steps", steps, reason)]
    else:
        epochs, reason = _choose_epochs(images, options, float(recipe_epochs), tuning, section.task)
        choices, steps = (
            [Choice("train.epochs", epochs, reason)],
            steps_per_epoch * math.ceil(epochs),
        )
    phases = "warm-up and other phases keep their fractions of the recipe's epochs"
    choices.append(Choice("train.phases_for_epochs", recipe_epochs, phases))
    choices.append(Choice("train.batch_size_per_card", batch, batch_reason))
    min_warmup = _read_value(base, "schedule.warmup_least_steps") or 0
    allowed = math.floor(_WARMUP_SHARE * steps)
    if min_warmup > allowed:
        reason = (
            f"a tenth of about {steps} step{'s' * (steps != 1)} at most; "
            f"the recipe's {min_warmup} would take more"
        )
        choices.append(Choice("schedule.warmup_least_steps", allowed, reason))
    if images < _FEW_IMAGES and on_few:
        reason = f"fewer than {_FEW_IMAGES} images: learns faster than the recipe for COCO"
        reasons = {"optimizer.name": reason, "optimizer.lr": "for 8 images a step"}
        if tuning:
            on_few = {"optimizer.layer_decay": _LAYER_DECAY_TUNING, **on_few}
            reasons["optimizer.layer_decay"] = "layers near the image keep what the weights know"
        choices += [Choice(key, value, reasons.get(key, "")) for key, value in on_few.items()]
        warmup = round(recipe_epochs / _WARMUP_PHASE, 2)
        reason = f"of {recipe_epochs:g}: one in {_WARMUP_PHASE} of the run"
        choices.append(Choice("schedule.warmup_epochs", warmup, reason))
    return choices, epochs, steps_per_epoch


def _choose_intervals(
    epochs: float, steps_per_epoch: int, in_steps: bool, typed_tree: Node
) -> list[Choice]:
    """Chooses the intervals of evaluations and checkpoints, in the unit of the run's length.

    Args:
        in_steps: the length of the run is given in steps.
        typed_tree: the merged -o items; an interval that they set decides its unit.
    """
    every = max(1, math.ceil(epochs / _EVALUATIONS))
    evaluations = f"{'about ' * (every > 1)}{math.ceil(epochs / every)} in the run"
    typed_steps = _read_value(typed_tree, "evaluate.every_steps")
    if type(typed_steps) is int:
        choice = Choice("evaluate.every_steps", typed_steps, evaluations)
    elif in_steps and _read_value(typed_tree, "evaluate.every_epochs") is None:
        choice = Choice("evaluate.every_steps", every * steps_per_epoch, evaluations)
    else:
        choice = Choice("evaluate.every_epochs", every, evaluations)
    keys = "checkpoint.every_epochs", "checkpoint.every_steps"
    if any(_read_value(typed_tree, key) is not None for key in keys):
        return [choice]
    key = choice.key.replace("evaluate", "checkpoint")
    return [choice, Choice(key, choice.value, "as often as --eval evaluates")]


def _choose_epochs(
    images: int, options: TrainOptions, recipe_epochs: float, tuning: bool, task: Task
) -> tuple[float, str]:
    """Chooses the number of epochs; also returns the reason."""
    if options.epochs is not None:
        return float(options.epochs), "--epochs"
    if images >= _FEW_IMAGES or task == "classify":
        return recipe_epochs, "as in the recipe"
    usual_epochs, images_seen = (
        (_EPOCHS_TUNING, _IMAGES_SEEN_TUNING) if tuning else (_EPOCHS, _IMAGES_SEEN)
    )
    epochs = float(min(_MOST_EPOCHS, max(usual_epochs, math.ceil(images_seen / images))))
    start = "starting from weights" if tuning else "from scratch"
    return epochs, f"{images} training images, {start}: {epochs * images:.0f} images seen in all"


def _choose_batch(
    images: int, options: TrainOptions, recipe_batch: int | Literal["auto"], world: int
) -> tuple[int | Literal["auto"], str]:
    """Chooses the number of images per card; also returns the reason."""
    batch, reason = (
        (recipe_batch, "as in the recipe") if options.batch is None else (options.batch, "--batch")
    )
    max_batch = max_micro_batch(images, world)
    if isinstance(batch, int) and batch > max_batch:
        data_size = f"{images} images on {world} rank{'s' * (world > 1)}"
        return max_batch, f"per card; {reason} would be {batch}, but the set has {data_size}"
    in_all = f": {batch * world} in all" if world > 1 and isinstance(batch, int) else ""
    return batch, f"per card, {reason}{in_all}"


# --- other data -----------------------------------------------------------------------------------

_FILES = ("format", "train", "val", "test", "val_fraction")  # keys of `data` that say where
_CLASSES_OF_A_SET = {"classes", "single_class"}
_OF_A_SET = {
    *_CLASSES_OF_A_SET,
    "fraction",
    "format",
    "root",
    "train",
    "val",
    "test",
    "val_fraction",
    "class_names",
}  # keys of `data`


def with_data(
    config: ExperimentConfig,
    data: str | Path | ExperimentConfig | Mapping[str, Any],
    *,
    same_classes: bool = False,
) -> ExperimentConfig:
    """Returns the configuration with other data and their number of classes.

    The settings for reading and augmenting images are kept, unless `data` sets them; `resize` is
    always kept, because the model was trained with it.

    Args:
        data: a data.yaml or a folder, a configuration or its name, or a `data` section.
        same_classes: keep data.classes and data.single_class, too, as an evaluation does.
    Raises: ConfigError: there is no `data` section; DataError: the training split cannot be read.
    """
    tree = config.model_dump(mode="json")
    of_a_set = _OF_A_SET - (_CLASSES_OF_A_SET if same_classes else set())
    settings = {key: tree["data"][key] for key in DataConfig.model_fields if key not in of_a_set}
    tree["data"] = {
        **settings,
        **_read_data_section(data, config.model.task),
        "resize": config.data.resize,
    }
    # Any number will do in the first of two passes: the classes are then counted in the data that
    # the resulting config describes.
    tree["model"]["num_classes"] = 1
    section = parse_plain(tree, "data", (), ExperimentConfig).data
    names = selected_names(section) or read_split(section, "train").class_names
    tree["model"]["num_classes"] = len(names)
    return parse_plain(tree, "data", (), ExperimentConfig)


def _read_data_section(
    data: str | Path | ExperimentConfig | Mapping[str, Any], task: Task
) -> Mapping[str, Any]:
    """Returns the `data` section of anything that `data=` and DATA accept."""
    if isinstance(data, Mapping):
        return data
    if isinstance(data, ExperimentConfig):
        return data.data.model_dump(mode="json")
    if is_layout(data):
        return find_layout(str(data), task).section()
    return load_config(data).data.model_dump(mode="json")


def load_config_with_data(path: str | Path, overrides: Sequence[str]) -> ExperimentConfig:
    """Loads a configuration, with the layout of a typed `data.root`; see `fit_to_root`.

    Args: path, overrides: as for `load_config`.
    """
    return fit_to_root(load_config(path, overrides), overrides)


def fit_to_root(config: ExperimentConfig, overrides: Sequence[str]) -> ExperimentConfig:
    """Adapts `data` to the layout of `data.root` if an override names it and its files are absent.

    So `-c RECIPE -o data.root=SET` reads what `SET --model RECIPE` would.  If the layout cannot be
    determined, the configuration is left as it is, and reading its data reports what is missing.

    Args: overrides: -o items, which `config` has already.
    """
    typed_keys = {item.partition("=")[0] for item in overrides}
    given_keys = {key for key in typed_keys if key.startswith(tuple(f"data.{at}" for at in _FILES))}
    data = config.data
    if "data.root" not in typed_keys or given_keys or data.reader or is_remote(data.root):
        return config
    parts = (*data.train.image_folders, *data.train.annotation_files)
    root = Path(data.root)
    problems = [f"{root / name} is not there" for name in parts if not (root / name).exists()]
    if data.format == "coco" and not data.train.annotation_files:  # of weights without data
        problems.append("data.train.annotations names no file")
    if not root.is_dir() or not problems:
        return config
    try:
        layout = find_layout(data.root, config.model.task)
        selection = {key: getattr(data, key) for key in (*_CLASSES_OF_A_SET, "fraction")}
        fitted = with_data(config, {**layout.section(), **selection})
    except (ConfigError, DataError):
        return config
    if launched_rank() == 0:
        held = "" if layout.val else f" ({VAL_FRACTION:.0%} of them for validation)"
        say(
            f"ppdist: note: {problems[0]}: data.root is read as {layout.format}, {layout.images} "
            f"images{held}, {len(layout.class_names)} "
            f"{'classes' if len(layout.class_names) > 1 else 'class'}, as behind `ppdist train`"
        )
        for subject, reason in layout.notes:
            say(f"ppdist: note: {subject}: {reason}")
    return apply_overrides(
        fitted, [item for item in overrides if not item.startswith("data.root=")]
    )


def file_of_plan(recipe: Recipe, output_dir: Path) -> str:
    """Returns the file name in output_dir for a recipe that is not trained now.

    The recipe of an earlier run there is not overwritten, because that run's command names it.
    """
    file = output_dir / FILE
    if not ((output_dir / "metrics.jsonl").exists() and file.exists()):
        return FILE
    return FILE if file.read_bytes() == recipe.text.encode() else _FILE_OF_PLAN


def write_recipe(
    recipe: Recipe, output_dir: Path, earlier_runs: set[Path], evaluate: bool, name: str = FILE
) -> str:
    """Writes the configuration beside its run; returns the training command.

    If an earlier run was moved aside, its recipe moves with it; otherwise an edited recipe is
    renamed here.

    Args:
        earlier_runs: the folders of earlier runs in output_dir when this run started.
        name: name of the file.
    """
    file = output_dir / name
    content = recipe.text.encode()
    make_folder(output_dir)
    with writing(file):
        if file.exists():
            for moved in {*output_dir.glob(ASIDE)} - earlier_runs:
                file.replace(moved / name)
        if file.exists() and bytes_of(file) != content:  # perhaps edited by hand
            file.replace(_find_unused_name(file.with_name(f"{name}.old")))
        replace_file(file, content)
    return shlex.join(["ppdist", "train", "-c", str(file), *(["--eval"] if evaluate else [])])


def _find_unused_name(file: Path) -> Path:
    """Returns the first of `file`, `file.2`, `file.3` and so on that does not exist."""
    names = chain([file.name], (f"{file.name}.{number}" for number in count(2)))
    return next(path for path in map(file.with_name, names) if not path.exists())


# --- trees ----------------------------------------------------------------------------------------


def _read_value(tree: Node, key: str) -> Any:
    """Returns the value of a dotted key; None if it is absent."""
    node: Node | None = tree
    for part in key.split("."):
        node = node.child(part) if node is not None else None
    return None if node is None else node.plain()


def _nest_choices(choices: Sequence[Choice]) -> dict[str, Any]:
    """Builds a tree from choices with dotted keys."""
    result: dict[str, Any] = {}
    for choice in choices:
        *above, last = choice.key.split(".")
        at = result
        for part in above:
            at = at.setdefault(part, {})
        at[last] = choice.value
    return result


def _select_keys(tree: Node, values: Any) -> Any:
    """Selects from the validated values those whose keys occur in a tree."""
    if isinstance(tree.value, dict) and isinstance(values, dict):
        return {key: _select_keys(child, values[key]) for key, child in tree.value.items()}
    return values


def _describe_choice(choice: Choice, chosen: Any) -> tuple[str, str, str]:
    value = chosen
    for part in choice.key.split("."):
        value = value[part]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return choice.key, text if len(text) <= 60 else f"{text[:57]}...", choice.reason


def _join_lines(text: str) -> str:
    return " ".join(printable(text).split())


def _format_recipe(name: str, chosen: dict[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [
        "# Decided by `ppdist train DATA --model NAME` and now an ordinary configuration: edit it,",
        "# and train with -c THIS_FILE.  Keys: docs/config.md.  Why:",
        *(f"#   {' '.join(filter(None, (what, value)))}: {reason}" for what, value, reason in rows),
        "",
    ]
    first = {BASE_KEY: name, "output_dir": chosen["output_dir"]}
    return "\n".join(lines) + dump(first | chosen)
