"""What a third package brings: a small detector of queries, in the way of DETR.

It learns from the targets in its forward pass, needs no suppression, and has no strides to say.
"""

from typing import ClassVar, Literal

from pydantic import Field

from ppdist import register_detector
from ppdist.config.base import Section
from ppdist.config.model import DetectorConfig


class QueriesConfig(DetectorConfig):
    """A small detector of queries."""

    needs_nms: ClassVar[bool] = False
    name: Literal["queries"] = Field(default="queries", description="detector family")
    queries: int = Field(default=12, ge=1, description="most boxes of an image")
    noise: float = Field(default=0.1, ge=0, description="of denoising, in shares of the image")


class QueriesLossConfig(Section):
    """Each object is learned by the nearest query."""

    name: Literal["queries"] = Field(default="queries", description="that of the model")


def register() -> None:
    register_detector(
        config=QueriesConfig,
        model="queries.model:Queries",
        loss_config=QueriesLossConfig,
        loss="queries.model:QueriesLoss",
    )
