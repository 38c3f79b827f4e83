"""Files of torch.save, read without torch: what is understood and what each value becomes."""

import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest

from ppdist.models.unpickle import read_torch, write_torch
from ppdist.models.weights import as_numbers, read_arrays
from tests.errors import raises
from tests.unit.models.torch_lookalikes import FakeTorch, dict_of, opcodes_of_tensor, zip_of

ARRAYS = {
    "model.0.conv.weight": np.arange(24, dtype="float32").reshape(2, 3, 2, 2),
    "model.0.bn.weight": np.array([1.5, -2.0], "float16"),
    "model.0.bn.running_mean": np.array([0.5, 0.25], "float16"),
    "model.0.bn.num_batches_tracked": np.array(7, "int64"),
    "model.1.anchors": np.ones([3, 3, 2], "float32"),
}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    return FakeTorch(monkeypatch)


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
        np.testing.assert_array_equal(found[key], value)


def in_order(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As torch's state_dict() goes: parameters of a module before its buffers, then its parts."""
    return {key: arrays[key] for key in ARRAYS}


def test_whole_checkpoint_gives_its_model_tensors(torch: FakeTorch, tmp_path) -> None:
    checkpoint = {"epoch": 3, "best_fitness": np.array([0.4]), "model": torch.model(ARRAYS),
                  "ema": None, "updates": 12, "optimizer": None, "opt": {"batch": 16},
                  "where": Path("runs/exp"), "date": "2024-01-01"}  # fmt: skip
    for save in (torch.save, torch.save_legacy):
        found = read_arrays(save(tmp_path / "best.pt", checkpoint))
        assert_equal(found, in_order(ARRAYS))
    assert "models.yolo" not in sys.modules


@pytest.mark.parametrize("wrap", ["nothing", "model", "state_dict", "ema", "model_state_dict",
                                  "net", "module", "weights", "params"])  # fmt: skip
def test_state_dicts_are_found_where_people_put_them(torch: FakeTorch, tmp_path, wrap) -> None:
    state: object = OrderedDict((key, torch.tensor(value)) for key, value in ARRAYS.items())
    state = state if wrap == "nothing" else {"epoch": 1, wrap: state}
    for save in (torch.save, torch.save_legacy):
        assert_equal(read_arrays(save(tmp_path / "w.pth", state)), ARRAYS)


def test_the_first_name_that_leads_to_tensors_counts(torch: FakeTorch, tmp_path) -> None:
    state = OrderedDict((key, torch.tensor(value)) for key, value in ARRAYS.items())
    averaged = {"w": torch.tensor(np.ones(3, "float32"))}
    other = {"module": averaged, "decay": 0.9}
    found = read_arrays(torch.save(tmp_path / "w.pt", {"ema": other, "model": state}))
    assert_equal(found, {"w": np.ones(3, "float32")})
    empty = {"ema": {"decay": 0.9}, "model": state, "lr": averaged["w"]}
    assert_equal(read_arrays(torch.save(tmp_path / "w.pt", empty)), ARRAYS)
    keeper = torch.define("models.common", "ModelEMA")()
    keeper.ema, keeper.updates = torch.model({"w": np.zeros(3, "float32")}), 3
    found = read_arrays(torch.save(tmp_path / "w.pt", {"ema": keeper, "model": state}))
    assert_equal(found, {"w": np.zeros(3, "float32")})


def test_dicts_of_other_classes_are_dicts(torch: FakeTorch, tmp_path) -> None:
    state = {key: torch.tensor(value) for key, value in ARRAYS.items()}
    kind = type("Config", (dict,), {"__module__": "models.common"})
    torch.modules["models.common"].Config = kind
    for content in (kind(state), {"model": kind(state)}, defaultdict(int, state)):
        assert_equal(read_arrays(torch.save(tmp_path / "w.pt", content)), ARRAYS)


def test_number_types_without_a_place_here_are_named(tmp_path) -> None:
    storage = b"((S'storage'\nctorch\nUntypedStorage\nS'0'\nS'cpu'\nL6L\ntQ"
    newer = b"ctorch._utils\n_rebuild_tensor_v3\n" + storage + b"L0L\n(L6L\nt(L1L\ntI00\n(d"
    newer += b"ctorch\nfloat8_e4m3fn\ntR"
    path = zip_of(tmp_path / "w.pt", dict_of(newer), [np.zeros(6, "uint8")])
    with raises("weights_type_unsupported"):
        read_arrays(path)


def test_repacked_archive_error_says_how_to_pack_it(tmp_path) -> None:
    write_torch(tmp_path / "w.pt", ARRAYS)
    with zipfile.ZipFile(tmp_path / "w.pt") as source:
        entries = {name: source.read(name) for name in source.namelist()}
    for way in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / "again.pt", "w", way) as archive:
            archive.writestr("archive/", b"")
            for name, data in entries.items():
                archive.writestr(name, data)
        if way == zipfile.ZIP_STORED:
            assert_equal(read_arrays(tmp_path / "again.pt"), ARRAYS)
        else:
            with raises("weights_repacked"):
                read_arrays(tmp_path / "again.pt")


def test_pickled_model_loads_with_and_without_source(torch, tmp_path) -> None:
    assert_equal(read_arrays(torch.save(tmp_path / "m.pt", torch.model(ARRAYS))), in_order(ARRAYS))
    # Before torch 1.6 a class was ('module', class, file, source).
    old = b"(dS'_parameters'\n(dS'w'\n" + opcodes_of_tensor() + b"ssS'_modules'\n(ds"
    old = b"(S'module'\ncmodels.yolo\nModel\nS'yolo.py'\nS'import os'\ntQ)\x81" + old + b"b."
    found = read_arrays(zip_of(tmp_path / "old.pt", old, [np.arange(6, dtype="float32")]))
    assert_equal(found, {"w": np.arange(6, dtype="float32").reshape(2, 3)})


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_every_pickle_protocol_of_torch_reads_the_same(torch, tmp_path, protocol) -> None:
    data = torch.pickle(
        {"model": torch.model({"a.weight": np.ones(3, "float32")})}, max(protocol, 1)
    )
    found = read_arrays(zip_of(tmp_path / "p.pt", data, torch.storages))
    assert_equal(found, {"a.weight": np.ones(3, "float32")})


def test_views_of_one_storage_keep_offset_and_strides(tmp_path) -> None:
    numbers = np.arange(12, dtype="float32")
    transposed = opcodes_of_tensor(count=12, offset=3, shape=(3, 2), strides=(1, 4))
    found = read_torch(zip_of(tmp_path / "v.pt", dict_of(transposed), [numbers]))["w"]
    np.testing.assert_array_equal(found, [[3, 7], [4, 8], [5, 9]])


def test_bfloat16_bit_patterns_become_numbers(tmp_path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x3E80], "uint16")
    data = dict_of(opcodes_of_tensor(count=3, shape=(3,), strides=(1,), kind=b"BFloat16Storage"))
    found = read_torch(zip_of(tmp_path / "b.pt", data, [bits]))["w"]
    np.testing.assert_array_equal(as_numbers(found), [1.0, -2.0, 0.25])


def test_what_is_written_is_read_back(tmp_path) -> None:
    arrays = {**ARRAYS, "empty": np.zeros([0, 3], "float32"), "big": np.zeros([300], "float64")}
    write_torch(tmp_path / "w.pt", arrays)
    assert_equal(read_arrays(tmp_path / "w.pt"), arrays)


def test_written_globals_are_those_torch_allows(tmp_path) -> None:
    write_torch(tmp_path / "w.pt", ARRAYS)
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None
        pickled = archive.read("archive/data.pkl")
    names = {arg for opcode, arg, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    assert names == {"collections OrderedDict", "torch._utils _rebuild_tensor_v2",
                     "torch FloatStorage", "torch HalfStorage", "torch LongStorage"}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "lr": 0.1}, "no weights in it: expected a state dict, a model, or one of "),
        ([1, 2], "weights, params; found list"),
        ({"net": {"a": 1}}, "found 'net'"),
    ],
)
def test_a_file_without_weights_says_what_it_holds(torch, tmp_path, content, message) -> None:
    with raises("weights_no_state_dict", message) as caught:
        read_arrays(torch.save(tmp_path / "w.pt", content))
    assert str(caught.value).startswith(f"{tmp_path / 'w.pt'}: ")


def test_files_that_torch_did_not_write_are_named(tmp_path) -> None:
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"w": 1}))
    with raises("weights_format", "plain.pt"):
        read_arrays(tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("weights")
    with raises("weights_damaged", "text.pt", ".pt"):
        read_arrays(tmp_path / "text.pt")
    with zipfile.ZipFile(tmp_path / "any.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with raises("weights_format"):
        read_arrays(tmp_path / "any.pt")
    zip_of(tmp_path / "script.pt", dict_of(opcodes_of_tensor()), [np.zeros(6, "float32")])
    with zipfile.ZipFile(tmp_path / "script.pt", "a") as archive:
        archive.writestr("best/constants.pkl", b"N.")
    with raises("weights_torchscript"):
        read_arrays(tmp_path / "script.pt")
