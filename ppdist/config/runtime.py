"""RuntimeOptions: how an exported model is run."""

from typing import Literal

from pydantic import Field, model_validator

from ppdist.config.section import Section

Backend = Literal["paddle", "onnx", "openvino"]


class RuntimeOptions(Section):
    """Backend, device and precision in which an exported model is run.

    Nothing of `gpu` has been run: there was no card.
    """

    backend: Backend = Field(
        default="paddle",
        description="paddle: Paddle Inference; onnx: ONNX Runtime; openvino: OpenVINO, on the CPU",
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="gpu: needs a CUDA build of the backend and a card"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one prediction")
    precision: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="bfloat16: OpenVINO, or Paddle with oneDNN, for CPUs with AVX512-BF16 or AMX; "
        "int8: the quantised ONNX file of an export, of ONNX Runtime or OpenVINO",
    )
    onednn: bool = Field(default=True, description="Paddle on the CPU: run oneDNN's kernels")
    spinning: bool = Field(
        default=True,
        description="ONNX Runtime: threads wait for each other awake, faster on cores of their "
        "own and slower on shared ones",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> "RuntimeOptions":
        """Refuses devices and precisions that the backend does not have."""
        if self.backend == "openvino" and self.device != "cpu":
            raise ValueError("backend openvino needs device cpu")
        on_cpu = self.device == "cpu"
        half = self.onednn if self.backend == "paddle" else self.backend == "openvino"
        needs = {
            "float32": True,
            "bfloat16": on_cpu and half,
            "int8": self.backend in ("onnx", "openvino"),
        }
        if not needs[self.precision]:
            field = type(self).model_fields["precision"]
            raise ValueError(f"precision {self.precision} does not go here: {field.description}")
        return self
