"""The `data.augment:` section: how training images are changed at random."""

import math
from typing import Annotated

from pydantic import Field, field_validator

from ppdist.config.section import Section

Gain = Annotated[float, Field(ge=0, le=1)]
HueGain = Annotated[float, Field(ge=0, le=0.4)]
Window = tuple[int, int] | tuple[Gain, Gain]  # epochs [first, end), or shares of the run
COMBINES = ("mosaic", "mixup", "cutmix", "copy_paste")  # several images in one input


class AffineConfig(Section):
    """Random rotation, zoom, shear, shift and perspective about the input's centre."""

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
    perspective: float = Field(
        default=0.0,
        ge=0,
        le=0.15,
        description="Largest difference of zoom between the middle of the input and its edges, "
        "along x and along y, a share.",
    )

    @property
    def moves(self) -> bool:
        """Returns True if any of the changes is enabled."""
        return any((self.rotate, self.scale, self.shear, self.translate, self.perspective))


class AugmentConfig(Section):
    """Random changes of training images, each with a probability; 0: off.

    In order: rotate90 of each image; mosaic, or else expand, crop; flip, flip_vertical, affine;
    distort; copy_paste; cutmix; mixup; hsv; blur; grey; erase.
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
    rotate90: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to turn each image by 90, 180 or 270 degrees, before all else.",
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
        description="Chance that four images, three of them drawn at random, meet in a random "
        "point of the input (YOLOv5: 1); such images are neither expanded nor cropped.",
    )
    mosaic_whole: bool = Field(
        default=False,
        description="mosaic: each image whole in a cell of its own, 2 x 2 of them fill the input "
        "(Dense O2O), before affine; false: at full size, cut by the input's edges.",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to blend the input with another made like it, share Beta(32, 32).",
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance that a rectangle of the input, of any size and place, shows another "
        "one made like it.",
    )
    copy_paste: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to paste about half the objects of another image, cut out along their "
        "outlines; needs annotations with polygons.",
    )
    combine_epochs: Window | None = Field(
        default=None,
        description="Epochs [first, end), counted from 0, in which several images may share an "
        "input (mosaic, mixup, cutmix, copy_paste), as in Dense O2O. With a point, [0.05, 0.5]: "
        "shares of the run, to whole epochs. null: all.",
    )
    close_mosaic_epochs: int = Field(
        default=0,
        ge=0,
        description="The last epochs of a run, without mosaic, mixup, cutmix and copy_paste.",
    )
    plain_epochs: int = Field(
        default=0, ge=0, description="The last epochs of a run, with resize and flips alone."
    )
    affine: AffineConfig = Field(
        default=AffineConfig(), description="Random turn, zoom, slant, shift and tilt."
    )
    hsv: tuple[HueGain, Gain, Gain] = Field(
        default=(0.0, 0.0, 0.0),
        description="Largest change of hue (share of the circle, at most 0.4), of saturation and "
        "of value (shares of themselves), each uniform either way (YOLOv5: 0.015, 0.7, 0.4).",
    )
    blur: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance of a Gaussian blur of standard deviation 0.5 to 2 input pixels.",
    )
    grey: float = Field(default=0.0, ge=0, le=1, description="Chance to take the colours out.")
    erase: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Chance to put noise in place of a rectangle of 2 to 20 % of the input; "
        "objects less than a third of which remains are dropped.",
    )

    @field_validator("combine_epochs", mode="before")
    @classmethod
    def _check_window(cls, window: object) -> object:
        """Refuses windows that contain no epoch, and shares of the run outside 0..1."""
        if not isinstance(window, list | tuple):
            return window
        numbers = [number for number in window if type(number) in (int, float)]
        if len(window) == len(numbers) == 2:
            first, end = numbers
            shares = any(isinstance(number, float) for number in numbers)
            if shares and not all(0 <= number <= 1 for number in numbers):
                raise ValueError(
                    f"[{first}, {end}] is neither epochs, two whole numbers, nor shares of the "
                    "run, two numbers from 0 to 1; write [4, 30] or [0.05, 0.5]"
                )
            if not 0 <= first < end:
                raise ValueError(f"[{first}, {end}] holds no epoch; write [first, end)")
        return tuple(window)  # strict: no list

    def in_epoch(self, epoch: int, epochs: int | None) -> "AugmentConfig":
        """Returns the augmentation of one epoch, counted from 0 (epochs None: no last ones)."""
        left = math.inf if epochs is None else epochs - epoch
        if self.plain_epochs and left <= self.plain_epochs:
            # Not a copy: fields not named here have their default, which is off.
            return AugmentConfig(
                distort=0.0,
                expand=0.0,
                crop=0.0,
                flip=self.flip,
                flip_vertical=self.flip_vertical,
                random_interpolation=False,
            )
        first, end = self.combine_epochs or (0, math.inf)
        if self._window_in_shares:
            assert epochs is not None, "shares of a run need its length"
            first, end = round(first * epochs), round(end * epochs)
        closed = self.close_mosaic_epochs and left <= self.close_mosaic_epochs
        if closed or not first <= epoch < end:
            return self.model_copy(update=dict.fromkeys(COMBINES, 0.0))
        return self

    @property
    def _window_in_shares(self) -> bool:
        """Returns True if `combine_epochs` is given as shares of the run: [0.0, 0.5]."""
        return self.combine_epochs is not None and isinstance(self.combine_epochs[1], float)

    def with_epoch_scale(self, factor: float) -> "AugmentConfig":
        """Scales the phases that are counted in epochs for a run `factor` times as long.

        Rounds to whole epochs, but never to 0: a phase of at least one epoch keeps one.
        """
        window = self.combine_epochs
        if window is not None and not self._window_in_shares:
            first, end = (round(bound * factor) for bound in window)
            window = first, max(first + 1, end)
        last = {
            name: max(1, round(count * factor)) if count else 0
            for name, count in (
                ("close_mosaic_epochs", self.close_mosaic_epochs),
                ("plain_epochs", self.plain_epochs),
            )
        }
        return self.model_copy(update={"combine_epochs": window, **last})

    @property
    def last_stage_epochs(self) -> int:
        """Returns the number of last epochs without strong augmentation.

        It is 0 if strong augmentation lasts to the end of the run.
        """
        return self.plain_epochs or self.close_mosaic_epochs

    @property
    def needs_outlines(self) -> bool:
        """Returns True if the training set must be read with the outlines of its objects."""
        return self.copy_paste > 0

    @property
    def needs_length(self) -> bool:
        """Returns True if the augmentation of an epoch depends on the length of the run."""
        return bool(self.close_mosaic_epochs or self.plain_epochs or self._window_in_shares)

    @property
    def most_zoom(self) -> float:
        """Returns the largest magnification of an image over its whole view, per axis.

        A crop has at least crop_least ** 2 of the area, and 0.5 to 2 times the aspect ratio.
        Affine counts as 1: a closer view magnifies the pixels that fit, as in YOLOv5.
        """
        always_mosaic = self.mosaic == 1 and not (self.needs_length or self.combine_epochs)
        if not self.crop or (always_mosaic and not self.copy_paste):
            return 1.0
        return min(math.sqrt(2) / self.crop_least, self.crop_least**-2)
