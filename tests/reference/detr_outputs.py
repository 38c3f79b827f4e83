"""RT-DETR and D-FINE of every size: outputs and gradients of an independent implementation.

    python -m tests.reference.detr_outputs    writes detr_outputs.json; needs torch and transformers

Weights, images and the sum whose gradient is taken follow from formulas, by the names of the
original torch repositories (lyuwenyu/RT-DETR, Peterande/D-FINE); `RENAMED` turns those of
transformers into theirs.  `CASES` has the sizes of their configurations, so it tests our tables,
too.  Batch norms are in eval mode.  One thing differs from transformers: in RT-DETR the gradient of
a layer's boxes reaches the layer before, as in the original.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.reference.formulas import parity_image, parity_value, uniform

FILE = Path(__file__).with_name("detr_outputs.json")
SHAPE = (1, 96, 128)  # images, height, width
# Of the image, where it is not 5: with that one a ReLU passes one value more here or there.
SEEDS = {"rtdetr_r18": 6, "dfine_m": 6}
QUERIES, CLASSES = 30, 5
STORED = 24  # values of each output
OUTPUTS = 1e-4  # how far they may be off, of the largest value
# What is added to another branch: small, or deep models overflow.
SMALL = re.compile(
    r"branch2b\.conv\.weight|branch2c\.conv|bottlenecks\.\d\.conv2\.conv"
    r"|(?:_blocks\.\d|cv[23]\.0)\.conv2\.conv|aggregation\.1\.conv"
)
OWN = re.compile(r"decoder\.(up|reg_scale)$")


class HG(NamedTuple):
    """HGNetv2: channels of stem, inside blocks and of levels; blocks; convolutions; affine."""

    stem: tuple[int, int]
    inside: tuple[int, ...]
    out: tuple[int, ...]
    blocks: tuple[int, ...]
    convolutions: int
    affine: bool = False


B0 = HG((16, 16), (16, 32, 64, 128), (64, 256, 512, 1024), (1, 1, 2, 1), 3, True)
B2 = HG((24, 32), (32, 64, 128, 256), (96, 384, 768, 1536), (1, 1, 3, 1), 4, True)
B4 = HG((32, 48), (48, 96, 192, 384), (128, 512, 1024, 2048), (1, 1, 3, 1), 6)
B5 = HG((32, 64), (64, 128, 256, 512), (128, 512, 1024, 2048), (1, 2, 5, 2), 6)


class Case(NamedTuple):
    """A size; backbone: depth of a ResNet-vd, or an HGNetv2."""

    backbone: int | HG
    neck: int = 256
    neck_inside: int = 1024
    expansion: float = 1.0
    depth: float = 1.0
    layers: int = 6
    width: int = 256
    inside: int = 1024
    points: tuple[int, ...] = (4, 4, 4)
    reg_scale: float = 4.0


RESNETS = {
    "r18": Case(18, expansion=0.5, layers=3),
    "r34": Case(34, expansion=0.5, layers=4),
    "r50": Case(50),
    "r101": Case(101, neck=384, neck_inside=2048),
}
CASES = {
    **{f"rtdetr_{size}": case for size, case in RESNETS.items()},
    "rtdetr_l": Case(B4),
    "rtdetr_x": Case(B5, neck=384, neck_inside=2048),
    **{f"rtdetrv2_{size}": case for size, case in RESNETS.items()},
    "dfine_n": Case(B0, 128, 512, 0.34, 0.5, 3, 128, 512, (6, 6)),
    "dfine_s": Case(B0, expansion=0.5, depth=0.34, layers=3, points=(3, 6, 3)),
    "dfine_m": Case(B2, depth=0.67, layers=4, points=(3, 6, 3)),
    "dfine_l": Case(B4, points=(3, 6, 3)),
    "dfine_x": Case(B5, 384, 2048, points=(3, 6, 3), reg_scale=8.0),
}


def image(name: str) -> np.ndarray:
    return parity_image("unit", *SHAPE, SEEDS.get(name, 5))


def weight_of(key: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The value of an entry of the original's name and shape; None: its own stays."""
    if OWN.search(key):
        return None
    if key.endswith("lab.scale"):
        return parity_value(f"{key}.weight", shape)
    value = parity_value(key, shape)
    return value if value is None or not SMALL.search(key) else value / 4


def noise(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Factors of an output in the sum, or of a gradient in what is stored of it."""
    return uniform(zlib.crc32(name.encode()), *shape)


def stored(name: str, output: np.ndarray) -> dict[str, Any]:
    """What is compared of an output."""
    places = np.linspace(0, output.size - 1, STORED).astype(int)
    values = [output.mean(), output.std(), *output.ravel()[places]]
    return {"shape": list(output.shape), "values": [round(float(x), 6) for x in values]}


def named(outputs: Any) -> dict[str, Any]:
    rows = {"encoder": outputs.encoder, "preliminary": outputs.preliminary}
    rows |= {str(i): layer for i, layer in enumerate(outputs.layers)}
    found = {}
    for row, refined in rows.items():
        if refined is not None:
            found |= {f"{row}.logits": refined.logits_BQC, f"{row}.boxes": refined.boxes_BQ4}
            if refined.corners_BQ4R is not None:
                found[f"{row}.corners"] = refined.corners_BQ4R
    return found


def part_of(key: str) -> str:
    """The part of a model under which gradients are added up: up to its second number."""
    return re.sub(r"^((?:[^.]*\.)*?\d+)\..*", r"\1", key).removesuffix(".weight")


def stored_gradients(gradients: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """Norm of each part's gradient, and its product with noise."""
    parts: dict[str, list[float]] = {}
    for key, gradient in gradients.items():
        row = parts.setdefault(part_of(key), [0.0, 0.0])
        row[0] += float(np.square(gradient.astype("float64")).sum())
        row[1] += float((gradient * noise(key, gradient.shape)).sum())
    return {part: [square**0.5, product] for part, (square, product) in parts.items()}


_Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
RENAMED: _Rules = (
    (r"^model\.", ""),
    (r"^(class|bbox)_embed\.", r"decoder.\1_embed."),  # D-FINE has its heads under two names
    (r"^backbone\.model\.", "backbone."),
    (r"^backbone\.embedder\.embedder\.(\d)\.", lambda m: f"backbone.conv1.conv1_{int(m[1]) + 1}."),
    (r"^backbone\.encoder\.stages\.(\d)\.layers\.", r"backbone.res_layers.\1.blocks."),
    (r"(res_layers\..*)\.shortcut\.1\.", r"\1.short.conv."),
    (r"(res_layers\..*)\.shortcut\.", r"\1.short."),
    (r"(res_layers\..*)\.layer\.(\d)\.", lambda m: f"{m[1]}.branch2{'abc'[int(m[2])]}."),
    (r"^backbone\.embedder\.", "backbone.stem."),
    (r"^backbone\.encoder\.stages", "backbone.stages"),
    (r"^(backbone\..*)\.convolution\.", r"\1.conv."),
    (r"^(backbone\.st.*)\.normalization\.", r"\1.bn."),
    (r"^(backbone\..*)\.normalization\.", r"\1.norm."),
    (r"^(en|de)coder_input_proj\.(\d)\.0\.", r"\1coder.input_proj.\2.conv."),
    (r"^(en|de)coder_input_proj\.(\d)\.1\.", r"\1coder.input_proj.\2.norm."),
    (r"^encoder\.aifi\.", "encoder.encoder."),
    (r"^(encoder\.encoder.*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(encoder\.\w+_blocks\.\d)\.csp_rep1\.", r"\1.cv2.0."),
    (r"^(encoder\.\w+_blocks\.\d)\.csp_rep2\.", r"\1.cv3.0."),
    (r"^enc_", "decoder.enc_"),
    (r"^decoder\.enc_output\.0\.", "decoder.enc_output.proj."),
    (r"^decoder\.enc_output\.1\.", "decoder.enc_output.norm."),
    (r"^decoder\.(layers|lqe_layers)\.", r"decoder.decoder.\1."),
    (r"^decoder\.class_embed\.", "decoder.dec_score_head."),
    (r"^decoder\.bbox_embed\.", "decoder.dec_bbox_head."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.final_layer_norm\.", ".norm3."),
    (r"(coder\.(?:\d\.)?layers\.\d)\.mlp\.(?:layers\.0|fc1)\.", r"\1.linear1."),
    (r"(coder\.(?:\d\.)?layers\.\d)\.mlp\.(?:layers\.1|fc2)\.", r"\1.linear2."),
    (r"\.o_proj\.", ".out_proj."),
)
OF_DFINE: _Rules = (
    (r"^(encoder\.\w+_blocks\.\d)\.conv(\d)\.", lambda m: f"{m[1]}.{_FUSION[m[2]]}."),
    (r"^(encoder\.downsample_convs\.\d)\.conv(\d)\.", r"\1.0.cv\2."),
)
_FUSION = {"1": "cv1", "2": "cv2.1", "3": "cv3.1", "4": "cv4"}
OF_RTDETR: _Rules = (  # it numbers what the later ones name
    (r"^(encoder\.input_proj\.\d)\.conv\.", r"\1.0."),
    (r"^(encoder\.input_proj\.\d)\.norm\.", r"\1.1."),
    (r"^decoder\.enc_output\.proj\.", "decoder.enc_output.0."),
    (r"^decoder\.enc_output\.norm\.", "decoder.enc_output.1."),
)


def original_name(key: str, variant: str) -> str:
    """The original's name of an entry; a third of `in_proj` is `[qkv]_proj`."""
    rules = {"dfine": OF_DFINE, "rtdetr": OF_RTDETR}.get(variant, ())
    for pattern, new in (*RENAMED, *rules):
        key = re.sub(pattern, new, key)
    return key


def _third(key: str) -> re.Match[str] | None:
    return re.search(r"(?<=self_attn\.)([qkv])_proj\.(weight|bias)$", key)


def set_weights(model: Any, variant: str) -> None:
    """Sets every entry of a model of transformers."""
    import torch

    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            name, shape = original_name(key, variant), tuple(tensor.shape)
            if name.endswith(("num_batches_tracked", "n_points_scale", "num_points_scale")):
                continue
            third, value = _third(name), None
            if third is None:
                value = weight_of(name, shape)
            else:
                whole = weight_of(
                    f"{name[: third.start()]}in_proj_{third[2]}", (3 * shape[0], *shape[1:])
                )
                assert whole is not None
                value = whole["qkv".index(third[1]) * shape[0] :][: shape[0]]
            if value is not None:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def build(name: str) -> Any:
    """The model of transformers."""
    import transformers as hf

    (variant, _), case = name.split("_"), CASES[name]
    levels = len(case.points)
    outputs = [2, 3, 4][-levels:]
    backbone: Any
    if isinstance(case.backbone, HG):
        row = case.backbone
        backbone = hf.HGNetV2Config(
            stem_channels=[3, *row.stem], embedding_size=row.stem[1], hidden_sizes=[*row.out],
            stage_in_channels=[row.stem[1], *row.out[:-1]], stage_mid_channels=[*row.inside],
            stage_out_channels=[*row.out], stage_num_blocks=[*row.blocks],
            stage_numb_of_layers=[row.convolutions] * 4, use_learnable_affine_block=row.affine,
            out_indices=outputs,
        )  # fmt: skip
    else:
        blocks = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}
        deep = case.backbone >= 50
        backbone = hf.RTDetrResNetConfig(
            depths=blocks[case.backbone], layer_type="bottleneck" if deep else "basic",
            hidden_sizes=[256, 512, 1024, 2048] if deep else [64, 128, 256, 512],
            out_indices=outputs,
        )  # fmt: skip
    keys: dict[str, Any] = dict(
        backbone_config=backbone, freeze_backbone_batch_norms=False,
        encoder_hidden_dim=case.neck, encoder_in_channels=backbone.hidden_sizes[-levels:],
        feat_strides=[8, 16, 32][-levels:], encode_proj_layers=[levels - 1],
        encoder_ffn_dim=case.neck_inside, hidden_expansion=case.expansion, d_model=case.width,
        decoder_in_channels=[case.neck] * levels, decoder_ffn_dim=case.inside,
        num_feature_levels=levels, decoder_layers=case.layers, num_queries=QUERIES,
        num_labels=CLASSES, num_denoising=0,
    )  # fmt: skip
    if variant == "dfine":
        points = {"decoder_n_points": [*case.points], "depth_mult": case.depth}
        config = hf.DFineConfig(**keys, **points, reg_scale=case.reg_scale)
        return hf.DFineForObjectDetection(config)
    if variant == "rtdetrv2":
        return hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(**keys))
    return hf.RTDetrForObjectDetection(hf.RTDetrConfig(**keys))


def computed(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of a case, and gradients of their sum."""
    import torch

    variant = name.split("_")[0]
    torch.manual_seed(0)
    model = build(name).train()
    for layer in model.modules():
        if "BatchNorm" in type(layer).__name__:
            layer.eval().register_forward_hook(_plain_gradients)
    set_weights(model, variant)
    moves: list[Any] = []
    decoder = model.model.decoder
    for head in decoder.bbox_embed:
        head.register_forward_hook(lambda *call: moves.append(call[2]))
    found = model(torch.from_numpy(image(name)))
    outputs = {"encoder.logits": found.enc_topk_logits, "encoder.boxes": found.enc_topk_bboxes}
    logits, boxes = found.intermediate_logits, found.intermediate_reference_points
    layers = len(decoder.layers)
    if variant == "dfine":
        outputs |= {"preliminary.logits": logits[:, 0], "preliminary.boxes": boxes[:, 0]}
        logits, boxes = logits[:, 1:], boxes[:, 1:]
        for i in range(layers):
            corners = found.intermediate_predicted_corners[:, i]
            outputs[f"{i}.corners"] = corners.reshape(*corners.shape[:2], 4, -1)
    else:
        boxes = _look_forward_twice(moves[-layers:], found.init_reference_points, boxes)
    for i in range(layers):
        outputs |= {f"{i}.logits": logits[:, i], f"{i}.boxes": boxes[:, i]}
    total = sum((x * torch.from_numpy(noise(key, x.shape))).sum() for key, x in outputs.items())
    total.backward()
    gradients: dict[str, np.ndarray] = {}
    thirds: dict[str, dict[str, np.ndarray]] = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        own, third = original_name(key, variant), _third(original_name(key, variant))
        if third is None:
            gradients[own] = parameter.grad.numpy()
        else:
            whole = f"{own[: third.start()]}in_proj_{third[2]}"
            thirds.setdefault(whole, {})[third[1]] = parameter.grad.numpy()
    gradients |= {key: np.concatenate([x[c] for c in "qkv"]) for key, x in thirds.items()}
    return {key: x.detach().numpy() for key, x in outputs.items()}, gradients


def _plain_gradients(_: Any, __: Any, output: Any) -> None:
    """Gives a batch norm its gradient in the layout of its output.

    On the CPU, torch 2.14 computes wrong gradients of a batch norm in eval mode where that of its
    output arrives transposed (channels last): of the bias not even the sum.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.contiguous())


def _look_forward_twice(moves: list[Any], first: Any, boxes: Any) -> Any:
    """Boxes of the layers, whose gradient reaches the layer before."""
    import torch
    from transformers.models.rt_detr.modeling_rt_detr import inverse_sigmoid

    results, before = [], None
    for i, move in enumerate(moves):
        start = torch.sigmoid(first) if i == 0 else boxes[:, i - 1].detach()
        own = torch.sigmoid(move + inverse_sigmoid(start))
        results.append(own if before is None else torch.sigmoid(move + inverse_sigmoid(before)))
        before = own
    again = torch.stack(results, dim=1)
    assert torch.equal(again, boxes)
    return again


def main() -> None:
    """Computes all cases."""
    import torch
    import transformers

    cases = {}
    for name in CASES:
        outputs, gradients = computed(name)
        cases[name] = {
            "outputs": {key: stored(key, x) for key, x in outputs.items()},
            "gradients": {
                part: [float(f"{x:.6g}") for x in row]
                for part, row in stored_gradients(gradients).items()
            },
        }
        print(name, len(outputs), len(gradients), flush=True)
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, float32"
    FILE.write_text(json.dumps({"source": source, "cases": cases}), encoding="utf-8")


if __name__ == "__main__":
    main()
