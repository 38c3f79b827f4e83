"""ONNX: non-maximum suppression in the graph, and 8-bit integers.

    (class_agnostic: scores -> score and label of the best class, which stands for all)
    scores, boxes -> best `candidates` of each class -> ONNX NonMaxSuppression -> scores, boxes
    scores, boxes -> best `keep` of each image -> rows, count

(without an iou_threshold only the second line).  It is written with ONNX's own operators: the
converter's translation of Paddle's suppression keeps other boxes and takes only one image.  Only
operators that TensorRT's parser lists are used (docs/deploy.md, Which runtime reads which file), so
no Compress, and no TopK over all images, whose length is not known in advance.

    model.onnx + calibration pictures -> ranges of the activations -> model_int8.onnx

Quantised convolutions run on integers: weights int8 with a scale for each output channel, their
inputs and outputs uint8, with one for each tensor.  The last convolution of
each branch stays float32, and so does what follows: one tensor holds logits of box and class, whose
ranges 256 steps would not serve, and boxes reach over hundreds of pixels.
docs/dev/export_matrix.md describes the alternatives that were tried.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import ppdist
from ppdist.common.errors import ExportError, UserError
from ppdist.config.evaluate import NMSConfig
from ppdist.export.predictor import graph_input
from ppdist.export.spec import InferenceSpec

if TYPE_CHECKING:
    import onnx


ROWS, COUNT = "rows", "count"


class _Builder:
    """An ONNX graph to which nodes are added one after the other."""

    def __init__(self, graph: "onnx.GraphProto", prefix: str = "nms") -> None:
        """Wraps a graph.

        Args: prefix: prefix of all names in this graph; unique per graph in a file.
        """
        self.graph, self.prefix = graph, prefix

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Appends a node; returns the name of its last output."""
        return self.add_all(operator, *inputs, outputs=outputs, **attributes)[-1]

    def add_all(self, operator: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Appends a node; returns the names of its outputs."""
        from onnx import helper

        names = [f"{self.prefix}_{len(self.graph.node)}_{i}" for i in range(outputs)]
        self.graph.node.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names

    def constant(self, value: object, dtype: type = np.int64) -> str:
        from onnx import numpy_helper

        name = f"{self.prefix}_constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def cast(self, name: str, kind: str) -> str:
        """Appends a cast; returns the name of its output.

        Args: kind: name of the type in onnx.TensorProto.
        """
        from onnx import TensorProto

        return self.add("Cast", name, to=TensorProto.DataType.Value(kind))

    def zeros(self, shape: str) -> str:
        """Appends float32 zeros of a shape that the graph computes; returns their name."""
        from onnx import numpy_helper

        value = numpy_helper.from_array(np.zeros(1, np.float32))
        return self.add("ConstantOfShape", shape, value=value)

    def finish(self, name: str) -> "onnx.GraphProto":
        """Returns the graph, with this float32 value as its one output."""
        from onnx import TensorProto, helper

        self.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        return self.graph


def sign(file: Path, texts: Mapping[str, str]) -> None:
    """Names ppdist as the producer of an ONNX file, and sets entries of its `metadata_props`.

    Other entries stay.  Recorded shapes of intermediate values are deleted; runtimes infer their
    own.
    """
    import onnx
    from onnx import helper

    model = onnx.load(str(file))
    model.producer_name, model.producer_version = "ppdist", ppdist.__version__
    del model.graph.value_info[:]
    entries = {entry.key: entry.value for entry in model.metadata_props}
    helper.set_model_props(model, {**entries, **texts})
    onnx.save(model, str(file))


# Names of the axes without a fixed size.
INPUT_AXES = ("batch", "channels", "height", "width")
OUTPUT_AXES = ("batch", "predictions")


def name_axes(value: "onnx.ValueInfoProto", names: Sequence[str]) -> None:
    """Names the free axes of an input or output, in place."""
    for axis, name in zip(value.type.tensor_type.shape.dim, names):
        if not axis.dim_value:
            axis.dim_param = name


def append_nms(raw: Path, file: Path, nms: NMSConfig) -> None:
    """Writes a copy of an ONNX model that ends with NMS or top-k.

    Args:
        raw: the first two outputs are scores_BNC and boxes_BN4.
        file: path of the copy, which has the outputs `rows` [R, 6] (class, score, xyxy as in
            boxes_BN4; image after image, best first) and `count` [B] int32, the number of rows of
            each image.
    """
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(str(raw))
    graph = _Builder(model.graph)
    scores, boxes = (output.name for output in list(model.graph.output)[:2])
    labels = None
    if nms.class_agnostic and nms.iou_threshold is not None:
        scores, labels = _merge_classes(graph, scores)
    elif not nms.multi_label:
        scores = _best_class_only(graph, scores)
    # ONNX's NonMaxSuppression takes scores [B, C, N].
    scores = graph.add("Transpose", scores, perm=[0, 2, 1])
    if nms.iou_threshold is not None:
        scores = _append_suppression(graph, scores, boxes, nms, nms.iou_threshold)
    _append_best(graph, scores, boxes, nms, labels)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0]
    del model.graph.output[:]
    model.graph.output.extend(
        [
            helper.make_tensor_value_info(ROWS, TensorProto.FLOAT, ["rows", 6]),
            helper.make_tensor_value_info(
                COUNT, TensorProto.INT32, [batch.dim_value or batch.dim_param]
            ),
        ]
    )
    onnx.checker.check_model(model)
    onnx.save(model, str(file))


def _append_best(
    graph: _Builder, scores_BCN: str, boxes_BN4: str, nms: NMSConfig, labels_BN1: str | None
) -> None:
    """Adds the outputs: the best `keep` prediction-class pairs of each image.

    On ties the lower class wins, then the first prediction.

    Args: labels_BN1: the classes of the predictions, float32, where C is 1 and stands for all.
    """
    from onnx import TensorProto, helper

    flat_BX = graph.add("Flatten", scores_BCN, axis=1)
    size = graph.add("Gather", graph.add("Shape", flat_BX), graph.constant([1]))
    limit = graph.add("Min", size, graph.constant([nms.keep]))
    score_BK, index_BK = graph.add_all("TopK", flat_BX, limit, outputs=2, axis=1)
    predictions = graph.add("Gather", graph.add("Shape", scores_BCN), graph.constant(2))
    last_axis = graph.constant([2])
    place_BK1 = graph.add("Unsqueeze", graph.add("Mod", index_BK, predictions), last_axis)
    box_BK4 = graph.add("GatherND", boxes_BN4, place_BK1, batch_dims=1)
    if labels_BN1 is None:
        label_BK = graph.cast(graph.add("Div", index_BK, predictions), "FLOAT")
        label_BK1 = graph.add("Unsqueeze", label_BK, last_axis)
    else:
        label_BK1 = graph.add("GatherND", labels_BN1, place_BK1, batch_dims=1)
    score_BK1 = graph.add("Unsqueeze", score_BK, last_axis)
    rows_BK6 = graph.add("Concat", label_BK1, score_BK1, box_BK4, axis=2)
    passes_BK = graph.add("Greater", score_BK, graph.constant(nms.score_threshold, np.float32))
    # Not every runtime has NonZero or ReduceSum of booleans.
    passes_BK = graph.cast(passes_BK, "FLOAT")
    rows_M6 = graph.add("Reshape", rows_BK6, graph.constant([-1, 6]))
    passes_M = graph.add("Reshape", passes_BK, graph.constant([-1]))
    place_R = graph.add("Squeeze", graph.add("NonZero", passes_M), graph.constant([0]))
    count_B = graph.add("ReduceSum", passes_BK, graph.constant([1]), keepdims=0)
    rows = helper.make_node("Gather", [rows_M6, place_R], [ROWS], axis=0)
    count = helper.make_node("Cast", [count_B], [COUNT], to=TensorProto.INT32)
    graph.graph.node.extend([rows, count])


def _append_suppression(
    graph: _Builder, scores_BCN: str, boxes_BN4: str, nms: NMSConfig, iou_threshold: float
) -> str:
    """Appends ONNX's own suppression; scores_BCN become zero where it drops the box."""
    best_BCN = _best_candidates(graph, scores_BCN, nms)
    # (image, class, prediction) of each box kept. No class can keep more boxes than an image can.
    kept_M3 = graph.add(
        "NonMaxSuppression", boxes_BN4, best_BCN, graph.constant([nms.keep]),
        graph.constant([iou_threshold], np.float32),
        graph.constant([nms.score_threshold], np.float32),
    )  # fmt: skip
    score_M = graph.add("GatherND", best_BCN, kept_M3)
    zeros_BCN = graph.zeros(graph.add("Shape", scores_BCN))
    return graph.add("ScatterND", zeros_BCN, kept_M3, score_M)


def _best_class_only(graph: _Builder, scores_BNC: str) -> str:
    """Keeps the score of each prediction's best class; zeroes the others.

    A score of zero passes no threshold. On ties the first class wins.
    """
    best_BN1 = graph.add("ArgMax", scores_BNC, axis=2, keepdims=1)
    size = graph.add("Gather", graph.add("Shape", scores_BNC), graph.constant(2))
    classes_C = graph.add("Range", graph.constant(0), size, graph.constant(1))
    is_best_BNC = graph.add("Equal", classes_C, best_BN1)
    return graph.add("Where", is_best_BNC, scores_BNC, graph.constant(0, np.float32))


def _merge_classes(graph: _Builder, scores_BNC: str) -> tuple[str, str]:
    """Merges all classes into one; returns scores_BN1 and labels_BN1 (float32) of the best classes.

    On ties the first class wins.
    """
    one = graph.constant([1])
    scores_BN1, labels_BN1 = graph.add_all("TopK", scores_BNC, one, outputs=2, axis=2)
    return scores_BN1, graph.cast(labels_BN1, "FLOAT")


def _best_candidates(graph: _Builder, scores_BCN: str, nms: NMSConfig) -> str:
    """Zeroes all scores_BCN but the best `candidates` of each class and image.

    Scores are sorted only if more than that pass the threshold, which is rare; sorting takes longer
    than everything else here.
    """
    threshold = graph.constant(nms.score_threshold, np.float32)
    passes_BCN = graph.cast(graph.add("Greater", scores_BCN, threshold), "FLOAT")
    passing_BC = graph.add("ReduceSum", passes_BCN, graph.constant([2]), keepdims=0)
    max_count = graph.add("ReduceMax", passing_BC, keepdims=0)
    too_many = graph.add("Greater", max_count, graph.constant(nms.candidates, np.float32))
    return graph.add(
        "If", too_many,
        then_branch=_keep_best_graph(scores_BCN, nms.candidates),
        else_branch=_identity_graph(scores_BCN),
    )  # fmt: skip


def _keep_best_graph(scores_BCN: str, candidates: int) -> "onnx.GraphProto":
    import onnx

    graph = _Builder(onnx.GraphProto(name="nms_sorted"), "nms_sorted")
    shape = graph.add("Shape", scores_BCN)
    size = graph.add("Gather", shape, graph.constant([2]))
    limit = graph.add("Min", size, graph.constant([candidates]))
    values, places = graph.add_all("TopK", scores_BCN, limit, outputs=2, axis=2)
    zeros = graph.zeros(shape)
    return graph.finish(graph.add("ScatterElements", zeros, places, values, axis=2))


def _identity_graph(scores_BCN: str) -> "onnx.GraphProto":
    import onnx

    graph = _Builder(onnx.GraphProto(name="nms_all"), "nms_all")
    return graph.finish(graph.add("Identity", scores_BCN))


def quantize_onnx(
    source: Path,
    target: Path,
    pictures: Sequence[np.ndarray],
    spec: InferenceSpec,
) -> None:
    """Writes the model of `source` in 8-bit integers.

    Args:
        source: a float32 model with one input, images_B3HW.
        pictures: float32 RGB [3, H, W], 0..255, of the training split; each is read once.
        spec: describes the input.
    Raises: ExportError: ONNX Runtime cannot calibrate or quantise this model.
    """
    import onnx
    from onnxruntime import quantization

    kinds = quantization.QuantType
    try:
        with tempfile.TemporaryDirectory(prefix="ppdist-int8-") as folder, _silence_hints():
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
                activation_type=kinds.QUInt8,
                weight_type=kinds.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
                # One picture at a time: the activations of all pictures would not fit in memory.
                extra_options={"CalibStridedMinMax": 1},
            )
    except UserError:  # a picture
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no narrower common base
        raise ExportError(
            f"ONNX Runtime cannot quantise this model: {error}", code="quantise_failed"
        ) from error


def last_convolutions(graph: "onnx.GraphProto") -> list[str]:
    """Finds the names of the convolutions that no other convolution depends on."""
    needed: set[str] = set()  # values that some later convolution depends on
    names = []
    for node in reversed(graph.node):  # ONNX lists a node after those it depends on
        is_needed = any(output in needed for output in node.output)
        if node.op_type == "Conv" and not is_needed:
            names.append(node.name)
        if node.op_type == "Conv" or is_needed:
            needed.update(node.input)
    return names


def _name_nodes(graph: "onnx.GraphProto") -> None:
    """Gives every node a unique name, by which quantisation can exclude nodes."""
    for index, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{index}"


class _Reader:
    """Reader that feeds pictures one by one to ONNX Runtime's calibration."""

    def __init__(
        self, input_name: str, pictures: Sequence[np.ndarray], spec: InferenceSpec
    ) -> None:
        self._name, self._pictures, self._spec = input_name, pictures, spec
        self.set_range(0, len(pictures))

    def __len__(self) -> int:
        return len(self._pictures)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._indices = iter(range(start_index, end_index))

    def get_next(self) -> dict[str, np.ndarray] | None:
        index = next(self._indices, None)
        if index is None:
            return None
        return {self._name: graph_input(self._pictures[index][None], self._spec)}


@contextmanager
def _silence_hints() -> Iterator[None]:
    """Silences hints of ONNX Runtime's quantisation that users cannot act on."""
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
