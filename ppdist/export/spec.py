"""infer.yml: the description of everything that a program needs to use an exported model.

It accompanies every exported model and is the only source of its pre- and post-processing.  When
the eager model predicts, the same description is built from a config, so that both resize images,
filter by score and map boxes back alike. Its text is JSON, which is also YAML: a program that
deploys the model needs no YAML reader.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

import ppdist
from ppdist.common.errors import ConfigError, ExportError, StorageError, UserError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.parse import parse_config
from ppdist.config.preprocess import (
    STRETCH,
    NormalisationSection,
    ResizeSection,
    resize_section,
)
from ppdist.config.section import Section
from ppdist.data.datasets.build import read_annotations
from ppdist.data.datasets.selection import selected_names
from ppdist.data.types import DetectionSet
from ppdist.models.model_card import ModelCard, section_of

if TYPE_CHECKING:
    from ppdist.config.experiment import ExperimentConfig


SPEC_FILE = "infer.yml"


class InputSection(Section):
    """The one input: raw pixels, unless `normalised` is set."""

    name: str = Field(default="images", description="Name of the input.")
    dtype: Literal["float32"] = Field(default="float32", description="Type of its numbers.")
    layout: Literal["BCHW"] = Field(default="BCHW", description="Order of its axes.")
    colour: Literal["rgb"] = Field(default="rgb", description="Order of the three channels.")
    pixel_range: tuple[float, float] = Field(
        default=(0.0, 255.0), description="Smallest and largest pixel, before `normalised`."
    )
    normalised: NormalisationSection | None = Field(
        default=None,
        description="null: the graph takes the pixels as they are and normalises them itself; "
        "else it takes (x / 255 - mean) / std.",
    )
    size: tuple[int, int] = Field(description="Height and width to resize to, pixels.")
    size_multiple: int = Field(
        default=32, gt=0, description="Height and width must be multiples of this, pixels."
    )
    dynamic_batch: bool = Field(default=True, description="Any number of images at once.")
    dynamic_size: bool = Field(default=True, description="Any size, not only `size`.")


class OutputSection(Section):
    """An output of one of the files."""

    name: str = Field(description="Name in the file.")
    shape: str = Field(description="Its axes: B images, N predictions, C classes, R rows kept.")
    meaning: str = Field(description="What the numbers are.")


class LineageSection(Section):
    """The origin of an exported model."""

    weights: str = Field(
        description="SHA-256 of the weight file; of a checkpoint that of its manifest.json, which "
        "holds those of its files."
    )
    run: str = Field(default="", description="Name of the run's folder; empty: no run of ours.")
    step: int | None = Field(default=None, description="Optimizer steps of the checkpoint.")
    commit: str = Field(
        default="", description="Git commit of ppdist when the run started; empty: not known."
    )


class SampleSection(Section):
    """The COCO mAP of the model and an exported file on the same validation images."""

    images: int = Field(description="How many, spread over the validation set.")
    mAP_eager: float = Field(description="Of the model before export.")
    mAP: float = Field(description="Of this file, in the runtime it is for.")


class ModelFileSection(Section):
    """An exported form of the model."""

    files: tuple[str, ...] = Field(description="File names beside infer.yml.")
    nms_in_graph: bool = Field(
        description="False: apply `nms`, where there is one, to scores and boxes afterwards."
    )
    outputs: tuple[OutputSection, ...] = Field(description="In the order the runtime gives them.")
    max_score_error: float = Field(description="Largest difference from eager seen; 0..1.")
    max_box_error: float | None = Field(
        default=None,
        description="Largest difference from eager seen, pixels (of boxes longer than 500 in "
        "proportion); of a classifier none.",
    )
    sample: SampleSection | None = Field(
        default=None, description="Accuracy, where validation images were at hand."
    )


class InferenceSpec(Section):
    """The content of infer.yml: everything a program needs to use the exported model."""

    version: Literal[1] = Field(default=1, description="Version of this description.")
    task: Literal["detect", "classify"] = Field(
        default="detect",
        description="detect: boxes with a class each; classify: one class for the whole image.",
    )
    model: str = Field(description="What was exported, for the reader.")
    made_with: str = Field(default="", description="Versions of ppdist and Paddle.")
    lineage: LineageSection | None = Field(default=None, description="The weights and their run.")
    sha256: dict[str, str] = Field(
        default_factory=dict,
        description="SHA-256 of each file of this export, by name. What runs the model refuses "
        "another file; take the entry out if you changed a file on purpose.",
    )
    layout: Literal["flat", "triton"] = Field(
        default="flat",
        description="triton: an earlier version made a model of a Triton repository, with "
        "config.pbtxt.",
    )
    input: InputSection = Field(description="The input.")
    resize: ResizeSection = Field(default=STRETCH, description="Image to input.")
    nms: NMSConfig | None = Field(
        default=None,
        description="Thresholds of the non-maximum suppression; with null for `iou_threshold` "
        "there is none: the best `keep` boxes of an image stay.  classify: none.",
    )
    best_f1_threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Default confidence threshold for programs that show boxes, as in the weights' "
        "model card; null: not known.",
    )
    class_names: tuple[str, ...] = Field(description="Name of class 0, 1, ...")
    category_ids: tuple[int, ...] = Field(description="What a COCO result calls class 0, 1, ...")
    network: dict[str, Any] | None = Field(
        default=None, description="The `model` section of the configuration."
    )
    licence: str = Field(default="", description="Of the weights, as in their model card.")
    source: str = Field(default="", description="Of the weights, as in their model card.")
    paddle: ModelFileSection | None = Field(default=None, description="For Paddle Inference.")
    onnx: ModelFileSection | None = Field(default=None, description="For ONNX runtimes.")
    onnx_int8: ModelFileSection | None = Field(
        default=None, description="For ONNX runtimes, in 8-bit integers; see its sample."
    )
    openvino: ModelFileSection | None = Field(
        default=None,
        description="The ONNX model in OpenVINO, where the export found that it computes the same "
        "there; `auto` takes OpenVINO only then.",
    )
    openvino_int8: ModelFileSection | None = Field(
        default=None,
        description="Likewise, of the one in 8-bit integers, on the processor that exported; "
        "`auto` takes OpenVINO for it only then.",
    )
    refused: dict[str, str] = Field(
        default_factory=dict,
        description="By section: why it is null although the export tried it. A program that runs "
        "the file all the same warns with this reason.",
    )
    earlier: tuple[str, ...] = Field(
        default=(),
        description="Files of earlier exports that lie here still. They hold other models: "
        "nothing else in this description is about them.",
    )

    def file_names(self) -> set[str]:
        """Returns the names of all files that exports wrote to the folder, including infer.yml."""
        file_lists = [part.files for part in (self.paddle, self.onnx, self.onnx_int8) if part]
        config = {"config.pbtxt"} if self.layout == "triton" else set()
        return {
            SPEC_FILE,
            *config,
            *self.earlier,
            *(name for names in file_lists for name in names),
        }

    @model_validator(mode="after")
    def _detection_has_thresholds(self) -> "InferenceSpec":
        if self.task == "detect" and self.nms is None:
            raise ValueError("nms is missing: task detect needs it")
        return self


def validation_set(
    config: "ExperimentConfig", warn: Callable[[str], None], card: ModelCard | None = None
) -> DetectionSet | None:
    """Reads the validation set with the class names; None if it is absent.

    If the set is absent, a warning is given. Images may be missing: the annotations are enough.

    Args: card: the card of the weights, see `describe`; the warning names what is taken from it
        instead.
    """
    data, count = config.data, config.model.num_classes
    try:
        return read_annotations(data, "val", count)
    except (UserError, StorageError) as error:  # StorageError: a store without network
        origin = "are made up (class 0, ...)"
        names = selected_names(data)
        if names:
            origin = "are those of data.class_names"
        elif card is not None and len(card.class_names) == count:
            origin = "are those of the model card"
        ids = ", category ids are made up (1, 2, ...)" if data.format == "coco" else ""
        if card is not None and len(card.category_ids) == count:
            ids = ids if names not in ((), card.class_names) else ""
        warn(f"class names {origin}{ids}: the validation set cannot be read: {error}")
        return None


def describe(
    config: "ExperimentConfig", dataset: DetectionSet | None, card: ModelCard | None = None
) -> InferenceSpec:
    """Builds the InferenceSpec of an experiment's model in its evaluation form, without an export.

    Args:
        dataset: source of class names and ids; None: the names come from the config, else the card,
            and the ids from the card, else they are 1, 2, ... (for a classifier: 0, 1, ...).
        card: the card of the weights; also the source of `licence` and `source`.
    Raises: ConfigError: data.class_names does not name every class of the model.
    """
    names = selected_names(config.data)
    name_count = len(names)
    if name_count and name_count != config.model.num_classes:
        raise ConfigError(
            f"data.class_names has {name_count} names but model.num_classes is "
            f"{config.model.num_classes}",
            code="class_names_count",
            fix="give a name for each class of the model",
        )
    model_keys = config.model.model_dump(exclude_none=True, exclude={"pretrained", "image_size"})
    count = config.model.num_classes
    card = card or ModelCard()
    if not names and len(card.class_names) == count:
        names = card.class_names
    names = names or tuple(f"class {i}" for i in range(count))
    task = config.model.task
    # COCO counts categories from 1.
    ids = tuple(range(count)) if task == "classify" else tuple(range(1, count + 1))
    if len(card.category_ids) == count and names == card.class_names:
        ids = card.category_ids
    return InferenceSpec(
        task=task,
        model=", ".join(f"{key}: {value}" for key, value in model_keys.items()),
        input=InputSection(size=config.model.image_size),
        resize=resize_section(config.data.resize, task),
        nms=config.suppression if task == "detect" else None,
        best_f1_threshold=card.best_f1_threshold,
        class_names=dataset.class_names if dataset else names,
        category_ids=dataset.category_ids if dataset else ids,
        network=section_of(config),
        licence=card.licence,
        source=card.source,
    )


def make_card(spec: InferenceSpec) -> ModelCard:
    """Builds the model card of an export."""
    shared = {key: value for key, value in spec if key in ModelCard.model_fields}
    return ModelCard(
        **{
            **shared,
            "model": spec.network,
            "image_size": spec.input.size,
            "normalised": spec.input.normalised,
            "made_with": f"ppdist {ppdist.__version__}",
        }
    )


def read_spec(directory: Path) -> InferenceSpec:
    """Reads DIR/infer.yml.

    Raises: ExportError: there is no exported model.  ConfigError: the file is invalid.
    """
    file = directory / SPEC_FILE
    if not file.is_file():
        raise ExportError(
            f"no {SPEC_FILE} here, so this is not an exported model",
            code="not_an_export",
            where=str(directory),
            fix="make one with `ppdist export -w WEIGHTS`, which prints its folder",
        )
    return parse_config(file, (), InferenceSpec)


def write_spec(directory: Path, spec: InferenceSpec) -> None:
    """Writes DIR/infer.yml: JSON that a YAML 1.1 reader understands alike."""
    text = json.dumps(spec.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    text = _DOTLESS_FLOAT.sub(r"\1.0\2", text)
    text = _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    (directory / SPEC_FILE).write_text(text + "\n", encoding="utf-8")


# A number such as 1e-05 at the end of a line, so not in a string: YAML 1.1 reads it as text without
# a dot.
_DOTLESS_FLOAT = re.compile(r"((?:^|: ) *-?\d+)(e[-+]?\d+,?)$", re.MULTILINE)
# Allowed in a JSON string, but not printable or a line break in YAML; escaped in both.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
