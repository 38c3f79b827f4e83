"""Weight files as transformers writes them, loaded by their names, compute what it computes."""

import json
import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.model import RTDETRConfig
from ppdist.models.rtdetr import RTDETR
from ppdist.models.weights import linear_keys, load_weights, write_arrays
from tests.reference.detr_outputs import (
    CLASSES,
    FILE,
    OUTPUTS,
    QUERIES,
    image,
    named,
    original_name,
    stored,
    weight_of,
)
from tests.unit.models.rtdetr_names import names_of, version_4

THIRD = re.compile(r"(?<=self_attn\.)([qkv])_proj\.(weight|bias)$")


def value_of(key: str, variant: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """What the maker of detr_outputs.json set an entry of transformers to."""
    name = original_name(key, variant)
    third = THIRD.search(name)
    if third is None:
        return weight_of(name, shape)
    whole = weight_of(f"{name[: third.start()]}in_proj_{third[2]}", (3 * shape[0], *shape[1:]))
    assert whole is not None
    return np.split(whole, 3)["qkv".index(third[1])]


@pytest.mark.parametrize("rename", [str, version_4])
@pytest.mark.parametrize("name", ["dfine_n", pytest.param("rtdetr_r18", marks=pytest.mark.slow)])
def test_a_file_of_transformers_computes_the_same(tmp_path: Path, name: str, rename) -> None:
    variant, size = name.split("_")
    model = RTDETR(
        RTDETRConfig(
            variant=variant, size=size, num_classes=CLASSES, queries=QUERIES, denoising=0
        )
    )  # fmt: skip
    names = {*names_of(f"transformers_{name}")}
    linear, state = linear_keys(model), model.state_dict()
    file = {}
    sources = max((table.sources(names) for table in model.key_tables()), key=len)
    for key, parts in sources.items():
        shape = tuple(state[key].shape[::-1] if key in linear else state[key].shape)
        for part in parts:
            value = value_of(part, variant, (shape[0] // len(parts), *shape[1:]))
            own = state[key].numpy() if value is None else value
            file[rename(part)] = np.ascontiguousarray(own)
    write_arrays(tmp_path / "model.safetensors", file)
    load_weights(model, tmp_path / "model.safetensors")
    model.eval()
    with paddle.no_grad():
        outputs = named(model(paddle.to_tensor(image(name))))
    expected = json.loads(FILE.read_text(encoding="utf-8"))["cases"][name]["outputs"]
    last = max(key for key in expected if key[0].isdigit())[0]
    assert {"encoder.boxes", "0.boxes", "0.logits"} <= outputs.keys()
    for key, output in outputs.items():  # those of the last layer are the only ones in eval mode
        found, want = (
            stored(key, output.numpy()),
            np.array(expected[key.replace("0", last)]["values"]),
        )
        assert found["values"] == pytest.approx(want, abs=OUTPUTS * max(1, abs(want).max())), key
