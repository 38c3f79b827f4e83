"""The keys of a configuration that this package adds."""

from typing import ClassVar

from pydantic import Field

from ppdist.config.data import DataConfig
from ppdist.config.model import DetectorConfig
from ppdist.config.output import TrackerConfig
from ppdist.config.section import Section


class BlobsLossConfig(Section):
    """Assignment by centres."""

    box_gain: float = Field(default=2.0, ge=0, description="weight of 1 - GIoU")


class BlobsConfig(DetectorConfig):
    """A small detector without anchors."""

    model: ClassVar[str] = "blobs.model:Blobs"
    loss: ClassVar[str] = "blobs.loss:BlobsLoss"
    loss_config: ClassVar[type[Section]] = BlobsLossConfig
    channels: int = Field(default=16, ge=4, description="of the finest feature")


class BlobsSetConfig(DataConfig):
    """Lines of `image width height class x1 y1 x2 y2`; `annotations` is that file."""

    reader: ClassVar[str] = "blobs.data:read"
    delimiter: str = Field(default=" ", min_length=1, description="between the columns")


class LinesConfig(TrackerConfig):
    """A text file of points."""

    writer: ClassVar[str] = "blobs.tracker:Lines"
    digits: int = Field(default=6, ge=1, description="of a value")
