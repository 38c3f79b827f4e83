"""What runs an exported model and how: Paddle Inference or ONNX Runtime, threads, precision.

    graph = PaddleGraph(program, weights, RuntimeOptions(threads=2))
    graph = OnnxGraph(file, RuntimeOptions(backend="onnx", threads=2))
    outputs = graph(images_B3HW)

docs/performance.md says what each option brought.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle

from ppdist.config.runtime import RuntimeOptions
from ppdist.errors import ExportError

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
