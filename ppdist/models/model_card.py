"""Model card: what weights must say of themselves to be used alone.

    card_of                 a model, its config and its classes -> ModelCard
    ModelCard.text          -> model_card.json of a checkpoint; the entry `model_card` of
                               .safetensors (metadata), .npz and ONNX (metadata_props)
    read_card               a checkpoint, run, export or weight file -> ModelCard
    read_card_or_warn       the same, for callers that can do without
    names_for               the same, and the names of a model's classes -> ClassNames
    require_fit             the model to train, a name of the zoo: before a download
    config_of_weights       a checkpoint or weight file -> ExperimentConfig (`-w` without -c)

Of a .pt that holds a pickled model (ultralytics' YOLOv5) the card is made from its contents.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

import ppdist
from ppdist.common.class_names import require_same_classes
from ppdist.common.errors import WeightsError
from ppdist.common.files import read_file
from ppdist.common.manifest import CARD_FILE, CARD_NOTE, checked_files
from ppdist.config.evaluate import NMSConfig
from ppdist.config.experiment import ExperimentConfig, default_output_dir, load_config
from ppdist.config.model import ModelConfig, YOLOv5Config
from ppdist.config.parse import parse_plain
from ppdist.config.preprocess import NormalisationSection, ResizeSection, resize_section
from ppdist.config.section import Section, Task
from ppdist.config.shipped import find_config, short_names
from ppdist.models.base import ImageModel
from ppdist.models.unpickle import PickledObject, mapping, read_torch_content, shown
from ppdist.models.weights import (
    ClassNames,
    checkpoint_of,
    read_notes,
    require_known_ending,
    require_there,
    through_links,
)
from ppdist.models.yolov5 import DEPTH_WIDTH
from ppdist.models.zoo import PublishedWeights, is_name, local_weights, published, zoo

AGPL = "AGPL-3.0"
_MAX_BYTES = 1 << 22  # of a card; a thousand class names take 20 KB
_MAX_CLASSES = 100_000  # of a .pt
_MAX_LETTERS = 1000  # of `source`, which grows with each fine-tuning
T = TypeVar("T")


class ModelCard(Section):
    """Description that weights carry; empty or null fields: not known."""

    version: Literal[1] = Field(default=1, description="Version of this description.")
    task: Task = Field(
        default="detect",
        description="detect: boxes with a class each; classify: one class for the whole image.",
    )
    model: dict[str, Any] | None = Field(
        default=None,
        description="The `model` section of the configuration, also that of a plugin; "
        "config_of_weights checks it.",
    )
    class_names: tuple[str, ...] = Field(default=(), description="Name of class 0, 1, ...")
    category_ids: tuple[int, ...] = Field(
        default=(), description="What a COCO result calls class 0, 1, ..."
    )
    image_size: tuple[int, int] | None = Field(
        default=None, description="Height and width of the input, pixels."
    )
    resize: ResizeSection | None = Field(default=None, description="Image to input.")
    normalised: NormalisationSection | None = Field(
        default=None,
        description="What the layers take instead of pixels. Of an export: what its graph takes; "
        "null: pixels.",
    )
    nms: NMSConfig | None = Field(
        default=None, description="Which predictions stay, as in infer.yml. classify: none."
    )
    best_f1_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Default confidence threshold of `ppdist predict`: that of the best mean F1 on "
        "the validation images of the last evaluation.",
    )
    licence: str = Field(
        default="",
        max_length=_MAX_LETTERS,
        description="SPDX identifier of the licence that the weights come under, such as "
        'Apache-2.0 or AGPL-3.0. "": not known, or weights that were trained from scratch and '
        "are their trainer's.",
    )
    source: str = Field(
        default="",
        max_length=_MAX_LETTERS,
        description="Where the weights come from: trained from scratch on which data, or "
        "fine-tuned from what.",
    )
    made_with: str = Field(
        default="", max_length=_MAX_LETTERS, description="Version of ppdist, or what else."
    )

    def text(self) -> str:
        """Writes the card as JSON, one line for each field."""
        fields = self.model_dump(mode="json").items()
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def for_checkpoint(self, state: Mapping[str, Any]) -> str:
        """Writes the text with the threshold that the evaluation of a checkpoint found."""
        return self.model_copy(update={"best_f1_threshold": state["best_f1_threshold"]}).text()


def card_of(
    config: ExperimentConfig,
    model: ImageModel,
    class_names: Sequence[str],
    category_ids: Sequence[int],
    *,
    licence: str = "",
    source: str = "",
) -> ModelCard:
    """Builds the card of a model that was built from a config.

    Args: licence, source: those of its weights; see `origin`.
    """
    task = config.model.task
    return ModelCard(
        task=task,
        model=section_of(config),
        # UTF-8 cannot encode a lone surrogate, and no run may end because a name has one.
        class_names=tuple(name.encode(errors="replace").decode() for name in class_names),
        category_ids=tuple(category_ids),
        image_size=config.model.image_size,
        resize=resize_section(config.data.resize, task),
        normalised=normalisation_of(model),
        nms=config.suppression if task == "detect" else None,
        licence=licence[:_MAX_LETTERS],
        source=source[:_MAX_LETTERS],
        made_with=f"ppdist {ppdist.__version__}",
    )


def section_of(config: ExperimentConfig) -> dict[str, Any]:
    """Returns the `model` section as plain data, without keys that only its training needed."""
    return config.model.model_copy(update={"pretrained": None}).model_dump(mode="json")


def normalisation_of(model: ImageModel) -> NormalisationSection:
    """Describes the normalisation of pixels as (x / 255 - mean) / std."""
    mean = [round(value / 255, 9) for value in model.pixel_mean]
    std = [round(value / 255, 9) for value in model.pixel_std]
    return NormalisationSection(mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]))


def origin(data: str, start: Path | None, card: ModelCard | None) -> tuple[str, str]:
    """Returns licence and source of weights that are trained now.

    They keep the licence of the weights from which they start.

    Args:
        data: what they are trained on, in a few words.
        start: the weights from which they start; None: from scratch.
        card: the card of `start`.
    """
    if start is None:
        return "", f"trained from scratch on {data}"
    licence, before = (card.licence, card.source) if card else ("", "")
    name = start.name if start.is_file() else str(start)
    source = f"fine-tuned on {data} from {name} ({licence or 'licence not known'})"
    return licence, f"{source}, {before}" if before else source


def average_of(members: Sequence[Path], warn: Callable[[str], None]) -> tuple[str, str]:
    """Returns licence and source of averaged weights."""
    cards = [card for path in members if (card := read_card_or_warn(path, warn)) is not None]
    licences = list(dict.fromkeys(card.licence for card in cards if card.licence))
    sources = list(dict.fromkeys(card.source for card in cards if card.source))
    return " AND ".join(licences), "; ".join([f"average of {len(members)} weights", *sources])


def licence_warning(weights: Path | str, card: ModelCard | None) -> str:
    """Warns where a licence extends to what is made from the weights; "": it does not.

    Args: card: the card of the weights.
    """
    if card is None or "GPL" not in card.licence.upper():
        return ""
    return (
        f"{weights}: these weights come under {shown(card.licence)}, and so may what is trained, "
        "exported or averaged from them: docs/finetuning.md"
    )


def read_card(path: Path | str) -> ModelCard | None:
    """Reads the card of weights; None: they have none (.pdparams, older versions, others).


    Nothing in it is executed, and its size is bounded; its texts may come from a stranger.

    Args: path: a checkpoint, a run's output_dir (its best), an export's folder, a weight file, or a
        name of the zoo, which is downloaded if needed; what is known of a published file is
        added.
    Raises: WeightsError: no such file, of an unknown kind, damaged, or an invalid card.
    """
    entry, path = published(path), checkpoint_of(local_weights(path))
    require_there(path)
    if path.is_dir():
        if (path / "infer.yml").is_file():
            return _read_export_card(path / "infer.yml")
        has_manifest = (path / "manifest.json").is_file()
        return through_links(path, _read_checkpoint_card) if has_manifest else None
    require_known_ending(path)
    if path.suffix.lower() in (".pt", ".pth", ".ckpt"):
        return _add_published(
            entry, _read_or_damaged(path, lambda: _make_torch_card(read_torch_content(path)))
        )
    text = read_notes(path).get(CARD_NOTE)
    if text is not None:
        return _parse(text.encode(), path)
    manifest = path.parent / "manifest.json"  # model.safetensors of a checkpoint
    return _read_checkpoint_card(path.parent) if manifest.is_file() else _add_published(entry, None)


def _add_published(entry: PublishedWeights | None, card: ModelCard | None) -> ModelCard | None:
    """Adds to a card what is known of published weights.

    Args: card: the card of their file.
    """
    if entry is None:
        return card
    fields: dict[str, Any] = {
        "licence": entry.source.licence,
        "source": f"{entry.name}, {entry.source.home} ({entry.source.remark})",
    }
    if card is None or not card.class_names:
        fields |= {"class_names": entry.class_names, "category_ids": entry.category_ids}
    if (card is None or card.model is None) and entry.protocol is not None:  # no backbone alone
        config = load_config(find_config(entry.config), entry.overrides)
        fields |= {
            "task": config.model.task,
            "model": section_of(config),
            "image_size": config.model.image_size,
            "resize": resize_section(config.data.resize, config.model.task),
            "nms": config.suppression if config.model.task == "detect" else None,
        }
    return (card or ModelCard()).model_copy(update=fields)


def read_card_or_warn(
    path: Path | str, warn: Callable[[str], None], *, derives: bool = True
) -> ModelCard | None:
    """Reads a card as `read_card` does; an invalid card becomes a warning.

    Args: derives: something is made from these weights; warns if their licence extends to it.
    Raises: WeightsError: no such file, or damaged.
    """
    try:
        card = read_card(path)
    except WeightsError as error:
        if error.code != "model_card_invalid":
            raise
        warn(f"{error}")
        return None
    line = licence_warning(path, card) if derives else ""
    if line:
        warn(line)
    return card


def names_for(
    path: Path | str, class_names: Sequence[str], warn: Callable[[str], None] = lambda _: None
) -> ClassNames | None:
    """Reads the class names of weights, by which `load_weights` matches those of a model.

    Args: class_names: of class 0, 1, ... of the model; warn: as in `read_card_or_warn`.
    Returns: None: the weights have no card.
    """
    card = read_card_or_warn(path, warn)
    return ClassNames(card.class_names, tuple(class_names)) if card else None


def require_classes_of(
    path: Path, class_names: Sequence[str], owner: str, fix: str
) -> ClassNames | None:
    """Requires weights to have exactly these classes, in any order.

    Weights that do not name theirs pass.

    Args: path: the weights; owner: what has `class_names`, in words; fix: what to do.
    Returns: the names of both, as `names_for`.
    Raises: ConfigError `classes_differ`.
    """
    names = names_for(path, class_names)
    if names is not None:
        require_same_classes(names.of_model, names.of_file, where=f"{path}", owner=owner, fix=fix)
    return names


def _parse(text: bytes, where: Path) -> ModelCard:
    """Parses a card; leaves out fields that this version does not know.

    Raises: WeightsError `model_card_invalid`.
    """
    if len(text) > _MAX_BYTES:
        raise _invalid_card(where, f"{len(text)} bytes, expected at most {_MAX_BYTES}")
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"expected an object, found {type(content).__name__}")
        fields = {key: value for key, value in content.items() if key in ModelCard.model_fields}
        return ModelCard.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise _invalid_card(where, f"{shown(key)}: {shown(first['msg'])}") from None
    except (ValueError, RecursionError) as error:
        raise _invalid_card(where, shown(str(error))) from None


def _invalid_card(where: Path, reason: str) -> WeightsError:
    """Builds the error of a card that cannot be read."""
    return WeightsError(
        f"its model card cannot be read: {reason}",
        code="model_card_invalid",
        where=str(where),
        fix="give -c CONFIG, or install the newer ppdist that wrote it",
    )


def _read_or_damaged(path: Path, read: Callable[[], T]) -> T:
    """Reads a pickle; whatever its parser raises becomes a WeightsError.

    Parsers of pickles have no list of the errors that they raise; see weights.read_arrays.
    """
    try:
        return read()
    except WeightsError:
        raise
    except Exception as error:
        raise WeightsError(
            f"damaged, or not a {path.suffix} file",
            code="weights_damaged",
            where=str(path),
            fix="fetch it again",
        ) from error


def _read_checkpoint_card(folder: Path) -> ModelCard | None:
    """Reads the card of a checkpoint; None: it has none."""
    files = checked_files(folder, (CARD_FILE,), _MAX_BYTES)
    return _parse(files[CARD_FILE], folder / CARD_FILE) if files else None


def _read_export_card(file: Path) -> ModelCard:
    """Makes a card of infer.yml, which is JSON and written by `ppdist.export.spec`."""
    try:
        spec = json.loads(read_file(file, _MAX_BYTES))
        fields = {key: spec[key] for key in ModelCard.model_fields if key in spec}
        fields |= {"model": spec.get("network"), "image_size": spec["input"]["size"]}
        fields |= {"normalised": spec["input"].get("normalised")}
        return _parse(json.dumps(fields).encode(), file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, WeightsError):
            raise
        raise _invalid_card(file, shown(repr(error))) from error


# Modules of the classes in ultralytics' pickles.  Their weights come under the licence of the code.
_ULTRALYTICS = ("models.yolo", "ultralytics.")
_YOLOV5_NMS = NMSConfig(score_threshold=0.001, iou_threshold=0.6, candidates=10000, keep=300)


def _make_torch_card(content: object) -> ModelCard | None:
    """Makes the card of a pickled model; None: a state dict describes nothing."""
    saved = mapping(content) or {}
    for candidate in (saved.get("ema"), saved.get("model"), content):
        if isinstance(candidate, PickledObject) and candidate.maker.module.startswith(_ULTRALYTICS):
            return _make_ultralytics_card(candidate, saved)
    return None


def _make_ultralytics_card(model: PickledObject, saved: Mapping[str, object]) -> ModelCard:
    """Makes the card of a model that ultralytics' software pickled."""
    state = mapping(model.state) or {}
    names = _class_names(state.get("names"))
    section = None
    if model.maker.module == "models.yolo":
        section = config_of_rows(mapping(state.get("yaml")) or {}, len(names), saved.get("opt"))
    return ModelCard(
        model=section.model_dump(mode="json") if section else None,
        class_names=names,
        image_size=section.image_size if section else None,
        resize=resize_section("letterbox") if section else None,
        normalised=NormalisationSection(mean=(0, 0, 0), std=(1, 1, 1)) if section else None,
        nms=_YOLOV5_NMS if section else None,
        licence=AGPL,
        source="made by ultralytics' software",
        made_with=shown(str(model.maker)),
    )


def config_of_rows(rows: Mapping[str, Any], class_count: int, opt: object) -> YOLOv5Config | None:
    """Derives the `model` section of an original pickle; None: it is no YOLOv5.

    Args: rows: its layers and multiples; named: its class names, 0: it has none; opt: of its
        training, which says the size of images.
    """
    head, depth, width = rows.get("head"), rows.get("depth_multiple"), rows.get("width_multiple")
    # The last row of the head is [inputs, repeats, "Detect", arguments]; it has an input per level.
    try:
        inputs, _, kind = head[-1][:3]  # type: ignore[index]
        levels = len(inputs)
    except (TypeError, IndexError, ValueError):
        return None
    count = class_count or rows.get("nc")
    numbers = all(isinstance(number, int | float) and 0 < number < 100 for number in (depth, width))
    if kind != "Detect" or levels not in (3, 4) or not numbers or type(count) is not int:
        return None
    # YOLOv5's own default sizes, and the coarsest stride, of which inputs are multiples.
    suffix, side, step = ("6", 1280, 64) if levels == 4 else ("", 640, 32)
    settings = mapping(opt) or mapping(opt.state if isinstance(opt, PickledObject) else None) or {}
    image_size = settings.get("imgsz", settings.get("img_size"))
    image_size = image_size[0] if isinstance(image_size, list) and image_size else image_size
    if type(image_size) is int and 0 < image_size <= 8192:
        side = math.ceil(image_size / step) * step
    # A pickle has the multiples, not the name of a size.
    size = next(
        (name for name, depth_width in DEPTH_WIDTH.items() if depth_width == (depth, width)), None
    )
    custom = {} if size else {"depth_multiple": float(depth), "width_multiple": float(width)}  # type: ignore[arg-type]
    section: dict[str, Any] = {"size": f"{size or 's'}{suffix}", "num_classes": count, **custom}
    try:
        return YOLOv5Config.model_validate({**section, "image_size": (side, side)})
    except ValidationError:
        return None


def _class_names(value: object) -> tuple[str, ...]:
    """Reads class names from a list or dict; (): it is neither."""
    if isinstance(value, PickledObject):
        value = [name for _, name in sorted((k, v) for k, v in value.items if type(k) is int)]
    if not isinstance(value, list) or len(value) > _MAX_CLASSES:
        return ()
    names = [name for name in value if isinstance(name, str) and len(name) <= _MAX_LETTERS]
    return tuple(names) if len(names) == len(value) else ()


def require_fit(model: ModelConfig, weights: Path | str) -> None:
    """Checks published weights against the model, without a download.

    Raises: WeightsError: they are a detector's of another family or size.
    """
    entry = published(weights) if is_name(weights) else None
    if entry is None:
        return
    detector = _detector_of(entry)
    if detector is None or model.task != "detect" or _same_design(detector, model):
        return
    fitting = fitting_weights(model)
    suggestion = f"weights that fit ({', '.join(fitting[:3])})" if fitting else "other weights"
    config_names = {long: short for short, long in short_names().items()}
    described_weights, described_model = (" ".join(_design(design)) for design in (detector, model))
    raise WeightsError(
        f"these are weights of {described_weights}, but the model is {described_model}",
        code="weights_of_other_architecture",
        where=f"{weights}",
        fix=f"use {suggestion}, or the model {config_names.get(entry.config, entry.config)}",
    )


def fitting_weights(model: ModelConfig) -> list[str]:
    """Lists the names of published weights of this detector's family and size."""
    return [
        entry.name
        for entry in zoo().values()
        if (detector := _detector_of(entry)) is not None and _same_design(detector, model)
    ]


@cache
def _detector_of(entry: PublishedWeights) -> ModelConfig | None:
    """Returns the detector of a zoo entry; None: it has none."""
    if entry.protocol is None:
        return None
    model = load_config(find_config(entry.config), entry.overrides).model
    return model if model.task == "detect" else None


def _same_design(weights_model: ModelConfig, model: ModelConfig) -> bool:
    """Returns True if weights of one model may fit the other."""
    if weights_model.name != model.name:
        return False
    is_custom = any(getattr(model, key, None) for key in ("depth_multiple", "width_multiple"))
    return is_custom or _design(weights_model) == _design(model)


def _design(model: ModelConfig) -> tuple[str, ...]:
    """Returns the values that determine the shapes of a model's weights."""
    keys = ("name", "variant", "size", "body")
    network: tuple[str, ...] | None = getattr(model, "network", None)
    return network or tuple(getattr(model, key) for key in keys if hasattr(model, key))


_NO_DATA = "data"  # `data.root` of a config that is built from a card


def config_of_weights(
    weights: Path | str, overrides: Sequence[str] = (), *, needs_data: bool = False
) -> ExperimentConfig:
    """Builds the configuration that weights bring along.

    For a checkpoint this is its config.yml; for a weight file what its card says, with a data
    section that names no real files; for a name of the zoo the shipped config.

    Args:
        overrides: items of -o.
        needs_data: the caller reads data, so that -o must name them.
    Raises: WeightsError: they do not record their model, or their data; ConfigError:
        see `load_config`.
    """
    path = checkpoint_of(Path(weights))
    folder = path if path.is_dir() else path.parent
    if (folder / "manifest.json").is_file() and (folder / "config.yml").is_file():
        return load_config(folder / "config.yml", overrides)
    # A name needs no download here: ranks have not joined yet, and would fail one after the other.
    entry = published(weights) if is_name(weights) else None
    if entry is not None and needs_data:  # its config has the layout of the public data set
        return load_config(find_config(entry.config), [*entry.overrides, *overrides])
    card = _add_published(entry, None) if entry else read_card(path)
    if card is None or card.model is None:
        raise WeightsError(
            "these weights do not record their model",
            code="weights_without_card",
            where=str(path),
            fix="give their training's config: -c CONFIG",
        )
    if needs_data and not any(item.startswith("data.root=") for item in overrides):
        raise WeightsError(
            "these weights do not record their data",
            code="weights_without_data",
            where=str(path),
            fix="give the folder of the data, -o data.root=FOLDER, or -c CONFIG",
        )
    mode = card.resize.mode if card.resize else "stretch"
    data: dict[str, Any] = {"root": _NO_DATA, "train": {}, "val": {}}
    data["class_names"] = list(card.class_names)
    data["resize"] = "stretch" if mode == "centre_crop" else mode
    if card.task == "classify":
        data["format"] = "folder"
    tree: dict[str, Any] = {"data": data, "model": {**card.model, "pretrained": None}}
    if card.nms is not None:
        tree["nms"] = card.nms.model_dump(mode="json")
    defaults = {"output_dir": default_output_dir(path)}
    source = f"{path}: model card"
    return parse_plain(tree, source, overrides, ExperimentConfig, defaults, stored=True)
