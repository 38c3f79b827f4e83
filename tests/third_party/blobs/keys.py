"""The keys of a configuration that this package adds."""

from typing import Literal

from pydantic import Field

from ppdist.config.base import Section
from ppdist.config.data import DataConfig
from ppdist.config.model import DetectorConfig
from ppdist.config.output import TrackerConfig


class BlobsConfig(DetectorConfig):
    """A small detector without anchors."""

    name: Literal["blobs"] = Field(default="blobs", description="detector family")
    channels: int = Field(default=16, ge=4, description="of the finest feature")


class BlobsLossConfig(Section):
    """Assignment by centres."""

    name: Literal["blobs"] = Field(default="blobs", description="that of the model")
    box_gain: float = Field(default=2.0, ge=0, description="weight of 1 - GIoU")


class BlobsSetConfig(DataConfig):
    """Lines of `image width height class x1 y1 x2 y2`; `annotations` is that file."""

    format: Literal["lines"] = Field(default="lines", description="annotation format")
    delimiter: str = Field(default=" ", min_length=1, description="between the columns")


class LinesConfig(TrackerConfig):
    """A text file of points."""

    name: Literal["lines"] = Field(default="lines", description="the tracker")
    digits: int = Field(default=6, ge=1, description="of a value")
