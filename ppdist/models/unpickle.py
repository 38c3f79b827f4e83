"""Reads and writes Paddle's and torch's pickled weights without running them.

A pickle is a program for a small stack machine.  The usual reader runs it; this one only writes
down what the program would make: nothing the file names is imported, called or given attributes.
`np.zeros(3)` comes out as `PickledObject(Name("numpy", "zeros"), (3,))`, and `read_pdparams` and
`read_torch`, which know what an array looks like there, take it apart.  So there is no list of
forbidden names that could have a gap: no name leads anywhere.  A file that asks for a call no
weight file needs is refused all the same, so that its owner hears of it.

The module reads in the order in which a file goes through it:

    read_pickle                     the stack machine: what one pickle describes
    find_weights                    where in that people keep their weights
    read_pdparams, write_pdparams   Paddle's files: a pickled dict of numpy arrays
    read_torch, write_torch         torch's files: a pickle beside the numbers of its tensors
    read_torch_content              what else such a file says

Sources: opcodes: PEP 307, 3154, 574 and the documentation of Python's `pickletools`; torch's
layout: the documentation of torch.save ("Serialization semantics") and files written by it.
"""

import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.errors import WeightsError
from ppdist.common.files import open_file, read_file
from ppdist.common.manifest import MAX_BYTES

# What a file may ask for at most.
MAX_OPERATIONS = 5_000_000  # a YOLOv5x checkpoint has about 30,000; each one costs up to 200 bytes
MAX_ENTRIES = 20_000  # of a dict or model with weights; a YOLOv5x has about 1,500
MAX_VISITS = 200_000  # attributes of modules, shared ones every time; a YOLOv5x has about 30,000
MAX_KEY_LENGTH = 500
MAX_DIMENSIONS = 8
MAX_SIZE = 1 << 80  # beyond it a file's numbers only cost time
_SHOWN_CHARACTERS = 80


class NotSupportedError(ValueError):
    """The file is sound, its arrays' type is not supported."""


def shown(text: str) -> str:
    """The file's own words for a terminal: no control characters, no megabytes."""
    return ascii(text[:_SHOWN_CHARACTERS])[1:-1]


class Name(NamedTuple):
    """What the file calls `module.name`; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return shown(f"{self.module}.{self.name}")


class Reference(NamedTuple):
    """A persistent id, such as a tensor's numbers."""

    identity: object


@dataclass(eq=False, slots=True)
class PickledObject:
    """A dict, set, or object that the file describes.

    Equal to itself alone.

    maker: the class or function that would have been called.
    args: for it.
    state: what would have become its `__dict__` or gone to `__setstate__`; None: nothing.
    items: key, value pairs set one by one (dict, OrderedDict).
    """

    maker: Name
    args: Any = ()
    state: Any = None
    items: list[tuple[object, object]] = field(default_factory=list)


_DICT, _SET = Name("builtins", "dict"), Name("builtins", "set")
_MAPPINGS = (_DICT, Name("__builtin__", "dict"), Name("collections", "OrderedDict"))
_RECONSTRUCTORS = (Name("copyreg", "_reconstructor"), Name("copy_reg", "_reconstructor"))
# The calls that weight files and whole checkpoints contain.  Being here lets the file pass, nothing
# more: these are not called either.
_CALLS = frozenset(
    Name(module, name)
    for modules, names in (
        ("collections", "OrderedDict defaultdict Counter deque"),
        ("builtins __builtin__", "set frozenset list dict tuple bytearray slice range complex"),
        ("_codecs", "encode"),
        ("copyreg copy_reg", "_reconstructor"),
        ("numpy", "dtype ndarray"),
        ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct scalar"),
        ("numpy.core.numeric numpy._core.numeric", "_frombuffer"),
        ("pathlib pathlib._local", "Path PosixPath WindowsPath PurePosixPath PureWindowsPath"),
        ("datetime", "datetime date time timedelta timezone"),
        ("types", "SimpleNamespace"),
        ("functools", "partial"),
        ("torch", "Size device Tensor"),
        (
            "torch._utils",
            "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
            "_rebuild_parameter_with_state",
        ),
        ("torch._tensor", "_rebuild_from_type_v2"),
    )
    for module in modules.split()
    for name in names.split()
)


def read_pickle(stream: BytesIO, path: Path) -> object:
    """What one pickle describes, out of Names, Mades, References and plain values.

    Args:
        stream: stands at the start of a pickle, afterwards behind its end.  In memory, because
            only then is a declared length bounded by what is there.
        path: for messages.
    Raises:
        WeightsError: the file asks for a call that no weight file needs, or for far too much.
        Exception: damaged; see weights.read_arrays.
    """
    return _Machine(path).run(stream)


def mapping(value: object) -> dict[str, object] | None:
    """Text-keyed entries of a dict or dict-like object; else None."""
    if not isinstance(value, PickledObject) or not (value.maker in _MAPPINGS or value.items):
        return None
    pairs = [tuple(pair) for pair in _pairs_of_python2(value) if len(pair) == 2] + value.items
    return {key: item for key, item in pairs if isinstance(key, str)}


def entry_count(value: object) -> int:
    """How many entries `mapping` goes through."""
    return (
        len(value.items) + len(_pairs_of_python2(value)) if isinstance(value, PickledObject) else 0
    )


def _pairs_of_python2(value: PickledObject) -> list[Any]:
    args = value.args if value.maker in _MAPPINGS and isinstance(value.args, tuple) else ()
    return args[0] if args and isinstance(args[0], list) else []


def describe(value: object) -> str:
    """What a value is, for messages; short whatever the file says."""
    if isinstance(value, PickledObject):
        return str(value.maker)
    return str(value) if isinstance(value, Name) else type(value).__name__


class _Machine:
    """The stack machine, with marks as the sentinel `marker` among the values.

    references: every Reference that the pickle made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}
        self.marker = object()
        self.references: list[Reference] = []

    def run(self, stream: BytesIO) -> object:
        """See `read_pickle`."""
        for count, (opcode, arg, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_OPERATIONS:
                raise WeightsError(
                    f"refused: more than {MAX_OPERATIONS} pickle operations, and a weight file "
                    "needs some thousands",
                    code="weights_unsafe",
                    where=str(self._path),
                )
            if opcode.name == "STOP":
                break
            if opcode.name in _VALUES:
                self.stack.append(arg)
            elif opcode.name in _PUSHED:
                self.stack.append(_PUSHED[opcode.name](self, arg))
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, arg)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise ValueError(f"pickle operation {opcode.name}")
        return self.pop(1)[0]

    def pop(self, count: int) -> tuple[Any, ...]:
        """The last values of the stack, oldest first."""
        values = [self.stack.pop() for _ in range(count)]
        if any(value is self.marker for value in values):
            raise ValueError("a pickle operation lacks its operands")
        return tuple(values[::-1])

    def pop_to_mark(self) -> list[Any]:
        values = []
        while (value := self.stack.pop()) is not self.marker:
            values.append(value)
        return values[::-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, values: Sequence[Any]) -> None:
        # An object that is also a list (or set), such as a deque: its items are not needed.
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, PickledObject):
            raise ValueError(f"entries for {describe(target)}")

    def set_items(self, pairs: Sequence[Any]) -> None:
        self._target().items.extend(pairs)

    def build(self, state: object) -> None:
        self._target().state = state

    def _target(self) -> PickledObject:
        """Object to change: one that the file made, never a name."""
        target = self.stack[-1]
        if not isinstance(target, PickledObject):
            raise ValueError(f"items or state for {describe(target)}")
        return target

    def reference(self, identity: Any) -> object:
        if isinstance(identity, tuple) and identity[:1] == ("module",) and len(identity) > 1:
            return identity[1]  # torch before 1.6: a class, beside its source code
        self.references.append(Reference(identity))
        return self.references[-1]

    def call(self, maker: Any, args: Any) -> PickledObject:
        if not isinstance(maker, Name) or maker not in _CALLS:
            raise WeightsError(
                f"refused: it asks to run {describe(maker)}, and a weight file needs arrays only",
                code="weights_unsafe",
                where=str(self._path),
                fix=(
                    "do not use this file unless you trust it; if you do, load it where it was "
                    f"made and save only its arrays: {_remedy(self._path)}"
                ),
            )
        if maker in _RECONSTRUCTORS and isinstance(args[0], Name):  # objects in protocols 0 and 1
            maker, args = args[0], ()
        return PickledObject(maker, args)


def _object(maker: object, args: object) -> PickledObject:
    """Instance of any class without its state, as modules are stored."""
    if not isinstance(maker, Name):
        raise ValueError(f"an object of {describe(maker)}")
    return PickledObject(maker, args)


def _pairs(values: list[Any]) -> list[tuple[object, object]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2]))


def _remedy(path: Path) -> str:
    if path.suffix.lower().startswith(".pd"):
        return "paddle.save(model.state_dict(), 'clean.pdparams')"
    return "torch.save({k: v for k, v in model.state_dict().items()}, 'clean.pt')"


def _name(module: object, name: object) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a name that is not text")
    return Name(module, name)


_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
# What an operation pushes: made of its argument (arg) and of what it takes off the stack.
_PUSHED: dict[str, Callable[[_Machine, Any], object]] = {
    "NONE": lambda m, arg: None,
    "NEWTRUE": lambda m, arg: True,
    "NEWFALSE": lambda m, arg: False,
    "MARK": lambda m, arg: m.marker,
    "DUP": lambda m, arg: m.stack[-1],
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, arg: m.memo[arg]),
    "EMPTY_LIST": lambda m, arg: [],
    "LIST": lambda m, arg: m.pop_to_mark(),
    "EMPTY_DICT": lambda m, arg: PickledObject(_DICT),
    "DICT": lambda m, arg: PickledObject(_DICT, items=_pairs(m.pop_to_mark())),
    "EMPTY_SET": lambda m, arg: PickledObject(_SET),
    "FROZENSET": lambda m, arg: PickledObject(_SET, args=(m.pop_to_mark(),)),
    "EMPTY_TUPLE": lambda m, arg: (),
    "TUPLE": lambda m, arg: tuple(m.pop_to_mark()),
    "TUPLE1": lambda m, arg: m.pop(1),
    "TUPLE2": lambda m, arg: m.pop(2),
    "TUPLE3": lambda m, arg: m.pop(3),
    "GLOBAL": lambda m, arg: _name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda m, arg: _name(*m.pop(2)),
    "BINPERSID": lambda m, arg: m.reference(*m.pop(1)),
    "NEWOBJ": lambda m, arg: _object(*m.pop(2)),
    "NEWOBJ_EX": lambda m, arg: _object(*m.pop(3)[:2]),
    "REDUCE": lambda m, arg: m.call(*m.pop(2)),
    "INST": lambda m, arg: m.call(_name(*arg.split(" ", 1)), tuple(m.pop_to_mark())),
    "OBJ": lambda m, arg: (lambda maker, *args: m.call(maker, args))(*m.pop_to_mark()),
}
# Operations that modify existing objects.
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "POP": lambda m, arg: m.stack.pop(),
    "POP_MARK": lambda m, arg: m.pop_to_mark(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, arg: m.put(arg)),
    "MEMOIZE": lambda m, arg: m.put(len(m.memo)),
    "APPEND": lambda m, arg: m.extend(m.pop(1)),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda m, arg: m.extend(m.pop_to_mark())),
    "SETITEM": lambda m, arg: m.set_items([m.pop(2)]),
    "SETITEMS": lambda m, arg: m.set_items(_pairs(m.pop_to_mark())),
    "BUILD": lambda m, arg: m.build(*m.pop(1)),
}

# Where people keep a state dict or a model in what they save.  In this order: where there is an
# average (`ema`), the originals evaluate it and not the model.
WRAPPERS = (
    "ema", "model", "state_dict", "model_state_dict", "net", "module", "weights", "params",
)  # fmt: skip
_NESTED = 2  # wrappers in wrappers, as in {"ema": {"module": ...}}

# What a dict, or an object such as a model, holds directly: keys and described tensors.
_WeightsIn = Callable[[PickledObject], list[tuple[str, object]]]


def find_weights(content: object, path: Path, weights_in: _WeightsIn) -> list[tuple[str, object]]:
    """Key and described tensor of every weight in what was saved.

    They are looked for under WRAPPERS one after the other, then in `content` itself; of an object
    first in itself, then under WRAPPERS in its `__dict__` (an object that keeps averages).

    Args: weights_in: those of one dict or object, Paddle's or torch's.
    Raises: WeightsError: there are none; names what was found.
    """
    found = _search(content, weights_in, _NESTED)
    if found:
        return found
    keys = list(mapping(content) or ())
    inside = ", ".join(f"'{shown(key)}'" for key in keys[:5]) or describe(content)
    raise WeightsError(
        "no weights in it: expected a state dict, a model, or one of them under "
        f"{', '.join(WRAPPERS)}; found {inside}",
        code="weights_no_state_dict",
        where=str(path),
    )


def _search(content: object, weights_in: _WeightsIn, nested: int) -> list[tuple[str, object]]:
    if not isinstance(content, PickledObject) or entry_count(content) > MAX_ENTRIES:
        return []
    inside = mapping(content)
    own = weights_in(content)
    if inside is None and own:
        return own
    inside = mapping(content.state) or {} if inside is None else inside
    for key in WRAPPERS if nested else ():
        found = _search(inside.get(key), weights_in, nested - 1)
        if found:
            return found
    return own


# numpy 1 keeps these in numpy.core, numpy 2 in numpy._core.
_RECONSTRUCT = {Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_FROM_BUFFER = {Name(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_TUPLES = (Name("builtins", "tuple"), Name("__builtin__", "tuple"))
_DTYPE = Name("numpy", "dtype")
_ENCODE = Name("_codecs", "encode")
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_PROTOCOL = 4  # of Paddle's own; 5 needs numpy.core.numeric, which moved


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Arrays of the dict by key, without other entries (Paddle's name table).

    The dict may be in another one under the usual names (`WRAPPERS`).

    Raises:
        WeightsError: no dict of arrays in it, or refused.
        Exception: damaged; see weights.read_arrays.
    """
    content = read_pickle(BytesIO(read_file(path, MAX_BYTES)), path)
    found = find_weights(content, path, _paddle_arrays)
    return {key: _array(value) for key, value in found if isinstance(value, PickledObject)}


def _paddle_arrays(value: PickledObject) -> list[tuple[str, object]]:
    entries = [(key, _unnamed(entry)) for key, entry in (mapping(value) or {}).items()]
    return [
        (key, entry)
        for key, entry in entries
        if isinstance(entry, PickledObject) and entry.maker in _RECONSTRUCT | _FROM_BUFFER
    ]


def _unnamed(value: object) -> object:
    """The array of a tensor that paddle.save nested: `tuple((name, array))`."""
    if isinstance(value, PickledObject) and value.maker in _TUPLES and len(value.args) == 1:
        pair = value.args[0]
        return pair[1] if isinstance(pair, tuple) and len(pair) == 2 else value
    return value


def _array(made: PickledObject) -> np.ndarray:
    """Builds an array like numpy's __setstate__ or _frombuffer; checks sizes."""
    if made.maker in _FROM_BUFFER:
        raw, dtype, shape, order = made.args
        fortran = order == "F"
    else:
        _, shape, dtype, fortran, raw = made.state
    kind, data = _dtype(dtype), _bytes(raw)
    # Before they are multiplied: numbers of any length cost hours.
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("an array without a sensible shape")
    if any(type(side) is not int or not 0 <= side < MAX_SIZE for side in shape):
        raise ValueError("an array whose sides are not whole numbers from 0 on")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and type {kind}")
    return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")


def _dtype(value: object) -> np.dtype:
    if isinstance(value, PickledObject) and value.maker == _DTYPE:
        code, order = value.args[0], value.state[1]
        if code in _TYPES and order in tuple("<>|="):
            return np.dtype(f"{order}{code}")
        if isinstance(code, str):
            raise NotSupportedError(f"arrays of type {shown(code)} are not supported")
    raise ValueError(f"an array of type {describe(value)}")


def _bytes(value: object) -> bytes | bytearray:
    """Decodes bytes that older pickle protocols store as Latin-1 text."""
    if isinstance(value, PickledObject) and value.maker == _ENCODE:
        value = value.args[0]
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return value
    raise ValueError(f"an array of {describe(value)}")


def write_pdparams(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes what `paddle.load` reads as a state dict; keys as they are."""
    path.write_bytes(pickle.dumps(dict(arrays), protocol=_PROTOCOL))


_ZIP_START = b"PK\x03\x04"
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# bfloat16, which numpy lacks, stays in uint16 bit patterns, as Paddle keeps it.
_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "<u2",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1",
    "BoolStorage": "<u1", "ByteStorage": "<u1",
}  # fmt: skip
# As what a type is written: the last storage that is read as it.
_STORAGE_OF = {np.dtype(code).name: kind for kind, code in _STORAGES.items()}
_STORAGE_OF["bool"] = "BoolStorage"
_TENSORS = (Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor"))
_PARAMETERS = (
    Name("torch._utils", "_rebuild_parameter"),
    Name("torch._utils", "_rebuild_parameter_with_state"),
)
_SUBCLASS = Name("torch._tensor", "_rebuild_from_type_v2")  # a tensor with attributes of its own
_NEWER = Name("torch._utils", "_rebuild_tensor_v3")  # of types such as float8; the type is args[6]


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """Weights of the file by the original's keys.

    Views, some of them of shared memory.

    A pickle describes tensors as `_rebuild_tensor_v2(storage, offset, size, stride)`, beside the
    numbers of the storages: both in a zip archive, before torch 1.6 one after the other.  The
    numbers are bounds-checked views of the storages.  Understood: a state dict; a pickled model;
    either of them in a dict under one of WRAPPERS.  Of a model only the tensors are taken, walking
    from module to module as torch's `state_dict()` does.

    Raises:
        WeightsError: nothing of what is understood, or refused.
        Exception: damaged; see weights.read_arrays.
    """
    with open_file(path) as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            return _torch_arrays(path, *_open_legacy(path))
        with zipfile.ZipFile(file) as archive:
            return _torch_arrays(path, *_open_zip(archive, path))


def read_torch_content(path: Path) -> object:
    """What the file describes beside its numbers.

    A pickled model keeps names and settings there.

    Raises: as `read_torch`.
    """
    with open_file(path) as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            return _open_legacy(path)[0]
        with zipfile.ZipFile(file) as archive:
            return _open_zip(archive, path)[0]


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
            "a TorchScript program, from which weights cannot be extracted",
            code="weights_torchscript",
            where=str(path),
            fix="give the checkpoint it was exported from",
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
        raise _big_endian(path)

    def fetch(storage: _Storage) -> bytes:
        return archive.read(entries[f"{top[0]}/data/{storage.key}"])

    return read_pickle(BytesIO(archive.read(f"{top[0]}/data.pkl")), path), fetch


def _open_legacy(path: Path) -> tuple[object, _Fetch]:
    data = read_file(path, MAX_BYTES)
    stream = BytesIO(data)
    if read_pickle(stream, path) != _LEGACY_MAGIC or read_pickle(stream, path) != _LEGACY_PROTOCOL:
        raise WeightsError(
            "not a file of torch.save",
            code="weights_format",
            where=str(path),
            fix="if Paddle wrote it, call it .pdparams",
        )
    written_on = mapping(read_pickle(stream, path)) or {}
    if written_on.get("little_endian") is not True:
        raise _big_endian(path)
    machine = _Machine(path)
    content = machine.run(stream)
    keys = read_pickle(stream, path)
    storages = {storage.key: storage for storage in map(_Storage.of, machine.references)}
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


def _big_endian(path: Path) -> WeightsError:
    return WeightsError(
        "written on a big-endian machine, which is not supported",
        code="weights_big_endian",
        where=str(path),
    )


def _torch_arrays(path: Path, content: object, fetch: _Fetch) -> dict[str, np.ndarray]:
    found = find_weights(content, path, lambda value: _torch_tensors(value, path))
    tensors = _Tensors(path, fetch)
    return {key: tensors.array(shown(key), value) for key, value in found}


def _torch_tensors(value: PickledObject, path: Path) -> list[tuple[str, object]]:
    """Keys and described tensors of a state dict or a model."""
    entries = mapping(value)
    if entries is None and not _is_tensor(value):
        return _walk(value, path)
    return [(key, tensor) for key, tensor in (entries or {}).items() if _is_tensor(tensor)]


def _is_tensor(value: object) -> bool:
    return isinstance(value, PickledObject) and value.maker in (
        *_TENSORS, *_PARAMETERS, _SUBCLASS, _NEWER,
    )  # fmt: skip


def _walk(model: PickledObject, path: Path) -> list[tuple[str, object]]:
    """Parameters and buffers of a pickled model, in torch's order.

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
        inner = [(f"{name}.", part) for name, part in children if isinstance(part, PickledObject)]
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


class _Tensors:
    """Arrays of described tensors; each storage is fetched once."""

    def __init__(self, path: Path, fetch: _Fetch) -> None:
        self._path = path
        self._fetch = fetch
        self._fetched: dict[str, bytes | memoryview] = {}

    def array(self, key: str, value: object) -> np.ndarray:
        """Raises: WeightsError: `value` is not a tensor, or exceeds its storage."""
        if isinstance(value, PickledObject) and value.maker in _PARAMETERS:
            value = value.args[0]
        if isinstance(value, PickledObject) and value.maker == _SUBCLASS:
            maker, _, args = value.args[:3]
            value = PickledObject(maker, args) if isinstance(maker, Name) else None
        if isinstance(value, PickledObject) and value.maker == _NEWER:
            raise NotSupportedError(
                f"{key}: numbers of type {describe(value.args[6])} are not supported"
            )
        if not isinstance(value, PickledObject) or value.maker not in _TENSORS:
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
    """Why a view of `count` numbers is invalid; empty: it is valid."""
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


_TOP = "archive"  # every entry of the archive is in this folder
_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"  # an empty one, as every tensor's hooks are


def write_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous arrays as an OrderedDict of CPU tensors.

    Each has its own storage.

    `torch.load` reads it, also with `weights_only=True`.  The pickle is put together by hand, since
    Python's own pickler wants to import what it names.
    """
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
        b"(", _text("storage"), f"ctorch\n{_STORAGE_OF[array.dtype.name]}\n".encode(),
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


def _integers(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
