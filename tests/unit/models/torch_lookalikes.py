"""Files like those of torch.save, made without torch: honest checkpoints and hostile ones."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage"}


class FakeTorch:
    """Throw-away modules `torch`, `torch._utils` and `models.yolo`, in place while pickling.

    A pickler names what it writes by module and name and insists that both can be imported, so
    the look-alikes have to be importable for a moment; `save` takes them away again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        names = ("torch", "torch._utils", "models", "models.yolo", "models.common")
        self.modules = {name: types.ModuleType(name) for name in names}
        for storage in STORAGES.values():
            self.define("torch", storage)
        self.define("models.yolo", "DetectionModel")
        self.define("models.common", "Conv")
        utils = self.modules["torch._utils"]
        for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            function = types.FunctionType((lambda *_: None).__code__, {}, name)
            function.__module__, function.__qualname__ = "torch._utils", name
            setattr(utils, name, function)
        self.storages: list[np.ndarray] = []

    def define(self, module: str, name: str, **members: object) -> type:
        made = type(name, (), {"__module__": module, **members})
        setattr(self.modules[module], name, made)
        return made

    def tensor(self, array: np.ndarray) -> object:
        """Pickles as a torch tensor does."""
        self.storages.append(array)
        kind = getattr(self.modules["torch"], STORAGES[array.dtype.name])
        identity = ("storage", kind, str(len(self.storages) - 1), "cpu", array.size)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        args = (Identity(identity), 0, array.shape, strides, False, OrderedDict())
        return Reduced(self.modules["torch._utils"]._rebuild_tensor_v2, args)

    def parameter(self, array: np.ndarray) -> object:
        rebuild = self.modules["torch._utils"]._rebuild_parameter
        return Reduced(rebuild, (self.tensor(array), True, OrderedDict()))

    def model(self, arrays: Mapping[str, np.ndarray]) -> object:
        """A DetectionModel whose state dict has these keys, a module per dot."""
        root = self.module("models.yolo", "DetectionModel")
        root.yaml, root.names = {"nc": 80}, ["person"]
        for key, array in arrays.items():
            *path, name = key.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module._modules[part] = self.module("models.common", "Conv")
                module = module._modules[part]
            if name in ("weight", "bias"):
                module._parameters[name] = self.parameter(array)
            else:
                module._buffers[name] = self.tensor(array)
        return root

    def module(self, module: str, name: str) -> object:
        made = getattr(self.modules[module], name)()
        made.training = False
        made._parameters, made._buffers = OrderedDict(), OrderedDict()
        made._non_persistent_buffers_set, made._modules = set(), OrderedDict()
        return made

    def pickle(self, content: object, protocol: int = 2) -> bytes:
        stream = io.BytesIO()
        with self._monkeypatch.context() as patch:
            for name, module in self.modules.items():
                patch.setitem(sys.modules, name, module)
            _Pickler(stream, protocol).dump(content)
        return stream.getvalue()

    def save(self, path: Path, content: object) -> Path:
        return zip_of(path, self.pickle(content), self.storages)

    def save_legacy(self, path: Path, content: object) -> Path:
        """The format before torch 1.6: pickles and numbers one after the other."""
        machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
        parts = [pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)]
        parts += [pickle.dumps(machine, 2), self.pickle(content)]
        parts.append(pickle.dumps([str(i) for i in range(len(self.storages))], 2))
        for array in self.storages:
            parts += [array.size.to_bytes(8, "little"), array.tobytes()]
        path.write_bytes(b"".join(parts))
        return path


class Identity:
    """Pickles as a persistent id."""

    def __init__(self, value: object) -> None:
        self.value = value


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: object, args: tuple) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple:
        return self.call


class _Pickler(pickle._Pickler):  # in Python: the one in C holds on to what it imported
    def persistent_id(self, value: object) -> object:
        return value.value if isinstance(value, Identity) else None


def zip_of(path: Path, pickled: bytes, storages: list[np.ndarray]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("best/data.pkl", pickled)
        archive.writestr("best/byteorder", "little")
        for number, array in enumerate(storages):
            archive.writestr(f"best/data/{number}", array.tobytes())
        archive.writestr("best/version", "3\n")
    return path


def opcodes_of_tensor(
    key: bytes = b"0", count: int = 6, offset: int = 0,
    shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1),
    kind: bytes = b"FloatStorage",
) -> bytes:  # fmt: skip
    """Protocol 0 opcodes that describe a tensor, sensible or not."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"L%dL\n" % value for value in values) + b"t"

    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\n" + kind + b"\nS'" + key
        + b"'\nS'cpu'\nL%dL\ntQL%dL\n" % (count, offset) + numbers(shape) + numbers(strides)
        + b"I00\n(dtR"
    )  # fmt: skip


def dict_of(value: bytes) -> bytes:
    """Opcodes of {'w': value}."""
    return b"(dS'w'\n" + value + b"s."
