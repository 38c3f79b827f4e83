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
    """Error about a file that is sound, but whose arrays have a type that is not supported."""


def shown(text: str) -> str:
    """Returns the file's own words for a terminal: no control characters, no megabytes."""
    return ascii(text[:_SHOWN_CHARACTERS])[1:-1]


class Name(NamedTuple):
    """Name in a file, `module.name`, which is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return shown(f"{self.module}.{self.name}")


class Reference(NamedTuple):
    """A persistent id, such as that of a tensor's numbers."""

    identity: object


@dataclass(eq=False, slots=True)
class PickledObject:
    """A dict, set, or other object that the file describes; equal only to itself.

    maker: the class or function that unpickling would call.
    args: its arguments.
    state: what would become its `__dict__` or go to `__setstate__`; None: nothing.
    items: key, value pairs set one by one (dict, OrderedDict).
    """

    maker: Name
    args: Any = ()
    state: Any = None
    items: list[tuple[object, object]] = field(default_factory=list)


_DICT, _SET = Name("builtins", "dict"), Name("builtins", "set")
_MAPPINGS = (_DICT, Name("__builtin__", "dict"), Name("collections", "OrderedDict"))
_RECONSTRUCTORS = (Name("copyreg", "_reconstructor"), Name("copy_reg", "_reconstructor"))
# The calls that weight files and whole checkpoints contain.  A name in this list only lets the file
# pass: it is not called either.
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
    """Reads what one pickle describes: Names, PickledObjects, References and plain values.

    Args:
        stream: at the start of a pickle, afterwards after its end.  In memory, because only then is
            a declared length bounded by the file's size.
        path: for messages.
    Raises:
        WeightsError: the file asks for a call that no weight file needs, or for far too much.
        Exception: damaged; see weights.read_arrays.
    """
    return _Machine(path).run(stream)


def mapping(value: object) -> dict[str, object] | None:
    """Returns the text-keyed entries of a dict or dict-like object; None for other values."""
    if not isinstance(value, PickledObject) or not (value.maker in _MAPPINGS or value.items):
        return None
    pairs = [tuple(pair) for pair in _python2_pairs(value) if len(pair) == 2] + value.items
    return {key: item for key, item in pairs if isinstance(key, str)}


def entry_count(value: object) -> int:
    """Counts the entries that `mapping` goes through."""
    return len(value.items) + len(_python2_pairs(value)) if isinstance(value, PickledObject) else 0


def _python2_pairs(value: PickledObject) -> list[Any]:
    """Returns the pairs that a dict of Python 2 has among its arguments."""
    args = value.args if value.maker in _MAPPINGS and isinstance(value.args, tuple) else ()
    return args[0] if args and isinstance(args[0], list) else []


def describe(value: object) -> str:
    """Describes a value for messages, briefly whatever the file says."""
    if isinstance(value, PickledObject):
        return str(value.maker)
    return str(value) if isinstance(value, Name) else type(value).__name__


class _Machine:
    """Stack machine of pickles; marks are the sentinel `marker` among the values.

    references: all References that the pickle made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}
        self.marker = object()
        self.references: list[Reference] = []

    def run(self, stream: BytesIO) -> object:
        """Runs a pickle; see `read_pickle`."""
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
            elif opcode.name in _PUSHING:
                self.stack.append(_PUSHING[opcode.name](self, arg))
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, arg)
            # These two only describe the pickle; every other operation is unknown here.
            elif opcode.name not in ("PROTO", "FRAME"):
                raise ValueError(f"pickle operation {opcode.name}")
        return self.pop(1)[0]

    def pop(self, count: int) -> tuple[Any, ...]:
        """Pops the last values of the stack; returns them oldest first."""
        values = [self.stack.pop() for _ in range(count)]
        if any(value is self.marker for value in values):
            raise ValueError("a pickle operation lacks its operands")
        return tuple(values[::-1])

    def pop_to_mark(self) -> list[Any]:
        """Pops the values after the last mark, and the mark; returns them oldest first."""
        values = []
        while (value := self.stack.pop()) is not self.marker:
            values.append(value)
        return values[::-1]

    def put(self, index: int) -> None:
        """Stores the top of the stack in the memo."""
        self.memo[index] = self.stack[-1]

    def extend(self, values: Sequence[Any]) -> None:
        """Appends values to the list on top of the stack."""
        # The items of an object that is also a list (or set), such as a deque, are not needed.
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, PickledObject):
            raise ValueError(f"entries for {describe(target)}")

    def set_items(self, pairs: Sequence[Any]) -> None:
        """Sets items of the object on top of the stack."""
        self._target().items.extend(pairs)

    def build(self, state: object) -> None:
        """Sets the state of the object on top of the stack."""
        self._target().state = state

    def _target(self) -> PickledObject:
        """Returns the object to change: one that the file made, never a name."""
        target = self.stack[-1]
        if not isinstance(target, PickledObject):
            raise ValueError(f"items or state for {describe(target)}")
        return target

    def reference(self, identity: Any) -> object:
        """Makes a Reference of a persistent id, or returns the class of an old torch module."""
        if isinstance(identity, tuple) and identity[:1] == ("module",) and len(identity) > 1:
            return identity[1]  # torch before 1.6: a class, beside its source code
        self.references.append(Reference(identity))
        return self.references[-1]

    def call(self, maker: Any, args: Any) -> PickledObject:
        """Records a call.

        Raises: WeightsError: no weight file needs it.
        """
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


def _make_object(maker: object, args: object) -> PickledObject:
    """Makes an instance of any class without its state, as modules are stored."""
    if not isinstance(maker, Name):
        raise ValueError(f"an object of {describe(maker)}")
    return PickledObject(maker, args)


def _make_pairs(values: list[Any]) -> list[tuple[object, object]]:
    """Groups a flat list into keys and values."""
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2]))


def _remedy(path: Path) -> str:
    """Returns the code that saves only the arrays of a trusted file."""
    if path.suffix.lower().startswith(".pd"):
        return "paddle.save(model.state_dict(), 'clean.pdparams')"
    return "torch.save({k: v for k, v in model.state_dict().items()}, 'clean.pt')"


def _make_name(module: object, name: object) -> Name:
    """Makes a Name of two values of the file."""
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a name that is not text")
    return Name(module, name)


_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
# Operations that push a value, built from their argument (arg) and from values that they pop.
_PUSHING: dict[str, Callable[[_Machine, Any], object]] = {
    "NONE": lambda m, arg: None,
    "NEWTRUE": lambda m, arg: True,
    "NEWFALSE": lambda m, arg: False,
    "MARK": lambda m, arg: m.marker,
    "DUP": lambda m, arg: m.stack[-1],
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, arg: m.memo[arg]),
    "EMPTY_LIST": lambda m, arg: [],
    "LIST": lambda m, arg: m.pop_to_mark(),
    "EMPTY_DICT": lambda m, arg: PickledObject(_DICT),
    "DICT": lambda m, arg: PickledObject(_DICT, items=_make_pairs(m.pop_to_mark())),
    "EMPTY_SET": lambda m, arg: PickledObject(_SET),
    "FROZENSET": lambda m, arg: PickledObject(_SET, args=(m.pop_to_mark(),)),
    "EMPTY_TUPLE": lambda m, arg: (),
    "TUPLE": lambda m, arg: tuple(m.pop_to_mark()),
    "TUPLE1": lambda m, arg: m.pop(1),
    "TUPLE2": lambda m, arg: m.pop(2),
    "TUPLE3": lambda m, arg: m.pop(3),
    "GLOBAL": lambda m, arg: _make_name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda m, arg: _make_name(*m.pop(2)),
    "BINPERSID": lambda m, arg: m.reference(*m.pop(1)),
    "NEWOBJ": lambda m, arg: _make_object(*m.pop(2)),
    "NEWOBJ_EX": lambda m, arg: _make_object(*m.pop(3)[:2]),
    "REDUCE": lambda m, arg: m.call(*m.pop(2)),
    "INST": lambda m, arg: m.call(_make_name(*arg.split(" ", 1)), tuple(m.pop_to_mark())),
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
    "SETITEMS": lambda m, arg: m.set_items(_make_pairs(m.pop_to_mark())),
    "BUILD": lambda m, arg: m.build(*m.pop(1)),
}

# Keys under which users save a state dict or a model, in the order of preference: where there is an
# average (`ema`), the originals evaluate it and not the model.
WRAPPERS = (
    "ema", "model", "state_dict", "model_state_dict", "net", "module", "weights", "params",
)  # fmt: skip
_MAX_NESTED = 2  # wrappers in wrappers, as in {"ema": {"module": ...}}

# Returns keys and described tensors that a dict, or an object such as a model, holds directly.
_WeightsIn = Callable[[PickledObject], list[tuple[str, object]]]


def find_weights(content: object, path: Path, weights_in: _WeightsIn) -> list[tuple[str, object]]:
    """Finds key and described tensor of every weight in saved content.

    It searches under WRAPPERS one after the other, then in `content` itself; for an object first in
    itself, then under WRAPPERS in its `__dict__` (an object that keeps averages).

    Args: weights_in: returns the weights of one dict or object, Paddle's or torch's.
    Raises: WeightsError: there are none; the message names what the file has instead.
    """
    weights = _search_weights(content, weights_in, _MAX_NESTED)
    if weights:
        return weights
    keys = list(mapping(content) or ())
    content_names = ", ".join(f"'{shown(key)}'" for key in keys[:5]) or describe(content)
    raise WeightsError(
        "no weights in it: expected a state dict, a model, or one of them under "
        f"{', '.join(WRAPPERS)}; found {content_names}",
        code="weights_no_state_dict",
        where=str(path),
    )


def _search_weights(
    content: object, weights_in: _WeightsIn, nested: int
) -> list[tuple[str, object]]:
    """Searches one level of wrappers; `nested` more levels may follow."""
    if not isinstance(content, PickledObject) or entry_count(content) > MAX_ENTRIES:
        return []
    entries = mapping(content)
    weights = weights_in(content)
    if entries is None and weights:
        return weights
    entries = mapping(content.state) or {} if entries is None else entries
    for key in WRAPPERS if nested else ():
        inner_weights = _search_weights(entries.get(key), weights_in, nested - 1)
        if inner_weights:
            return inner_weights
    return weights


# numpy 1 keeps these in numpy.core, numpy 2 in numpy._core.
_RECONSTRUCT = {Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_FROM_BUFFER = {Name(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_TUPLES = (Name("builtins", "tuple"), Name("__builtin__", "tuple"))
_DTYPE = Name("numpy", "dtype")
_ENCODE = Name("_codecs", "encode")
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_PROTOCOL = 4  # of Paddle's own; 5 needs numpy.core.numeric, which moved


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of Paddle's dict by key, without other entries (its name table).

    The dict may be nested in another one under the usual names (`WRAPPERS`).

    Raises:
        WeightsError: no dict of arrays in it, or refused.
        Exception: damaged; see weights.read_arrays.
    """
    content = read_pickle(BytesIO(read_file(path, MAX_BYTES)), path)
    weights = find_weights(content, path, _paddle_arrays)
    return {key: _build_array(value) for key, value in weights if isinstance(value, PickledObject)}


def _paddle_arrays(value: PickledObject) -> list[tuple[str, object]]:
    """Returns the described arrays of a dict."""
    entries = [(key, _unwrap_named(entry)) for key, entry in (mapping(value) or {}).items()]
    return [
        (key, entry)
        for key, entry in entries
        if isinstance(entry, PickledObject) and entry.maker in _RECONSTRUCT | _FROM_BUFFER
    ]


def _unwrap_named(value: object) -> object:
    """Returns the array of a tensor that paddle.save nested: `tuple((name, array))`."""
    if isinstance(value, PickledObject) and value.maker in _TUPLES and len(value.args) == 1:
        pair = value.args[0]
        return pair[1] if isinstance(pair, tuple) and len(pair) == 2 else value
    return value


def _build_array(made: PickledObject) -> np.ndarray:
    """Builds an array like numpy's __setstate__ or _frombuffer; checks sizes."""
    if made.maker in _FROM_BUFFER:
        raw, dtype, shape, order = made.args
        fortran = order == "F"
    else:
        _, shape, dtype, fortran, raw = made.state
    kind, data = _read_dtype(dtype), _read_bytes(raw)
    # Checked before they are multiplied, because products of arbitrarily long integers cost hours.
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("an array without a sensible shape")
    if any(type(side) is not int or not 0 <= side < MAX_SIZE for side in shape):
        raise ValueError("an array whose sides are not whole numbers from 0 on")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and type {kind}")
    return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")


def _read_dtype(value: object) -> np.dtype:
    """Returns the dtype that the file describes, if it is one of numbers."""
    if isinstance(value, PickledObject) and value.maker == _DTYPE:
        code, order = value.args[0], value.state[1]
        if code in _TYPES and order in tuple("<>|="):
            return np.dtype(f"{order}{code}")
        if isinstance(code, str):
            raise NotSupportedError(f"arrays of type {shown(code)} are not supported")
    raise ValueError(f"an array of type {describe(value)}")


def _read_bytes(value: object) -> bytes | bytearray:
    """Decodes bytes that older pickle protocols store as Latin-1 text."""
    if isinstance(value, PickledObject) and value.maker == _ENCODE:
        value = value.args[0]
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return value
    raise ValueError(f"an array of {describe(value)}")


def write_pdparams(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file that `paddle.load` reads as a state dict, with the keys as they are."""
    path.write_bytes(pickle.dumps(dict(arrays), protocol=_PROTOCOL))


_ZIP_START = b"PK\x03\x04"
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# bfloat16, which numpy lacks, stays in uint16 bit patterns, as Paddle keeps it.
_STORAGES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": "<u2",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "<i1",
    "BoolStorage": "<u1", "ByteStorage": "<u1",
}  # fmt: skip
# The storage as which a dtype is written: the last one that is read as this dtype.
_STORAGE_OF = {np.dtype(code).name: kind for kind, code in _STORAGES.items()}
_STORAGE_OF["bool"] = "BoolStorage"
_TENSORS = (Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor"))
_PARAMETERS = (
    Name("torch._utils", "_rebuild_parameter"),
    Name("torch._utils", "_rebuild_parameter_with_state"),
)
_TENSOR_SUBCLASS = Name(
    "torch._tensor", "_rebuild_from_type_v2"
)  # a tensor with attributes of its own
_NEWER_TENSOR = Name(
    "torch._utils", "_rebuild_tensor_v3"
)  # of types such as float8; the type is args[6]


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """Reads the weights of a torch file by the original's keys, as views of its storages.

    A pickle describes tensors as `_rebuild_tensor_v2(storage, offset, size, stride)`, beside the
    numbers of the storages: both in a zip archive, before torch 1.6 one after the other.  The
    arrays are bounds-checked views of the storages, some of which share memory.  Supported are a
    state dict, a pickled model, and either of them in a dict under one of WRAPPERS.  Of a
    model only the tensors are read, module by module as in torch's `state_dict()`.

    Raises:
        WeightsError: nothing of what is supported, or refused.
        Exception: damaged; see weights.read_arrays.
    """
    with open_file(path) as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            return _torch_arrays(path, *_open_legacy(path))
        with zipfile.ZipFile(file) as archive:
            return _torch_arrays(path, *_open_zip(archive, path))


def read_torch_content(path: Path) -> object:
    """Reads what a torch file describes beside its numbers, such as a model's settings.

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
    """Reference to numbers: `('storage', torch.FloatStorage, key, device, count, ...)`."""

    key: str
    dtype: np.dtype
    count: int

    @property
    def size(self) -> int:
        """Returns the size in bytes."""
        return self.count * self.dtype.itemsize

    @staticmethod
    def of(value: object) -> "_Storage":
        """Parses the persistent id of a storage."""
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
    """Opens a file of torch 1.6 or newer: its content, and a function that fetches storages."""
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
    # torch compresses nothing, so the entries of an honest file add up to less than the file.
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
    # Older versions of torch do not write the byte order, which was that of their machine.
    order = f"{top[0]}/byteorder"
    if order in entries and archive.read(order) != b"little":
        raise _big_endian(path)

    def fetch(storage: _Storage) -> bytes:
        return archive.read(entries[f"{top[0]}/data/{storage.key}"])

    return read_pickle(BytesIO(archive.read(f"{top[0]}/data.pkl")), path), fetch


def _open_legacy(path: Path) -> tuple[object, _Fetch]:
    """Opens a file of torch before 1.6: its content, and a function that fetches storages."""
    data = read_file(path, MAX_BYTES)
    stream = BytesIO(data)
    # Five pickles one after the other: magic number, protocol, machine, content, keys of storages.
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
    # The storages follow one after the other, each after its count.
    for key in keys if isinstance(keys, list) else []:
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
    """Builds the error of a file from a big-endian machine."""
    return WeightsError(
        "written on a big-endian machine, which is not supported",
        code="weights_big_endian",
        where=str(path),
    )


def _torch_arrays(path: Path, content: object, fetch: _Fetch) -> dict[str, np.ndarray]:
    """Builds the arrays of all weights in the content."""
    weights = find_weights(content, path, lambda value: _torch_tensors(value, path))
    tensors = _Tensors(path, fetch)
    return {key: tensors.array(shown(key), value) for key, value in weights}


def _torch_tensors(value: PickledObject, path: Path) -> list[tuple[str, object]]:
    """Returns keys and described tensors of a state dict or a model."""
    entries = mapping(value)
    if entries is None and not _is_tensor(value):
        return _walk_modules(value, path)
    return [(key, tensor) for key, tensor in (entries or {}).items() if _is_tensor(tensor)]


def _is_tensor(value: object) -> bool:
    """Returns True if a value describes a tensor."""
    return isinstance(value, PickledObject) and value.maker in (
        *_TENSORS, *_PARAMETERS, _TENSOR_SUBCLASS, _NEWER_TENSOR,
    )  # fmt: skip


def _walk_modules(model: PickledObject, path: Path) -> list[tuple[str, object]]:
    """Collects parameters and buffers of a pickled model, in torch's order.

    Whatever its classes are called, a module keeps its parts in `_parameters`, `_buffers` and
    `_modules`.  Modules may be shared, so a small file can describe an endless tree; hence limits.
    """
    tensors_by_key: list[tuple[str, object]] = []
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
        tensors_by_key += [pair for pairs in tensors for pair in pairs if pair[1] is not None]
        submodules = [
            (f"{name}.", part) for name, part in children if isinstance(part, PickledObject)
        ]
        # Reversed, because the last one is visited next: this keeps torch's order.
        pending += reversed(submodules)
        modules += len(submodules)
        if modules + len(tensors_by_key) > MAX_ENTRIES or len(prefix) > MAX_KEY_LENGTH:
            break
    else:
        return tensors_by_key
    raise WeightsError(
        "refused: its modules contain each other without end",
        code="weights_unsafe",
        where=str(path),
    )


class _Tensors:
    """Builder of arrays from described tensors; fetches each storage once."""

    def __init__(self, path: Path, fetch: _Fetch) -> None:
        self._path = path
        self._fetch = fetch
        self._fetched: dict[str, bytes | memoryview] = {}

    def array(self, key: str, value: object) -> np.ndarray:
        """Builds the array of one described tensor.

        Raises: WeightsError: `value` is not a tensor, or exceeds its storage.
        """
        if isinstance(value, PickledObject) and value.maker in _PARAMETERS:
            value = value.args[0]
        if isinstance(value, PickledObject) and value.maker == _TENSOR_SUBCLASS:
            maker, _, args = value.args[:3]
            value = PickledObject(maker, args) if isinstance(maker, Name) else None
        if isinstance(value, PickledObject) and value.maker == _NEWER_TENSOR:
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
        problem = _find_bounds_problem(storage.count, offset, shape, strides)
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
        """Fetches a storage and checks its size."""
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


def _find_bounds_problem(count: int, offset: object, shape: object, strides: object) -> str:
    """Explains why a view of `count` numbers is invalid; "": it is valid."""
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
    if math.prod(shape) > count:  # strides of 0 would repeat numbers without end
        return f"claims {math.prod(shape)} numbers of a storage of {count}"
    return ""


_TOP = "archive"  # every entry of the archive is in this folder
_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"  # an empty one, as every tensor's hooks are


def write_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous arrays as an OrderedDict of CPU tensors, each with its own storage.

    `torch.load` reads it, also with `weights_only=True`.  The pickle is assembled by hand, since
    Python's own pickler imports the classes that it names.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{_TOP}/data.pkl", _pickle(arrays))
        archive.writestr(f"{_TOP}/byteorder", "little")
        for number, array in enumerate(arrays.values()):
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            archive.writestr(f"{_TOP}/data/{number}", little.tobytes())
        archive.writestr(f"{_TOP}/version", "3\n")


def _pickle(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Writes the pickle of the OrderedDict."""
    parts = [b"\x80\x02", _ORDERED_DICT, b"("]  # PROTO 2, the dict, MARK for SETITEMS
    for number, (key, array) in enumerate(arrays.items()):
        parts += [_text(key), _tensor(str(number), array)]
    return b"".join([*parts, b"u."])  # SETITEMS, STOP


def _tensor(storage: str, array: np.ndarray) -> bytes:
    """Writes torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())."""
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
    """Writes a text (BINUNICODE)."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    """Writes an integer (BININT or LONG1)."""
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _integers(values: Sequence[int]) -> bytes:
    """Writes a tuple of integers."""
    return b"(" + b"".join(map(_integer, values)) + b"t"
