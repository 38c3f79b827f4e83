"""Weights of RT-DETR and D-FINE as others keep them: every name, layouts, rows of classes."""

import re
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.model import RTDETRConfig
from ppdist.models.rtdetr import RTDETR
from ppdist.models.rtdetr_keys import paddle_name
from ppdist.models.weights import (
    ClassNames,
    arrays_of,
    linear_keys,
    load_weights,
    official_arrays_of,
    write_arrays,
)
from tests.unit.models.kept import built_once
from tests.unit.models.rtdetr_names import NAMES, names_of, types_of, version_4

UNUSED = re.compile(r"anchors|valid_mask|points_scale|^decoder\.decoder\.(up|reg_scale)$")
INSIDE_OUTSIDE = (r"model\.decoder\.", "")
EMBEDDING = "decoder.denoising_class_embed.weight"


@built_once
def built(variant: str, size: str, classes: int = 3) -> RTDETR:
    return RTDETR(RTDETRConfig(variant=variant, size=size, num_classes=classes, queries=12))


def files_of(implementation: str) -> list[set[str]]:
    """Names of what it writes; transformers 4 also, and the heads once where it has them twice."""
    files = [{*names_of(implementation)}]
    if not implementation.startswith("transformers"):
        return files
    files.append({version_4(name) for name in files[0]})
    inside, outside = (re.compile(rf"{start}(class|bbox)_embed") for start in INSIDE_OUTSIDE)
    if any(map(outside.match, files[0])):
        files = [
            {name for name in file if not heads.match(name)}
            for file in files
            for heads in (inside, outside)
        ]
    return files


@pytest.mark.parametrize(
    "implementation",
    [
        name
        if name in ("torch_dfine_n", "paddle_rtdetr_r18", "transformers_dfine_n")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if name != "macros"
    ],
)
def test_every_name_of_a_file_fills_a_weight(implementation: str) -> None:
    _, variant, size = implementation.split("_")
    model = built(variant, size)
    tables = model.key_tables()
    for file in files_of(implementation):
        sources = max((table.sources(file) for table in tables), key=len)
        assert [key for key in model.state_dict() if key not in sources] == []
        used = {name for each in sources.values() for name in each}
        assert [name for name in file - used if not UNUSED.search(name)] == []


def test_paddledetection_numbers_the_blocks_of_long_stages() -> None:
    blocks = (3, 4, 23, 3)
    for block, name in ((0, "res4a"), (1, "res4b1"), (22, "res4b22")):
        key = f"backbone.res_layers.2.blocks.{block}.branch2a.bn._mean"
        assert paddle_name(key, False, blocks) == f"backbone.res4.{name}.branch2a.norm._mean"
    key = "backbone.res_layers.1.blocks.3.branch2c.conv.weight"
    assert paddle_name(key, False, blocks) == "backbone.res3.res3d.branch2c.conv.weight"


def filled(model: RTDETR, seed: int) -> dict[str, np.ndarray]:
    """Weights none of which equals another."""
    generator = np.random.default_rng(seed)
    for value in model.state_dict().values():
        value.set_value(generator.random(tuple(value.shape), "float32"))
    return arrays_of(model)


def as_file(model: RTDETR, arrays: dict[str, np.ndarray], table: int) -> dict[str, np.ndarray]:
    """Our arrays as an implementation keeps them: one table of the model."""
    found, linear = {}, linear_keys(model)
    names, torch = model.key_tables()[table]
    for key, theirs in names.items():
        value = arrays[key].T if torch and key in linear else arrays[key]
        if torch and key in model.padded_keys:
            value = np.concatenate([value, np.full_like(value[:1], 9)])
        parts = [theirs] if isinstance(theirs, str) else theirs
        found |= dict(zip(parts, np.split(value, len(parts)), strict=True))
    return found


TORCH, PADDLE, TRANSFORMERS, PUBLISHED = 0, 2, 3, 5  # of key_tables


@pytest.mark.parametrize(
    ("table", "ending"),
    [(TORCH, ".pth"), (PADDLE, ".pdparams"), (TRANSFORMERS, ".safetensors"),
     (PUBLISHED, ".safetensors")],
)  # fmt: skip
def test_layouts_of_all_implementations_are_read(tmp_path: Path, table: int, ending: str) -> None:
    """The original's code writes reg_scale as an integer."""
    model = built("dfine", "n")
    wanted = filled(model, 0)
    wanted["decoder.reg_scale"][:] = 4
    types = types_of("torch_dfine_n") if table == TORCH else {}
    assert {"int64", "float32", "bool"} == {*types.values()} or table != TORCH
    file = as_file(model, wanted, table)
    file = {key: value.astype(types.get(key, "float32")) for key, value in file.items()}
    write_arrays(tmp_path / f"w{ending}", file)
    filled(model, 1)
    report = load_weights(model, tmp_path / f"w{ending}")
    assert not report.fresh and not report.ignored
    for key, value in arrays_of(model).items():
        np.testing.assert_array_equal(value, wanted[key], err_msg=key)


def test_official_form_has_the_row_of_no_class() -> None:
    model = built("rtdetr", "r18")
    wanted = filled(model, 0)
    rows = official_arrays_of(model)[EMBEDDING]
    np.testing.assert_array_equal(rows[:-1], wanted[EMBEDDING])
    assert rows.shape == (4, 256) and not rows[-1].any()


@pytest.mark.parametrize("table", [TORCH, PADDLE, PUBLISHED])
def test_another_number_of_classes_leaves_the_class_layers_fresh(tmp_path, table: int) -> None:
    source, model = built("dfine", "n", 5), built("dfine", "n")
    write_arrays(tmp_path / "w.npz", as_file(source, filled(source, 0), table))
    report = load_weights(model, tmp_path / "w.npz")
    classes = [key for key in model.state_dict() if key.startswith(model.class_layers)]
    assert sorted(report.fresh) == sorted(classes) and len(classes) == 2 * 4 + 1


def test_rows_of_classes_are_found_by_name(tmp_path: Path) -> None:
    source, model = built("dfine", "n", 5), built("dfine", "n")
    theirs, ours = filled(source, 0), arrays_of(model)
    write_arrays(tmp_path / "w.pth", as_file(source, theirs, TORCH))
    of_file = ("cat", "dog", "bus", "car", "cow")
    report = load_weights(model, tmp_path / "w.pth", ClassNames(of_file, ("cow", "tram", "dog")))
    assert report.by_name.startswith("2 of 3 classes")
    found, linear = arrays_of(model), linear_keys(model)
    for key in (each for each in found if each.startswith(model.class_layers)):
        rows, before, after = (x[key].T if key in linear else x[key] for x in (theirs, ours, found))
        np.testing.assert_array_equal(after[[0, 2]], rows[[4, 1]])
        np.testing.assert_array_equal(after[1], before[1])


@pytest.mark.parametrize("table", [pytest.param(TORCH, marks=pytest.mark.slow), PADDLE])
def test_a_classifier_fills_the_backbone(tmp_path: Path, table: int) -> None:
    model = built("rtdetr", "r18")
    wanted = filled(model, 0)
    start = "backbone."
    file = {
        key.removeprefix(start): value
        for key, value in as_file(model, wanted, table).items()
        if key.startswith(start)
    }
    write_arrays(tmp_path / "w.npz", file | {"fc.weight": np.zeros([512, 10], "float32")})
    filled(model, 1)
    report = load_weights(model, tmp_path / "w.npz")
    assert {*report.loaded} == {key for key in wanted if key.startswith(start)}
    assert report.ignored == ("fc.weight",)
    for key in report.loaded:
        np.testing.assert_array_equal(model.state_dict()[key].numpy(), wanted[key])


def test_a_model_without_denoising_ignores_the_embedding(tmp_path: Path) -> None:
    source = built("dfine", "n")
    write_arrays(tmp_path / "w.pth", as_file(source, filled(source, 0), TORCH))
    model = RTDETR(RTDETRConfig(variant="dfine", size="n", num_classes=3, denoising=0))
    assert load_weights(model, tmp_path / "w.pth").ignored == (EMBEDDING,)
