"""The `distill` section: a teacher, and what is learned from it."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from ppdist.config.model import ModelConfig
from ppdist.config.parse import Document
from ppdist.config.plugins import open_section
from ppdist.config.section import OnResume, Section
from ppdist.config.yaml import Node, Problem


class LogitsConfig(Section):
    """Class scores (YOLOv5: objectness and classes)."""

    weight: float = Field(
        default=1.0,
        gt=0,
        description="beside the classes' own loss, which counts 1; raise it while the student is "
        "far from a good teacher, lower it where the teacher is wrong",
    )


class FeaturesConfig(Section):
    """Features of the neck, channel by channel (CWD, arXiv:2011.13256)."""

    weight: float = Field(
        default=1.0,
        gt=0,
        description="beside the boxes' own loss, which counts 1; lower it where boxes get worse",
    )


class BoxesConfig(Section):
    """Boxes that the teacher is sure of."""

    weight: float = Field(
        default=1.0,
        gt=0,
        description="beside the loss of boxes (PP-YOLOE: of distributions), which counts 1; lower "
        "it "
        "where boxes get worse than without a teacher",
    )


class DistillConfig(Section):
    """A teacher, and what the student learns from it."""

    # FREE: the weights themselves are compared.
    teacher: Annotated[str, OnResume.FREE] = Field(
        description="a checkpoint folder of a run of the same model family, classes and strides, "
        "any size, or the output_dir of that run (its best, else its last); for a small model that "
        "has to come nearer to a large one"
    )
    logits: LogitsConfig | None = Field(
        default=LogitsConfig(), description="class scores; null: not learned from it"
    )
    features: FeaturesConfig | None = Field(
        default=None, description="features of the neck; null: not learned from it"
    )
    boxes: BoxesConfig | None = Field(
        default=BoxesConfig(),
        description="boxes: PP-YOLOE by the distributions of sides (LD, arXiv:2102.12252), YOLOv5 "
        "by GIoU with the teacher's, RT-DETR by L1 and GIoU; null: not learned from it",
    )

    @model_validator(mode="after")
    def _check_terms(self) -> "DistillConfig":
        """Refuses a teacher from which nothing is learned."""
        if not (self.logits or self.features or self.boxes):
            raise ValueError(
                "logits, features and boxes are all null, so nothing is learned from the teacher; "
                "give one of them ({} for its defaults), or set distill: null"
            )
        return self


class Trained(Document):
    """The model section of a teacher's run; its other keys may be those of another version."""

    model_config = ConfigDict(extra="ignore")

    model: Annotated[ModelConfig, Field(discriminator="name")]

    @classmethod
    def open_plugins(
        cls, tree: Node, problems: list[Problem], *, stored: bool = False
    ) -> type[Section]:
        """Returns this Section, extended by the plugin detectors that the tree names."""
        return open_section(cls, tree, problems, stored=stored)
