"""Writes state dicts that `torch.load` reads, also with `weights_only=True`, without torch.

The pickle is put together by hand, since Python's own pickler wants to import what it names.
Source of the layout: files written by torch.save; opcodes as in Python's `pickletools`.
"""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage",
    "uint16": "BFloat16Storage",  # how this package and Paddle keep bfloat16
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
_TOP = "archive"  # every entry of the archive is in this folder
_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"  # an empty one, as every tensor's hooks are


def write_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous arrays as an OrderedDict of CPU tensors, each with its own storage."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{_TOP}/data.pkl", _pickle(arrays))
        archive.writestr(f"{_TOP}/byteorder", "little")
        for number, array in enumerate(arrays.values()):
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            archive.writestr(f"{_TOP}/data/{number}", little.tobytes())
        archive.writestr(f"{_TOP}/version", "3\n")


def _pickle(arrays: Mapping[str, np.ndarray]) -> bytes:
    parts = [b"\x80\x02", _ORDERED_DICT, b"("]  # PROTO 2, the dict, MARK for SETITEMS
    for number, (key, array) in enumerate(arrays.items()):
        parts += [_text(key), _tensor(str(number), array)]
    return b"".join([*parts, b"u."])  # SETITEMS, STOP


def _tensor(storage: str, array: np.ndarray) -> bytes:
    """torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())"""
    strides = [stride // array.itemsize for stride in array.strides]
    reference = b"".join([
        b"(", _text("storage"), f"ctorch\n{_STORAGES[array.dtype.name]}\n".encode(),
        _text(storage), _text("cpu"), _integer(array.size), b"tQ",  # TUPLE, BINPERSID
    ])  # fmt: skip
    return b"".join([
        b"ctorch._utils\n_rebuild_tensor_v2\n(", reference, _integer(0),
        _integers(array.shape), _integers(strides), b"\x89", _ORDERED_DICT, b"tR",  # NEWFALSE
    ])  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _integers(values: "list[int] | tuple[int, ...]") -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
