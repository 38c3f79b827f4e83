"""Names that other implementations of RT-DETR and D-FINE give to weights.

    torch_name          lyuwenyu/RT-DETR's second version, Peterande/D-FINE, DEIM
    numbered_name       from these: RT-DETR's first version, which numbers what they name
    paddle_name         PaddleDetection
    transformers_names  from torch's: Hugging Face transformers, of versions 4 and 5

Our keys are torch's, but for some parts of layers.
"""

import re
from collections.abc import Callable, Iterable

_Rules = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]


def _rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> _Rules:
    """Compiles pairs of pattern and replacement."""
    return tuple((re.compile(pattern), new) for pattern, new in pairs)


def _rename(key: str, rules: Iterable[tuple[re.Pattern[str], object]]) -> str:
    """Applies rules in order to a key."""
    for pattern, new in rules:
        key = pattern.sub(new, key)  # type: ignore[call-overload]
    return key


_OURS = _rules((r"\.block\.", "."), (r"\.in_proj\.", ".in_proj_"))
_STATISTICS = _rules((r"\._mean$", ".running_mean"), (r"\._variance$", ".running_var"))
_NORM = _rules((r"\.bn\.", ".norm."))
_NUMBERED = _rules(
    (r"^(encoder\.input_proj\.\d+)\.conv\.", r"\1.0."),
    (r"^(encoder\.input_proj\.\d+)\.norm\.", r"\1.1."),
    (r"^decoder\.enc_output\.proj\.", "decoder.enc_output.0."),
    (r"^decoder\.enc_output\.norm\.", "decoder.enc_output.1."),
)


def torch_name(key: str, hgnet: bool) -> str:
    """Returns the torch name of our key.

    Args: hgnet: the backbone is an HGNetv2, whose batch norms are called as ours.
    """
    key = _rename(key, (*_OURS, *_STATISTICS))
    return key if hgnet and key.startswith("backbone.") else _rename(key, _NORM)


def numbered_name(name: str) -> str:
    """Returns the name in RT-DETR's first version for a torch name."""
    return _rename(name, _NUMBERED)


_INPUTS = _rules((r"^((?:en|de)coder\.input_proj\.\d+)\.bn\.", r"\1.norm."))
_PADDLE = _rules(
    (r"\.aggregation\.0\.", ".aggregation_squeeze_conv."),
    (r"\.aggregation\.1\.", ".aggregation_excitation_conv."),
    (r"^encoder\.", "neck."),
    (r"^decoder\.", "transformer."),
)
_RES_BLOCK = re.compile(r"^backbone\.res_layers\.(\d+)\.blocks\.(\d+)\.")
_LETTERED_BLOCKS = 10  # most blocks of a stage that have letters; a longer stage numbers them


def paddle_name(key: str, hgnet: bool, blocks: tuple[int, ...]) -> str:
    """Returns PaddleDetection's name of our key; its layouts are ours.

    Args: hgnet: as in `torch_name`.  blocks: number of blocks of each stage of a ResNet.
    """
    key = _rename(key, (*_OURS, *_INPUTS, *_NUMBERED, *_PADDLE))
    match = _RES_BLOCK.match(key)
    if match is None or hgnet:
        return key if hgnet or not key.startswith("backbone.") else _rename(key, _NORM)
    stage, block = int(match[1]), int(match[2])
    has_letter = block == 0 or blocks[stage] <= _LETTERED_BLOCKS
    letter = chr(ord("a") + block) if has_letter else f"b{block}"
    name = f"res{stage + 2}"
    return _rename(f"backbone.{name}.{name}{letter}.{key[match.end() :]}", _NORM)


_TRANSFORMERS = _rules(
    (r"^backbone\.conv1\.conv1_(\d)\.", lambda m: f"backbone.embedder.embedder.{int(m[1]) - 1}."),
    (r"^backbone\.stem\.", "backbone.embedder."),
    (r"^backbone\.res_layers\.(\d+)\.blocks\.", r"backbone.encoder.stages.\1.layers."),
    (r"^backbone\.stages\.", "backbone.encoder.stages."),
    (r"^(backbone\..*)\.short\.conv\.(conv|norm)\.", r"\1.shortcut.1.\2."),
    (r"^(backbone\..*)\.short\.", r"\1.shortcut."),
    (r"^(backbone\..*)\.branch2([abc])\.", lambda m: f"{m[1]}.layer.{'abc'.index(m[2])}."),
    (r"^(backbone\..*)\.conv\.", r"\1.convolution."),
    (r"^(backbone\..*)\.(?:bn|norm)\.", r"\1.normalization."),
    (r"^backbone\.", "model.backbone.model."),
    (r"^(en|de)coder\.input_proj\.(\d+)\.conv\.", r"model.\1coder_input_proj.\2.0."),
    (r"^(en|de)coder\.input_proj\.(\d+)\.norm\.", r"model.\1coder_input_proj.\2.1."),
    (r"^encoder\.encoder\.(\d+)\.(.*)\.norm1\.", r"encoder.aifi.\1.\2.self_attn_layer_norm."),
    (r"^encoder\.encoder\.(\d+)\.(.*)\.norm2\.", r"encoder.aifi.\1.\2.final_layer_norm."),
    (r"^encoder\.encoder\.", "encoder.aifi."),
    (r"^encoder\.", "model.encoder."),
    (r"^decoder\.dec_score_head\.", "decoder.class_embed."),
    (r"^decoder\.dec_bbox_head\.", "decoder.bbox_embed."),
    (r"^decoder\.enc_output\.proj\.", "model.enc_output.0."),
    (r"^decoder\.enc_output\.norm\.", "model.enc_output.1."),
    (r"^decoder\.(enc_\w+|denoising_class_embed)\.", r"model.\1."),
    (r"^decoder\.decoder\.", "decoder."),
    (r"^(decoder\.layers\.\d+)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.final_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.cross_attn\.", r"\1.encoder_attn."),
    (r"^decoder\.", "model.decoder."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.linear([12])\.", r".mlp.fc\1."),
)
_TRANSFORMERS_DFINE = _rules(
    (r"\.downsample_convs\.(\d+)\.0\.cv(\d)\.", r".downsample_convs.\1.conv\2."),
    (r"(_blocks\.\d+)\.cv([14])\.", r"\1.conv\2."),
    (r"(_blocks\.\d+)\.cv([23])\.1\.", r"\1.conv\2."),
    (r"(_blocks\.\d+)\.cv2\.0\.", r"\1.csp_rep1."),
    (r"(_blocks\.\d+)\.cv3\.0\.", r"\1.csp_rep2."),
    (r"\.mlp\.fc1\.", ".mlp.layers.0."),
    (r"\.mlp\.fc2\.", ".mlp.layers.1."),
)
_VERSION_4 = _rules(
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc([12])\.", r".fc\1."),
    (r"\.mlp\.layers\.([01])\.", lambda m: f".fc{int(m[1]) + 1}."),
    (r"\.aifi\.", ".encoder."),
)
# The model has its heads under two names; a file stores them under one of them.
_HEADS_OUTSIDE = _rules((r"^model\.decoder\.(class|bbox)_embed\.", r"\1_embed."))
_IN_PROJ = re.compile(r"\.in_proj_(weight|bias)$")


def transformers_names(
    name: str, dfine: bool, version_4: bool, heads_outside: bool
) -> str | tuple[str, ...]:
    """Returns the names of a torch entry's parts in transformers: three for an `in_proj`.

    Args:
        version_4: published files have the names of version 4.
        heads_outside: the decoder's heads stand beside the model, not in its decoder.
    """
    rules = _TRANSFORMERS + (_TRANSFORMERS_DFINE if dfine else ())
    rules += (_VERSION_4 if version_4 else ()) + (_HEADS_OUTSIDE if heads_outside else ())
    name = _rename(name, rules)
    if _IN_PROJ.search(name) is None:
        return name
    return tuple(_IN_PROJ.sub(rf".{part}_proj.\1", name) for part in "qkv")
