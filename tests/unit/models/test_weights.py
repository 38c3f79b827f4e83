"""Weights from every kind of file, and the exact words for those that do not fit."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from ppdist.common import manifest as manifest_module
from ppdist.config.model import PPYOLOEConfig
from ppdist.models.build import build_model
from ppdist.models.ppyoloe import PPYOLOE
from ppdist.models.weights import (
    arrays_of,
    digest_of_weights,
    load_weights,
    official_arrays_of,
    read_arrays,
    write_arrays,
)
from tests.errors import raises
from tests.unit.models.kept import built_once


@built_once
def tiny(num_classes: int = 3, width: float = 0.125, seed: int = 0) -> PPYOLOE:
    paddle.seed(seed)
    return build_model(
        PPYOLOEConfig(size="t", width_multiple=width, num_classes=num_classes, variant="plus")
    )


def assert_same(model: PPYOLOE, other: PPYOLOE) -> None:
    mine, theirs = arrays_of(model), arrays_of(other)
    assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)


def save(model: PPYOLOE, path: Path) -> Path:
    if path.suffix == ".pdparams":
        paddle.save(model.state_dict(), str(path))
    elif path.suffix == ".npz":
        np.savez(path, **arrays_of(model))
    elif path.suffix == ".safetensors":
        save_file(arrays_of(model), path)
    else:
        path.mkdir(parents=True)
        save_file(arrays_of(model), path / "ema.safetensors")
        digest = hashlib.sha256((path / "ema.safetensors").read_bytes()).hexdigest()
        files = {"ema.safetensors": {"sha256": digest}}
        (path / "manifest.json").write_text(json.dumps({"step": 1, "files": files}))
    return path


@pytest.mark.parametrize("name", ["w.pdparams", "w.npz", "w.safetensors", "step-00000001"])
def test_every_kind_of_file_gives_back_every_value(tmp_path: Path, name: str) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    report = load_weights(target, save(source, tmp_path / name))
    assert_same(target, source)
    assert len(report.loaded) == len(source.state_dict())
    assert not report.fresh and not report.ignored
    assert str(report) == f"weights: {len(report.loaded)} tensors from {tmp_path / name}"


def test_paddle_reads_the_pdparams_that_we_write(tmp_path: Path) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    write_arrays(tmp_path / "w.pdparams", official_arrays_of(source))
    missing, unexpected = target.set_state_dict(paddle.load(str(tmp_path / "w.pdparams")))
    assert not missing and not unexpected
    assert_same(target, source)


def test_other_class_count_leaves_class_layers_fresh(tmp_path: Path) -> None:
    path = save(tiny(80, seed=1), tmp_path / "w.pdparams")
    model = tiny(3, seed=2)
    before = arrays_of(model)
    report = load_weights(model, path)
    assert len(report.fresh) == 6
    assert all(key.startswith("yolo_head.pred_cls.") for key in report.fresh)
    after = arrays_of(model)
    assert all(np.array_equal(before[key], after[key]) for key in report.fresh)


def test_a_backbone_alone_fills_the_backbone(tmp_path: Path) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    arrays = {k.removeprefix("backbone."): v for k, v in arrays_of(source).items()
              if k.startswith("backbone.")}  # fmt: skip
    np.savez(tmp_path / "imagenet.npz", **arrays, **{"fc.weight": np.zeros([4, 4])})
    report = load_weights(target, tmp_path / "imagenet.npz")
    assert_same(target.backbone, source.backbone)
    assert report.ignored == ("fc.weight",) and len(report.loaded) == len(arrays)


def test_weights_of_other_size_list_both_shapes(tmp_path: Path) -> None:
    path = save(tiny(width=0.25), tmp_path / "w.npz")
    model = tiny(width=0.125)
    before = arrays_of(model)
    with raises("weights_shape_mismatch") as caught:
        load_weights(model, path)
    lines = str(caught.value).splitlines()
    assert "[4, 3, 3, 3]" in lines[1] and "[8, 3, 3, 3]" in lines[1]
    assert len(lines) == 7 and lines[-1].startswith("  ... and ")
    assert all(np.array_equal(before[key], value) for key, value in arrays_of(model).items())


def test_a_missing_entry_is_an_error(tmp_path: Path) -> None:
    arrays = arrays_of(tiny())
    del arrays["neck.pan_routes.0.bn.bias"]
    np.savez(tmp_path / "w.npz", **arrays)
    with raises("weights_shape_mismatch", "neck.pan_routes.0.bn.bias"):
        load_weights(tiny(), tmp_path / "w.npz")


def test_a_file_of_another_architecture_is_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **{"layer1.weight": np.zeros([3, 3])})
    with raises("weights_of_other_architecture"):
        load_weights(tiny(), tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.pdparams", None, "weights_not_found"),
        ("w.onnx", b"x", "weights_format"),
        ("w.pdparams", b"not a pickle", "weights_damaged"),
        ("w.pdparams", pickle.dumps([1, 2]), "weights_no_state_dict"),
        ("w.npz", b"PK not a zip", "weights_damaged"),
        ("w.safetensors", b"\x08\0\0\0\0\0\0\0garbage!", "weights_damaged"),
        ("w.pt", b"", "weights_damaged"),
    ],
)
def test_unreadable_files_are_named_with_the_reason(tmp_path: Path, name, content, code) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with raises(code) as caught:
        load_weights(tiny(), tmp_path / name)
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("suffix", [".pdparams", ".pt", ".safetensors", ".npz"])
def test_pipes_and_devices_are_no_weight_files(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for name in (f"pipe{suffix}", f"zero{suffix}"):
        with raises("file_unreadable"):
            read_arrays(tmp_path / name)
        assert digest_of_weights(tmp_path / name).startswith("cannot be read")


def test_torn_or_non_checkpoint_directory_is_error(tmp_path: Path) -> None:
    with raises("not_a_checkpoint"):
        load_weights(tiny(), tmp_path)
    folder = save(tiny(), tmp_path / "step-00000001")
    file = folder / "ema.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with raises("checkpoint_damaged"):
        load_weights(tiny(), folder)


def test_best_that_moves_while_it_is_read_is_read_whole(tmp_path: Path, monkeypatch) -> None:
    """What was verified is what is parsed, of one checkpoint; one that goes is read afresh."""
    for step in (1, 2):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        write_arrays(folder / "model.safetensors", {"w": np.full(3, step, "float32")})
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        manifest = {"files": {"model.safetensors": {"sha256": digest}}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    best = tmp_path / "best"
    best.symlink_to("step-1")
    read, names = manifest_module.read_file, []

    def reading(path, most):
        content = read(path, most)
        names.append(f"{path.parent.name}/{path.name}")
        if names == ["step-1/manifest.json"]:
            best.unlink()
            best.symlink_to("step-2")
            shutil.rmtree(tmp_path / "step-1")
        return content

    monkeypatch.setattr(manifest_module, "read_file", reading)
    assert read_arrays(best)["w"].tolist() == [2, 2, 2]
    assert names[1:] == ["step-2/manifest.json", "step-2/model.safetensors"]


def test_run_means_best_then_last_then_newest(tmp_path: Path) -> None:
    """In the order in which they appear here: a checkpoint that is named wins."""
    run = tmp_path / "out"
    folder = run / "checkpoints"
    models = {step: tiny(seed=step) for step in (1, 2, 3)}
    for step, model in models.items():
        save(model, folder / f"step-0000000{step}")
    (folder / "step-00000009").mkdir()  # torn: it has no manifest
    for link, step in ((None, 3), ("last", 2), ("best", 1)):
        if link:
            (folder / link).symlink_to(f"step-0000000{step}")
        for path in (run, folder):
            found = tiny(seed=7)
            report = load_weights(found, path)
            assert_same(found, models[step])
            assert report.source == folder / (link or "step-00000003")
    named = tiny(seed=7)
    load_weights(named, folder / "step-00000002")
    assert_same(named, models[2])


MISTAKEN = [
    ("w.pt", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer instead of the"),
    ("w.pt", b"<!DOCTYPE html><html>404", "not a .pt file but a web page"),
    ("w.safetensors", b"<html>", "not a .safetensors file but a web page"),
    ("w.npz", b"\x93NUMPY\x01\0", "not a .npz file but a single array of np.save"),
    ("w.pdparams", b"PK\x03\x04", "a zip archive as torch.save and np.savez write it; name it .pt"),
    ("w.npz", b"\x80\x02}.", "a pickle as paddle.save and old torch.save write it; name"),
    ("w.npz", b"\x10\0\0\0\0\0\0\0{\"__metadata__", "one of safetensors: name it so"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), MISTAKEN)
def test_common_mistakes_recognised_by_first_bytes(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with raises("weights_format", message):
        load_weights(tiny(), tmp_path / name)


def test_suffix_case_and_aliases_do_not_matter(tmp_path: Path) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    first = save(source, tmp_path / "w.pdparams")
    for name in ("W.PDPARAMS", "w.pdema"):
        (tmp_path / name).write_bytes(first.read_bytes())
        load_weights(target, tmp_path / name)
        assert_same(target, source)
    for name in ("w.pth", "W.PT"):
        write_arrays(tmp_path / name, official_arrays_of(source))
    (tmp_path / "w.ckpt").write_bytes((tmp_path / "w.pth").read_bytes())
    for name in ("w.ckpt", "W.PT"):
        load_weights(tiny(seed=3), tmp_path / name)


@pytest.mark.parametrize("names", [("model",), ("ema",), ("state_dict",), ("ema", "module")])
def test_paddle_state_dict_found_in_nested_dict(tmp_path: Path, names) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    for state in (source.state_dict(), arrays_of(source)):  # tensors: tuple((name, array)) inside
        content: dict = state
        for name in reversed(names):
            content = {name: content, "epoch": 3}
        paddle.save(content, str(tmp_path / "w.pdparams"))
        load_weights(target, tmp_path / "w.pdparams")
        assert_same(target, source)
    paddle.save({"epoch": 3, "lr": 0.1}, str(tmp_path / "none.pdparams"))
    with raises("weights_no_state_dict", "'epoch', 'lr'"):
        load_weights(target, tmp_path / "none.pdparams")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_wrapper_prefix_of_every_key_is_removed(tmp_path: Path, prefix: str) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    np.savez(tmp_path / "w.npz", **{prefix + key: v for key, v in arrays_of(source).items()})
    report = load_weights(target, tmp_path / "w.npz")
    assert_same(target, source)
    assert f"'{prefix}'" in str(report)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.ones([4, 3, 3, 3], "int8"), "weights_quantised"),
        (np.full([4, 3, 3, 3], np.nan, "float32"), "weights_not_finite"),
        (np.full([4, 3, 3, 3], 1e300), "weights_not_finite"),
    ],
)
def test_numbers_that_are_no_weights_are_an_error(tmp_path: Path, value, code) -> None:
    model = tiny(seed=2)
    before = arrays_of(model)
    key = "backbone.stem.conv1.conv.weight"
    np.savez(tmp_path / "w.npz", **{**arrays_of(tiny(seed=1)), key: value})
    with raises(code, key):
        load_weights(model, tmp_path / "w.npz")
    assert all(np.array_equal(before[key], value) for key, value in arrays_of(model).items())


def test_notes_beside_the_weights_are_left_out(tmp_path: Path) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    np.savez(tmp_path / "w.npz", **arrays_of(source), info=np.array("made by x"))
    assert not load_weights(target, tmp_path / "w.npz").ignored
    assert_same(target, source)


def test_bfloat16_bit_patterns_are_understood(tmp_path: Path) -> None:
    source, target = tiny(seed=1), tiny(seed=2)
    halves = {k: (v.view(np.uint32) >> 16).astype(np.uint16) for k, v in arrays_of(source).items()}
    np.savez(tmp_path / "w.npz", **halves)
    load_weights(target, tmp_path / "w.npz")
    ours, theirs = arrays_of(target), arrays_of(source)
    for key in theirs:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-2)
