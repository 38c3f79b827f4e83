"""Weights that `torch.save` wrote (.pt, .pth), read and written without torch.

The file is a pickle that describes tensors as `_rebuild_tensor_v2(storage, offset, size, stride)`,
beside the numbers of the storages: both in a zip archive, before torch 1.6 one after the other.
The pickle is read as data (inert_pickle), so that neither torch nor the classes of the model have
to be there and nothing in the file runs; the numbers are bounds-checked views of the storages.

Understood: a state dict; a pickled model; either of them in a dict under one of the usual names
(weight_search).  Of a model only the tensors are taken, walking from module to module as torch's
`state_dict()` does.
Source: the documentation of torch.save ("Serialization semantics") and files written by it.
"""

import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from ppdist.errors import WeightsError
from ppdist.models.inert_pickle import (
    Made,
    Name,
    NotSupportedError,
    Reference,
    describe,
    entry_count,
    mapping,
    read_pickle,
    shown,
)
from ppdist.models.weight_search import MAX_ENTRIES, find_weights, nothing_found

MAX_VISITS = 200_000  # attributes of modules, shared ones every time; a YOLOv5x has about 30,000
MAX_KEY_LENGTH = 500
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 80  # beyond it a file's numbers only cost time

_ZIP_START = b"PK\x03\x04"
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# bfloat16, which numpy lacks, stays in uint16 bit patterns, as Paddle keeps it.
_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "<u2",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1",
    "ByteStorage": "<u1", "BoolStorage": "<u1",
}  # fmt: skip
_TENSORS = (Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor"))
_PARAMETERS = (
    Name("torch._utils", "_rebuild_parameter"),
    Name("torch._utils", "_rebuild_parameter_with_state"),
)
_SUBCLASS = Name("torch._tensor", "_rebuild_from_type_v2")  # a tensor with attributes of its own
_NEWER = Name("torch._utils", "_rebuild_tensor_v3")  # of types such as float8; the type is args[6]


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """The weights of the file by the original's keys: views, some of them of shared memory.

    Raises:
        WeightsError: nothing of what is understood, or refused.
        Exception: damaged; see weight_files.read_arrays.
    """
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            content, fetch = _open_zip(archive, path)
            return _arrays(content, path, fetch)
    content, fetch = _open_legacy(path)
    return _arrays(content, path, fetch)


# storage -> its bytes; at least as many as it says
_Fetch = Callable[["_Storage"], bytes | memoryview]


@dataclass(frozen=True)
class _Storage:
    """A reference to numbers: `('storage', torch.FloatStorage, key, device, count, ...)`."""

    key: str
    dtype: np.dtype
    count: int

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize

    @staticmethod
    def of(value: object) -> "_Storage":
        identity = value.identity if isinstance(value, Reference) else None
        if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
            raise ValueError(f"expected a storage, found {describe(value)}")
        _, kind, key, _, count = identity[:5]
        view = identity[5:]
        if not isinstance(kind, Name) or kind.name not in _STORAGES or any(view):
            raise NotSupportedError(f"numbers of type {describe(kind)} are not supported")
        if not isinstance(key, str) or type(count) is not int or count < 0:
            raise ValueError("a storage without a key or a length")
        return _Storage(key, np.dtype(_STORAGES[kind.name]), count)


def _open_zip(archive: zipfile.ZipFile, path: Path) -> tuple[object, _Fetch]:
    entries = {info.filename: info for info in archive.infolist()}
    top = [name.partition("/")[0] for name in entries if name.count("/") == 1
           and name.endswith("/data.pkl")]  # fmt: skip
    if len(top) != 1:
        raise WeightsError(
            f"not a file of torch.save: {len(top)} entries */data.pkl, expected one",
            code="weights_format",
            where=str(path),
        )
    if f"{top[0]}/constants.pkl" in entries:
        raise WeightsError(
            "a TorchScript program, which has no weights to take out",
            code="weights_torchscript",
            where=str(path),
            fix="give the file it was made from",
        )
    # Nothing torch writes is compressed, so honest entries take no more than the file.
    listed = archive.infolist()
    if len(entries) < len(listed) or any(
        info.compress_type or info.flag_bits & 1 or info.file_size != info.compress_size
        for info in listed
    ):
        raise WeightsError(
            "refused: an archive with repeated, compressed or encrypted entries, which "
            "torch.save does not write",
            code="weights_repacked",
            where=str(path),
            fix="if it was packed again, unpack it and pack it without compression (zip -0 -r)",
        )
    if sum(info.file_size for info in listed) > path.stat().st_size:
        raise WeightsError(
            "refused: its entries claim more bytes than the file has",
            code="weights_unsafe",
            where=str(path),
        )
    order = f"{top[0]}/byteorder"
    if order in entries and archive.read(order) != b"little":
        raise WeightsError(
            "written on a big-endian machine, which is not supported",
            code="weights_big_endian",
            where=str(path),
        )

    def fetch(storage: _Storage) -> bytes:
        return archive.read(entries[f"{top[0]}/data/{storage.key}"])

    return read_pickle(BytesIO(archive.read(f"{top[0]}/data.pkl")), path), fetch


def _open_legacy(path: Path) -> tuple[object, _Fetch]:
    data = path.read_bytes()
    stream = BytesIO(data)
    if read_pickle(stream, path) != _LEGACY_MAGIC or read_pickle(stream, path) != _LEGACY_PROTOCOL:
        raise WeightsError(
            "not a file of torch.save",
            code="weights_format",
            where=str(path),
            fix="if Paddle wrote it, call it .pdparams",
        )
    machine = mapping(read_pickle(stream, path)) or {}
    if machine.get("little_endian") is not True:
        raise WeightsError(
            "written on a big-endian machine, which is not supported",
            code="weights_big_endian",
            where=str(path),
        )
    references: list[Reference] = []
    content = read_pickle(stream, path, references)
    keys = read_pickle(stream, path)
    storages = {storage.key: storage for storage in map(_Storage.of, references)}
    blocks: dict[str, memoryview] = {}
    position = stream.tell()
    for key in keys if isinstance(keys, list) else []:  # one after the other, each with its count
        if not isinstance(key, str):  # before it is hashed, which recurses into nested tuples
            raise ValueError(f"a storage called by a {describe(key)}")
        (count,) = struct.unpack_from("<q", data, position)
        end = position + 8 + count * storages[key].dtype.itemsize
        if not position + 8 <= end <= len(data):
            raise ValueError(f"storage {key} reaches beyond the file")
        blocks[key] = memoryview(data)[position + 8 : end]
        position = end
    return content, lambda storage: blocks[storage.key]


class _Tensors:
    """Arrays of described tensors; each storage is fetched once."""

    def __init__(self, path: Path, fetch: _Fetch) -> None:
        self._path = path
        self._fetch = fetch
        self._fetched: dict[str, bytes | memoryview] = {}

    def array(self, key: str, value: object) -> np.ndarray:
        """Raises: WeightsError: `value` is no tensor, or reaches beyond its storage."""
        if isinstance(value, Made) and value.maker in _PARAMETERS:
            value = value.args[0]
        if isinstance(value, Made) and value.maker == _SUBCLASS:
            maker, _, args = value.args[:3]
            value = Made(maker, args) if isinstance(maker, Name) else None
        if isinstance(value, Made) and value.maker == _NEWER:
            raise NotSupportedError(
                f"{key}: numbers of type {describe(value.args[6])} are not supported"
            )
        if not isinstance(value, Made) or value.maker not in _TENSORS:
            raise WeightsError(
                f"expected a tensor, found {describe(value)}",
                code="weights_not_arrays",
                where=f"{self._path}: {key}",
            )
        reference, offset, shape, strides = value.args[:4]
        storage = _Storage.of(reference)
        problem = _out_of_bounds(storage.count, offset, shape, strides)
        if problem:
            raise WeightsError(problem, code="weights_damaged", where=f"{self._path}: {key}")
        size = storage.dtype.itemsize
        if 0 in shape:
            return np.zeros(shape, storage.dtype)
        return np.ndarray(
            shape, storage.dtype, self._numbers(key, storage), offset * size,
            tuple(stride * size for stride in strides),
        )  # fmt: skip

    def _numbers(self, key: str, storage: _Storage) -> bytes | memoryview:
        if storage.key not in self._fetched:
            self._fetched[storage.key] = self._fetch(storage)
        numbers = self._fetched[storage.key]
        if len(numbers) < storage.size:
            raise WeightsError(
                f"its storage should have {storage.size} bytes and has {len(numbers)}; the file "
                "is damaged",
                code="weights_damaged",
                where=f"{self._path}: {key}",
            )
        return numbers


def _out_of_bounds(count: int, offset: object, shape: object, strides: object) -> str:
    """Why a view of `count` numbers is none; empty when it is one."""
    for values in (shape, strides, (offset,)):
        if not isinstance(values, tuple) or len(values) > MAX_DIMENSIONS:
            return "a tensor without a sensible shape"
        if any(type(value) is not int or not 0 <= value < MAX_SIZE for value in values):
            return "a tensor whose shape, strides or offset are not whole numbers from 0 on"
    assert isinstance(shape, tuple) and isinstance(strides, tuple) and isinstance(offset, int)
    if len(shape) != len(strides):
        return f"a tensor of {len(shape)} dimensions with {len(strides)} strides"
    if 0 in shape:
        return ""
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if last >= count:
        return f"reaches number {last} of a storage of {count}"
    if math.prod(shape) > count:  # strides of 0 make much of little
        return f"claims {math.prod(shape)} numbers of a storage of {count}"
    return ""


def _arrays(content: object, path: Path, fetch: _Fetch) -> dict[str, np.ndarray]:
    tensors = _Tensors(path, fetch)
    found = find_weights(content, lambda value: _tensors_of(value, path))
    if not found:
        raise nothing_found(path, content)
    return {key: tensors.array(shown(key), value) for key, value in found}


def _tensors_of(value: Made, path: Path) -> list[tuple[str, object]]:
    """Key and described tensor of a state dict or a model; nothing of anything else."""
    entries = mapping(value)
    if entries is None and not _is_tensor(value):
        return _walk(value, path)
    return [(key, tensor) for key, tensor in (entries or {}).items() if _is_tensor(tensor)]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Made) and value.maker in (
        *_TENSORS, *_PARAMETERS, _SUBCLASS, _NEWER,
    )  # fmt: skip


def _walk(model: Made, path: Path) -> list[tuple[str, object]]:
    """Parameters and buffers of a pickled model, in the order of torch's `state_dict()`.

    Whatever its classes are called, a module keeps its parts in `_parameters`, `_buffers` and
    `_modules`.  Modules may be shared, so a small file can describe an endless tree; hence limits.
    """
    found: list[tuple[str, object]] = []
    pending = [("", model)]
    modules, visits = 1, 0
    while pending:
        prefix, module = pending.pop()
        state = mapping(module.state) or {}
        groups = [state.get(name) for name in ("_parameters", "_buffers", "_modules")]
        visits += sum(map(entry_count, (module.state, *groups)))
        if visits > MAX_VISITS:
            break
        *tensors, children = (
            [(f"{prefix}{key[: MAX_KEY_LENGTH + 1]}", part) for key, part in entries.items()]
            for entries in (mapping(group) or {} for group in groups)
        )
        found += [pair for pairs in tensors for pair in pairs if pair[1] is not None]
        inner = [(f"{name}.", part) for name, part in children if isinstance(part, Made)]
        pending += reversed(inner)
        modules += len(inner)
        if modules + len(found) > MAX_ENTRIES or len(prefix) > MAX_KEY_LENGTH:
            break
    else:
        return found
    raise WeightsError(
        "refused: its modules contain each other without end",
        code="weights_unsafe",
        where=str(path),
    )
