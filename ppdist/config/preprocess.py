"""How an image becomes the input: sections of infer.yml and model cards."""

from typing import Literal

from pydantic import Field

from ppdist.config.data import Resize
from ppdist.config.section import Section, Task

GREY = (114, 114, 114)  # what lies beside a letterboxed image


class NormalisationSection(Section):
    """Normalisation of pixels 0..255: (x / 255 - mean) / std."""

    mean: tuple[float, float, float] = Field(description="Of red, green and blue, 0..1.")
    std: tuple[float, float, float] = Field(description="Of red, green and blue, 0..1.")


class ResizeSection(Section):
    """Resizing of images to inputs, and the way back for boxes."""

    mode: Resize | Literal["centre_crop"] = Field(
        default="stretch",
        description="stretch, stretch_antialiased: height and width are scaled each on its own; no "
        "padding. letterbox: "
        "both by scale = min(input_height / image_height, input_width / image_width), to "
        "wide = floor(image_width * scale + 1/2) and tall likewise, with left = (input_width - "
        "wide) // 2 and top likewise pixels of `fill` before them and the rest behind. "
        "centre_crop: with scale = min(image_height / input_height, image_width / input_width), "
        "the wide = floor(input_width * scale + 1/2) by tall pixels of the image that begin at "
        "left = (image_width - wide) // 2 and top likewise are resized to the input.",
    )
    interpolation: Literal["cubic", "linear", "antialiased"] = Field(
        default="cubic",
        description="OpenCV INTER_CUBIC or INTER_LINEAR on 8-bit pixels, rounded and clipped; "
        "antialiased: Pillow's bilinear, which averages all pixels that it reduces.",
    )
    fill: tuple[int, int, int] | None = Field(
        default=None, description="letterbox: colour beside the image, 0..255."
    )
    orientation: Literal["upright"] = Field(
        default="upright", description="The image turned as its EXIF data say, before the resize."
    )
    map_back: str | None = Field(
        default=None,
        description="Boxes are in input pixels; this gives pixels of the image. classify: none.",
    )


STRETCH = ResizeSection(map_back="x * image_width / input_width, y * image_height / input_height")
_LETTERBOX = ResizeSection(
    mode="letterbox",
    interpolation="linear",
    fill=GREY,
    map_back="(x - left) * image_width / wide, (y - top) * image_height / tall",
)
_CENTRE_CROP = ResizeSection(mode="centre_crop", interpolation="linear")


def resize_section(resize: Resize, task: Task = "detect") -> ResizeSection:
    """Describes `data.resize` for other programs; classifiers always crop the centre."""
    if task == "classify":
        return _CENTRE_CROP
    if resize == "stretch_antialiased":
        return STRETCH.model_copy(update={"mode": resize, "interpolation": "antialiased"})
    return STRETCH if resize == "stretch" else _LETTERBOX
