"""An ONNX model in 8-bit integers: ONNX Runtime's static quantisation after training.

    model.onnx + calibration pictures -> ranges of the activations -> model_int8.onnx

Convolutions run on integers: weights int8 with a scale for each output channel, their inputs and
outputs uint8 with one for each tensor.  The last convolution of each branch stays float32, and so
does what follows: one tensor holds logits of box and class, whose ranges 256 steps would not serve,
and boxes reach over hundreds of pixels.  docs/deploy.md has what was tried.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ppdist.errors import ExportError, UserError
from ppdist.infer_spec import InferenceSpec
from ppdist.inference import graph_input

if TYPE_CHECKING:
    import onnx


def quantize_onnx(
    source: Path, target: Path, pictures: Sequence[np.ndarray], spec: InferenceSpec
) -> None:
    """Writes the model of `source` in 8-bit integers.

    Args:
        source: a float32 model with one input, images_B3HW.
        pictures: float32 RGB [3, H, W], 0..255, of the training split; each is asked for once.
        spec: how the input takes them.
    Raises: ExportError: ONNX Runtime cannot calibrate or quantise this model.
    """
    import onnx
    from onnxruntime import quantization

    try:
        with tempfile.TemporaryDirectory(prefix="ppdist-int8-") as folder, _quietly():
            model = onnx.load(source)
            _name_nodes(model.graph)
            named = Path(folder) / "named.onnx"
            onnx.save(model, named)
            quantization.quantize_static(
                named,
                target,
                _Reader(model.graph.input[0].name, pictures, spec),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=["Conv"],
                nodes_to_exclude=last_convolutions(model.graph),
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
                # One picture at a time: all activations of all pictures would not fit in memory.
                extra_options={"CalibStridedMinMax": 1},
            )
    except UserError:  # a picture
        raise
    except Exception as error:  # its exceptions share no narrower base
        raise ExportError(
            f"ONNX Runtime cannot quantise this model: {error}", code="quantise_failed"
        ) from error


def last_convolutions(graph: "onnx.GraphProto") -> list[str]:
    """Names of the convolutions that no other one depends on."""
    ahead: set[str] = set()  # values that some later convolution depends on
    names = []
    for node in reversed(graph.node):  # ONNX lists a node after those it depends on
        before = any(output in ahead for output in node.output)
        if node.op_type == "Conv" and not before:
            names.append(node.name)
        if node.op_type == "Conv" or before:
            ahead.update(node.input)
    return names


def _name_nodes(graph: "onnx.GraphProto") -> None:
    """Gives every node a name of its own; names are how nodes are left out."""
    for place, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{place}"


class _Reader:
    """The pictures one after the other, as ONNX Runtime's calibration asks for them."""

    def __init__(
        self, input_name: str, pictures: Sequence[np.ndarray], spec: InferenceSpec
    ) -> None:
        self._name, self._pictures, self._spec = input_name, pictures, spec
        self.set_range(0, len(pictures))

    def __len__(self) -> int:
        return len(self._pictures)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._left = iter(range(start_index, end_index))

    def get_next(self) -> dict[str, np.ndarray] | None:
        place = next(self._left, None)
        if place is None:
            return None
        return {self._name: graph_input(self._pictures[place][None], self._spec)}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the hints of ONNX Runtime's quantisation, which users can do nothing about."""
    import onnxruntime

    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    onnxruntime.set_default_logger_severity(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(before)
        onnxruntime.set_default_logger_severity(2)  # its own default
