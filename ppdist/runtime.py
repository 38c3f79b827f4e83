"""What runs an exported model and how: Paddle Inference or ONNX Runtime, threads, precision.

    graph = PaddleGraph(program, weights, RuntimeOptions(threads=2))
    graph = OnnxGraph(file, RuntimeOptions(backend="onnx", threads=2))
    outputs = graph(images_B3HW)

docs/performance.md says what each option brought.
"""

from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import paddle
from pydantic import Field, model_validator

from ppdist.config import Section
from ppdist.errors import ExportError


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


DEFAULT = RuntimeOptions()


class Graph(Protocol):
    """A static graph with one input, ready to run."""

    output_names: tuple[str, ...]

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        """Args: float32.  Returns: all outputs, in the order of `output_names`."""


class PaddleGraph:
    """A saved static graph in Paddle Inference.

    `enable_memory_optim` is left off: it breaks the predictor of Paddle 3.x.  oneDNN keeps the
    kernels of every image size it has met.
    """

    def __init__(self, program: Path, weights: Path, options: RuntimeOptions) -> None:
        precision = paddle.inference.PrecisionType
        config = paddle.inference.Config(str(program), str(weights))
        config.disable_glog_info()
        if options.device == "gpu":
            half = options.precision == "float16"
            kind = precision.Half if half else precision.Float32
            config.enable_use_gpu(options.gpu_memory_mb, 0, kind)
        else:
            config.disable_gpu()
            config.set_cpu_math_library_num_threads(options.threads)
            if options.onednn:
                config.enable_onednn()
            else:
                config.disable_onednn()
            if options.precision == "bfloat16":
                config.enable_onednn_bfloat16()
        self._predictor = paddle.inference.create_predictor(config)
        self.input_name = self._predictor.get_input_names()[0]
        self.output_names = tuple(self._predictor.get_output_names())

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        handle = self._predictor.get_input_handle(self.input_name)
        handle.reshape(images_B3HW.shape)
        handle.copy_from_cpu(np.ascontiguousarray(images_B3HW, dtype=np.float32))
        self._predictor.run()
        outputs = (self._predictor.get_output_handle(name) for name in self.output_names)
        return tuple(output.copy_to_cpu() for output in outputs)


class OnnxGraph:
    """An ONNX file in ONNX Runtime.

    Raises: ExportError: ONNX Runtime is not installed, has no such device, or refuses the file.
    """

    def __init__(self, file: Path, options: RuntimeOptions) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ExportError(
                f"{file} needs ONNX Runtime: pip install onnxruntime (on a card: onnxruntime-gpu)",
                code="package_missing",
            ) from error
        providers = _providers(options)
        wanted, there = providers[0][0], onnxruntime.get_available_providers()
        if wanted not in there:
            raise ExportError(
                f"this ONNX Runtime has no {wanted}, only {', '.join(there)}",
                code="package_build",
                fix="on a card it takes onnxruntime-gpu, which replaces onnxruntime",
            )
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3  # its warnings about unused constants are noise here
        settings.intra_op_num_threads = options.threads
        settings.add_session_config_entry(
            "session.intra_op.allow_spinning", "1" if options.spinning else "0"
        )
        try:
            self._session = onnxruntime.InferenceSession(str(file), settings, providers=providers)
        except Exception as error:  # its exceptions share no narrower base
            raise ExportError(
                f"ONNX Runtime cannot load {file}: {error}", code="runtime_load_failed"
            ) from error
        self.input_name = self._session.get_inputs()[0].name
        self.output_names = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, images_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        images = np.ascontiguousarray(images_B3HW, dtype=np.float32)
        return tuple(self._session.run(None, {self.input_name: images}))


def _providers(options: RuntimeOptions) -> list[tuple[str, dict[str, Any]]]:
    """Of kernels, the preferred one first."""
    providers: list[tuple[str, dict[str, Any]]] = [("CPUExecutionProvider", {})]
    if options.device == "gpu":
        providers.insert(0, ("CUDAExecutionProvider", {}))
    if options.tensorrt:
        half = options.precision == "float16"
        providers.insert(0, ("TensorrtExecutionProvider", {"trt_fp16_enable": half}))
    return providers
