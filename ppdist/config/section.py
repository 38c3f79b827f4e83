"""Section: a frozen, typed, closed part of a configuration.

The tree of all Sections is `ppdist.config.experiment.ExperimentConfig`; parse.py reads files as it.
"""

from enum import Enum
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Task = Literal["detect", "classify"]  # boxes with classes, or one class for each image


class OnResume(Enum):
    """Effect of a changed key on a resumed run; a note in `Annotated`.

    A key, or the section it is in, without a note affects training after the resume (rates, phases,
    order of images, losses): a run resumes with another value only when it is told to.
    """

    FREE = "what is learned does not change"
    STEP = "what counts is the micro-batches that come of all of these; see MicroBatches"
    SCORES = "the same weights score otherwise: the best so far cannot be compared"
    EVALUATIONS = "as FREE, but where the order of images follows the scores"


class Section(BaseModel):
    """Base of configuration parts: immutable, closed to undeclared keys.

    Give every field `Field(description=...)` with its unit: it becomes the documentation.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


SectionT = TypeVar("SectionT", bound=Section)
