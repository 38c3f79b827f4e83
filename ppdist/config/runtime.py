"""RuntimeOptions: how an exported model is run."""

from typing import Literal

from pydantic import Field, model_validator

from ppdist.config.section import Section

Backend = Literal["paddle", "onnx", "openvino", "tensorrt"]


class RuntimeOptions(Section):
    """How an exported model is run.

    Nothing of `gpu`, `float16` and `tensorrt` has been run: there was no card.
    """

    backend: Backend = Field(
        default="paddle",
        description="paddle: Paddle Inference; onnx: ONNX Runtime; openvino: OpenVINO, on the CPU; "
        "tensorrt: ONNX Runtime on a card with TensorRT's kernels where it has them, compiled at "
        "the first call of each image size",
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="gpu: needs a CUDA build of the backend and a card"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one prediction")
    precision: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float32",
        description="bfloat16: OpenVINO, or Paddle with oneDNN, for CPUs with AVX512-BF16 or AMX; "
        "float16: on a card, of Paddle or TensorRT; int8: the quantised ONNX file of an export, of "
        "ONNX Runtime or OpenVINO",
    )
    onednn: bool = Field(default=True, description="Paddle on the CPU: run oneDNN's kernels")
    spinning: bool = Field(
        default=True,
        description="ONNX Runtime: threads wait for each other awake, faster on cores of their "
        "own and slower on shared ones",
    )
    gpu_memory_mb: int = Field(
        default=256, ge=1, description="what Paddle reserves on the card at the start, MiB"
    )

    @model_validator(mode="after")
    def _exist_together(self) -> "RuntimeOptions":
        devices = {"openvino": ("cpu",), "tensorrt": ("gpu",)}.get(self.backend, ("cpu", "gpu"))
        if self.device not in devices:
            raise ValueError(f"backend {self.backend} needs device {devices[0]}")
        on_cpu = self.device == "cpu"
        half = self.onednn if self.backend == "paddle" else self.backend == "openvino"
        needs = {
            "float32": True,
            "bfloat16": on_cpu and half,
            "float16": not on_cpu and self.backend in ("paddle", "tensorrt"),
            "int8": self.backend in ("onnx", "openvino"),
        }
        if not needs[self.precision]:
            field = type(self).model_fields["precision"]
            raise ValueError(f"precision {self.precision} does not go here: {field.description}")
        return self
