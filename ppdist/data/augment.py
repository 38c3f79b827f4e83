"""The `data.augment:` section: how training images are changed at random."""

from typing import Annotated

from pydantic import Field

from ppdist.config import Section

Gain = Annotated[float, Field(ge=0, le=1)]


class AffineConfig(Section):
    """Turn, zoom, slant and shift about the middle of the input, uniform, of every image."""

    rotate: float = Field(
        default=0.0, ge=0, le=180, description="Largest angle either way, degrees."
    )
    scale: float = Field(
        default=0.0, ge=0, lt=1, description="Zoom is 1 - scale to 1 + scale (YOLOv5: 0.5)."
    )
    shear: float = Field(
        default=0.0, ge=0, lt=90, description="Largest slant along x and along y, degrees."
    )
    translate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Largest shift / side of the input, along x and along y (YOLOv5: 0.1).",
    )

    @property
    def moves(self) -> bool:
        """Whether it does anything."""
        return any((self.rotate, self.scale, self.shear, self.translate))


class AugmentConfig(Section):
    """Random changes of training images, each with its probability; 0 switches it off.

    In order: mosaic, or else expand and crop; affine and flip; distort; mixup; hsv.
    """

    distort: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Chance of each of brightness (+-32), contrast (x 0.5-1.5), saturation "
        "(x 0.5-1.5) and hue (+-18 degrees).",
    )
    expand: float = Field(
        default=0.5, ge=0, le=1, description="Chance to place the image on a larger canvas."
    )
    expand_most: float = Field(
        default=4.0, ge=1, description="expand: largest side of the canvas / side of the image."
    )
    crop: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Chance to try a crop around objects; one try in seven leaves the image whole. "
        "Classifier: chance to take a random part, else the centre.",
    )
    crop_least: float = Field(
        default=0.3, gt=0, le=1, description="crop: smallest geometric mean of the sides that stay."
    )
    flip: float = Field(default=0.5, ge=0, le=1, description="Chance to mirror left to right.")
    flip_vertical: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to mirror top to bottom, for images without an up (microscopy).",
    )
    random_interpolation: bool = Field(
        default=True,
        description="Resize by nearest, linear, cubic, area or Lanczos at random; false: linear, "
        "as in a mosaic or with affine always.",
    )
    mosaic: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance that four images, three of them drawn at random, share the input, "
        "meeting in a random point (YOLOv5: 1); such images are neither expanded nor cropped.",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to blend the input with another made like it, share Beta(32, 32).",
    )
    close_mosaic_epochs: int = Field(
        default=0, ge=0, description="The last epochs of a run, without mosaic and mixup."
    )
    affine: AffineConfig = Field(
        default=AffineConfig(), description="Random turn, zoom, slant and shift."
    )
    hsv: tuple[Gain, Gain, Gain] = Field(
        default=(0.0, 0.0, 0.0),
        description="Largest change of hue (share of the circle), of saturation and of value "
        "(shares of themselves), each uniform either way (YOLOv5: 0.015, 0.7, 0.4).",
    )
