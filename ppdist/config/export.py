"""ExportOptions: what an export writes, and how it is checked."""

from typing import Literal

from pydantic import Field, model_validator

from ppdist.config.section import Section

CALIBRATION = 64  # images
INT8_LOSS = 0.02  # mAP


class ExportOptions(Section):
    """Files that an export writes, and how they are checked."""

    formats: tuple[Literal["paddle", "onnx", "openvino"], ...] = Field(
        default=("paddle",),
        min_length=1,
        description="paddle: Paddle Inference; onnx: ONNX, tried in OpenVINO where that is "
        "installed; openvino: ONNX, which must compute the same in OpenVINO",
    )
    nms: bool = Field(
        default=True, description="of a detector: the graph ends with its suppression"
    )
    fixed_batch: bool = Field(default=False, description="the graph takes one image only")
    fixed_size: bool = Field(default=False, description="the graph takes model.image_size only")
    normalised_input: bool = Field(
        default=False,
        description="the graph takes (x / 255 - mean) / std instead of pixels x; infer.yml has the "
        "numbers",
    )
    int8: bool = Field(
        default=False,
        description="the ONNX model in 8-bit integers, too; needs the training images",
    )
    calibration: int = Field(
        default=CALIBRATION,
        ge=1,
        description="training images that tell int8 what numbers occur",
    )
    int8_loss: float = Field(
        default=INT8_LOSS,
        ge=0,
        le=1,
        description="mAP that int8 may lose against eager; an export that loses more is not kept",
    )

    @model_validator(mode="after")
    def _check_formats(self) -> "ExportOptions":
        """Refuses int8 without the ONNX model that it is a form of."""
        if self.int8 and not {"onnx", "openvino"} & {*self.formats}:
            raise ValueError("int8 is a form of the ONNX model: add onnx to formats")
        return self
