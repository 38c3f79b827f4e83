"""Against torch: its files load here, ours load there.  Torch is needed by these tests alone."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.model import YOLOv5ClsConfig, YOLOv5Config
from ppdist.models.build import build_model
from ppdist.models.weights import (
    arrays_of,
    as_numbers,
    load_weights,
    official_arrays_of,
    read_arrays,
    write_arrays,
)
from tests.reference.parity import yolov5, yolov5_cls
from tests.reference.parity.reference import read_formulas, read_key_list, read_reference

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
CONFIGS = {
    "detector": YOLOv5Config(size="n", width_multiple=0.125, num_classes=4),
    "classifier": YOLOv5ClsConfig(size="n", width_multiple=0.125, num_classes=4),
}


@pytest.fixture
def model_of(monkeypatch: pytest.MonkeyPatch):
    """Makes a torch model with given state dict, of classes that exist while the test saves it."""
    yolo = types.ModuleType("models.yolo")
    for name, base in (("DetectionModel", torch.nn.Module), ("Conv", torch.nn.Module)):
        setattr(yolo, name, type(name, (base,), {"__module__": "models.yolo"}))
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    monkeypatch.setitem(sys.modules, "models.yolo", yolo)

    def make(arrays: dict[str, np.ndarray]) -> "torch.nn.Module":
        root = yolo.DetectionModel()
        root.stride, root.names = torch.tensor([8.0, 16.0, 32.0]), {0: "person"}
        for key, array in arrays.items():
            *path, name = key.split(".")
            module = root
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, yolo.Conv())
                module = module.get_submodule(part)
            tensor = torch.tensor(array)
            if name in ("weight", "bias"):
                module.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                module.register_buffer(name, tensor)
        return root

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_torch_loads_our_file_with_weights_only(tmp_path, model_of, name) -> None:
    official = official_arrays_of(build_model(CONFIGS[name]))
    write_arrays(tmp_path / "w.pt", official)
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert list(state) == list(official)
    for key, value in official.items():
        assert state[key].numpy().dtype == value.dtype
        np.testing.assert_array_equal(state[key].numpy(), value)
    model_of(official).load_state_dict(state, strict=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("content", ["state dict", "checkpoint", "average", "model"])
def test_every_form_of_torch_save_loads(tmp_path, model_of, name, zipped, content) -> None:
    source, target = build_model(CONFIGS[name]), build_model(CONFIGS[name])
    model = model_of(official_arrays_of(source))
    blank = model_of(
        {key: np.zeros_like(value) for key, value in official_arrays_of(source).items()}
    )
    saved = {
        "state dict": model.state_dict(),
        "checkpoint": {"epoch": -1, "model": model, "ema": None, "best_fitness": np.array([0.3]),
                       "optimizer": torch.optim.SGD(model.parameters(), 0.1).state_dict(),
                       "opt": {"project": Path("runs")}, "date": "2024-01-01"},
        "average": {"model": blank, "ema": model},
        "model": model,
    }  # fmt: skip
    path = tmp_path / "best.pt"
    torch.save(saved[content], path, _use_new_zipfile_serialization=zipped)
    report = load_weights(target, path)
    assert len(report.loaded) == len(source.state_dict()) and not report.fresh
    ours, theirs = arrays_of(target), arrays_of(source)
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(("name", "family"), [("yolov5n", yolov5), ("yolov5s_cls", yolov5_cls)])
def test_torch_checkpoint_computes_original_outputs(
    shared_dir, tmp_path, model_of, name, family
) -> None:
    formulas = read_formulas(shared_dir / "parity")
    reference = read_reference(shared_dir / "parity" / f"{name}.npz", formulas)
    arrays = {}
    for key, shape in read_key_list(shared_dir / "parity" / "yolov5_keys.json")[name].items():
        value = formulas.parity_value(key, shape)
        if value is None:
            value = reference.values["anchors_grid"] if shape else np.array(0)
        arrays[key] = np.asarray(value, "float32" if shape else "int64")
    torch.save({"model": model_of(arrays), "ema": None}, tmp_path / "w.pt")
    model = family.build(name)
    report = load_weights(model, tmp_path / "w.pt")
    assert not report.fresh and not report.ignored
    measurements = list(family.compare_inference(model, reference))
    assert len(measurements) > 10
    assert [m for m in measurements if not m.passed] == []


def test_number_types_and_views_read_as_in_torch(tmp_path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "transposed": base.transpose(0, 2), "slice": base[1, :, ::2], "scalar": torch.tensor(2.5),
        "half": base.half(), "double": base.double(), "long": base.long(), "byte": base.byte(),
        "bool": base > 3, "empty": torch.empty(0, 4), "bfloat16": base.bfloat16(),
        "channels_last": torch.ones(2, 3, 4, 5).cumsum(2).to(memory_format=torch.channels_last),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "w.pt")
    found = read_arrays(tmp_path / "w.pt")
    for key, tensor in tensors.items():
        expected = tensor.float() if key == "bfloat16" else tensor
        np.testing.assert_array_equal(as_numbers(found[key]), expected.numpy())
