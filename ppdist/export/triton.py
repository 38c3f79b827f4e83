"""Triton Inference Server: an export as one model of its repository.

    NAME/infer.yml   NAME/config.pbtxt   NAME/1/model.onnx

NAME, under which Triton serves the model, is what the folder is called, so config.pbtxt leaves it
out.  `infer.yml` is for clients: how an image becomes the input, and what the outputs mean.
"""

from pathlib import Path

from ppdist.export.spec import TRITON_FILE, InferenceSpec, ModelFileSection

VERSION = "1"  # folder of the first version
MAX_BATCH = 8  # images, as of deploy/serving


def arrange(directory: Path, spec: InferenceSpec) -> InferenceSpec:
    """Moves the ONNX files where Triton looks, and writes config.pbtxt.

    Returns: the spec with their new places.
    """
    assert spec.onnx is not None
    is_batched = spec.input.dynamic_batch and not spec.onnx.nms_in_graph
    config = model_config(directory / spec.onnx.files[0], is_batched)
    (directory / TRITON_FILE).write_text(config, encoding="utf-8")
    moved: dict[str, ModelFileSection] = {}
    for name in ("onnx", "onnx_int8", "openvino", "openvino_int8"):
        section: ModelFileSection | None = getattr(spec, name)
        if section is not None:
            files = tuple(f"{VERSION}/{file}" for file in section.files)
            moved[name] = section.model_copy(update={"files": files})
    (directory / VERSION).mkdir()
    for file in directory.glob("*.onnx"):
        file.replace(directory / VERSION / file.name)
    return spec.model_copy(update={"layout": "triton", **moved})


def model_config(file: Path, is_batched: bool) -> str:
    """Text of config.pbtxt, a ModelConfig of Triton's model_config.proto.

    Args: is_batched: the first axis of the input and of every output is the batch; Triton then
        puts requests together.  It leaves that axis out of `dims`.
    """
    import onnx

    kinds = {onnx.TensorProto.FLOAT: "TYPE_FP32", onnx.TensorProto.INT32: "TYPE_INT32"}
    graph = onnx.load(str(file)).graph
    lines = ['backend: "onnxruntime"', f"max_batch_size: {MAX_BATCH if is_batched else 0}"]
    for field, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            tensor = value.type.tensor_type
            dims = [axis.dim_value or -1 for axis in tensor.shape.dim][int(is_batched) :]
            kind = kinds[tensor.elem_type]
            lines.append(f'{field} {{ name: "{value.name}" data_type: {kind} dims: {dims} }}')
    if is_batched:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"
