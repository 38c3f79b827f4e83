"""What a third package brings: a small detector of queries, in the way of DETR.

It learns from the targets in its forward pass, needs no suppression, and has no strides to say.
"""

from typing import ClassVar

from pydantic import Field

from ppdist.config.model import DetectorConfig
from ppdist.config.section import Section


class QueriesLossConfig(Section):
    """Each object is learned by the nearest query."""


class QueriesConfig(DetectorConfig):
    """A small detector of queries."""

    model: ClassVar[str] = "queries.model:Queries"
    loss: ClassVar[str] = "queries.model:QueriesLoss"
    loss_config: ClassVar[type[Section]] = QueriesLossConfig
    needs_nms: ClassVar[bool] = False
    queries: int = Field(default=12, ge=1, description="most boxes of an image")
    noise: float = Field(default=0.1, ge=0, description="of denoising, in shares of the image")
