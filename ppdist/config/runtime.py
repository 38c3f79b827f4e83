"""RuntimeOptions: how an exported model is run."""

from typing import Literal

from pydantic import Field, model_validator

from ppdist.config.base import Section


class RuntimeOptions(Section):
    """How an exported model is run.

    Nothing of `gpu`, `float16` and `tensorrt` has been run: there was no card.
    """

    backend: Literal["paddle", "onnx"] = Field(
        default="paddle", description="paddle: Paddle Inference; onnx: ONNX Runtime"
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="gpu: needs a CUDA build of the backend and a card"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one prediction")
    precision: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        default="float32",
        description="bfloat16: Paddle with oneDNN, for CPUs with AVX512-BF16 or AMX; float16: on a "
        "card, of onnx with tensorrt only; int8: the quantised ONNX file of an export",
    )
    onednn: bool = Field(default=True, description="Paddle on the CPU: run oneDNN's kernels")
    spinning: bool = Field(
        default=True,
        description="ONNX Runtime: threads wait for each other awake, faster on cores of their "
        "own and slower on shared ones",
    )
    tensorrt: bool = Field(
        default=False,
        description="ONNX Runtime on a card: TensorRT's kernels where it has them; compiled at the "
        "first call of each image size",
    )
    gpu_memory_mb: int = Field(
        default=256, ge=1, description="what Paddle reserves on the card at the start, MiB"
    )

    @model_validator(mode="after")
    def _exist_together(self) -> "RuntimeOptions":
        if self.tensorrt and (self.backend, self.device) != ("onnx", "gpu"):
            raise ValueError(
                "tensorrt needs backend onnx and device gpu (Paddle 3 takes only models that "
                "paddle.tensorrt.convert made)"
            )
        needs = {
            "float32": True,
            "bfloat16": self.backend == "paddle" and self.device == "cpu" and self.onednn,
            "float16": self.device == "gpu" and (self.backend == "paddle" or self.tensorrt),
            "int8": self.backend == "onnx",
        }
        if not needs[self.precision]:
            field = type(self).model_fields["precision"]
            raise ValueError(f"precision {self.precision} does not go here: {field.description}")
        return self
