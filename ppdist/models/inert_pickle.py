"""Reads a pickle as data: nothing the file names is imported, called or given attributes.

A pickle is a program for a small stack machine.  The usual reader runs it; this one only writes
down what the program would make.  `np.zeros(3)` comes out as `Made(Name("numpy", "zeros"), (3,))`,
and whoever knows what an array looks like there (paddle_file, torch_file) takes it apart.  So there
is no list of forbidden names that could have a gap: no name leads anywhere.  A file that asks for
a call no weight file needs is refused all the same, so that its owner hears of it.

Source of the opcodes: PEP 307, 3154, 574 and the documentation of Python's `pickletools`.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from ppdist.errors import WeightsError

MAX_OPERATIONS = 5_000_000  # a YOLOv5x checkpoint has about 30,000; each one costs up to 200 bytes
_SHOWN_CHARACTERS = 80


class NotSupportedError(ValueError):
    """The file is sound, and its arrays are of a type that cannot be used here."""


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
    """A persistent id: something kept outside the pickle, such as the numbers of a tensor."""

    identity: object


@dataclass(eq=False, slots=True)
class Made:
    """A dict, a set, or an object the file describes; equal to itself alone.

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


def read_pickle(stream: BytesIO, path: Path, references: list[Reference] | None = None) -> object:
    """What one pickle describes, out of Names, Mades, References and plain values.

    Args:
        stream: stands at the start of a pickle, afterwards behind its end.  In memory, because
            only then is a declared length bounded by what is there.
        path: for messages.
        references: gets every Reference the pickle makes.
    Raises:
        WeightsError: the file asks for a call that no weight file needs, or for far too much.
        Exception: damaged; see weight_files.read_arrays.
    """
    machine = _Machine(path)
    content = machine.run(stream)
    if references is not None:
        references.extend(machine.references)
    return content


def mapping(value: object) -> dict[str, object] | None:
    """A dict, or what has entries as one, with those under text keys; None for anything else."""
    if not isinstance(value, Made) or not (value.maker in _MAPPINGS or value.items):
        return None
    pairs = [tuple(pair) for pair in _pairs_of_python2(value) if len(pair) == 2] + value.items
    return {key: item for key, item in pairs if isinstance(key, str)}


def entry_count(value: object) -> int:
    """How many entries `mapping` goes through."""
    return len(value.items) + len(_pairs_of_python2(value)) if isinstance(value, Made) else 0


def _pairs_of_python2(value: Made) -> list[Any]:
    args = value.args if value.maker in _MAPPINGS and isinstance(value.args, tuple) else ()
    return args[0] if args and isinstance(args[0], list) else []


def describe(value: object) -> str:
    """What a value is, for messages; short whatever the file says."""
    if isinstance(value, Made):
        return str(value.maker)
    return str(value) if isinstance(value, Name) else type(value).__name__


class _Machine:
    """The stack machine, with marks as the sentinel `_mark` among the values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._memo: dict[int, object] = {}
        self._mark = object()
        self.references: list[Reference] = []

    def run(self, stream: BytesIO) -> object:
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
                self._stack.append(arg)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, arg)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise ValueError(f"pickle operation {opcode.name}")
        return self._pop()

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is self._mark:
            raise ValueError("a pickle operation lacks its operands")
        return value

    def _pop_to_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not self._mark:
            values.append(value)
        return values[::-1]

    def mark(self, _: object) -> None:
        self._stack.append(self._mark)

    def pop(self, _: object) -> None:
        self._stack.pop()

    def pop_mark(self, _: object) -> None:
        self._pop_to_mark()

    def dup(self, _: object) -> None:
        self._stack.append(self._stack[-1])

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def make_empty_list(self, _: object) -> None:
        self._stack.append([])

    def make_list(self, _: object) -> None:
        self._stack.append(self._pop_to_mark())

    def make_empty_dict(self, _: object) -> None:
        self._stack.append(Made(_DICT))

    def make_dict(self, _: object) -> None:
        self._stack.append(Made(_DICT, items=_pairs(self._pop_to_mark())))

    def make_empty_set(self, _: object) -> None:
        self._stack.append(Made(_SET))

    def make_frozen_set(self, _: object) -> None:
        self._stack.append(Made(_SET, args=(self._pop_to_mark(),)))

    def make_tuple(self, _: object) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def make_tuple1(self, _: object) -> None:
        self._stack.append((self._pop(),))

    def make_tuple2(self, _: object) -> None:
        second, first = self._pop(), self._pop()
        self._stack.append((first, second))

    def make_tuple3(self, _: object) -> None:
        third, second, first = self._pop(), self._pop(), self._pop()
        self._stack.append((first, second, third))

    def append(self, _: object) -> None:
        self._extend([self._pop()])

    def appends(self, _: object) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        # An object that is a list (or set) besides, such as a deque: nobody needs what is in it.
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Made):
            raise ValueError(f"entries for {describe(target)}")

    def set_item(self, _: object) -> None:
        value, key = self._pop(), self._pop()
        self._target().items.append((key, value))

    def set_items(self, _: object) -> None:
        pairs = _pairs(self._pop_to_mark())
        self._target().items.extend(pairs)

    def build(self, _: object) -> None:
        state = self._pop()
        self._target().state = state

    def _target(self) -> Made:
        """Only what the file made itself can be changed, never a name it mentions."""
        target = self._stack[-1]
        if not isinstance(target, Made):
            raise ValueError(f"items or state for {describe(target)}")
        return target

    def named(self, arg: str) -> None:
        self._stack.append(_name(arg))

    def stack_named(self, _: object) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not text")
        self._stack.append(Name(module, name))

    def reference(self, _: object) -> None:
        identity = self._pop()
        if isinstance(identity, tuple) and identity[:1] == ("module",) and len(identity) > 1:
            self._stack.append(identity[1])  # torch before 1.6: a class, beside its source code
        else:
            self.references.append(Reference(identity))
            self._stack.append(self.references[-1])

    def new_object(self, _: object) -> None:
        args, maker = self._pop(), self._pop()
        self._describe_object(maker, args)

    def new_object_ex(self, _: object) -> None:
        _, args, maker = self._pop(), self._pop(), self._pop()
        self._describe_object(maker, args)

    def _describe_object(self, maker: object, args: object) -> None:
        # An instance of any class, as yet without its state: how modules are stored.
        if not isinstance(maker, Name):
            raise ValueError(f"an object of {describe(maker)}")
        self._stack.append(Made(maker, args))

    def reduce(self, _: object) -> None:
        args, maker = self._pop(), self._pop()
        self._describe_call(maker, args)

    def instance(self, arg: str) -> None:
        self._describe_call(_name(arg), tuple(self._pop_to_mark()))

    def make_object(self, _: object) -> None:
        maker, *args = self._pop_to_mark()
        self._describe_call(maker, tuple(args))

    def _describe_call(self, maker: Any, args: Any) -> None:
        if not isinstance(maker, Name) or maker not in _CALLS:
            raise WeightsError(
                f"refused: it asks to run {describe(maker)}, and a weight file needs arrays only",
                code="weights_unsafe",
                where=str(self._path),
                fix=(
                    "do not use this file unless you trust it; if you do, load it where it was "
                    f"made and keep its arrays alone: {_remedy(self._path)}"
                ),
            )
        if maker in _RECONSTRUCTORS and isinstance(args[0], Name):  # objects in protocols 0 and 1
            maker, args = args[0], ()
        self._stack.append(Made(maker, args))


def _pairs(values: list[Any]) -> list[tuple[object, object]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2]))


def _remedy(path: Path) -> str:
    if path.suffix.lower().startswith(".pd"):
        return "paddle.save(model.state_dict(), 'clean.pdparams')"
    return "torch.save({k: v for k, v in model.state_dict().items()}, 'clean.pt')"


def _name(arg: str) -> Name:
    module, _, name = arg.partition(" ")
    return Name(module, name)


_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_CONSTANTS: dict[str, object] = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark, "POP": _Machine.pop, "POP_MARK": _Machine.pop_mark, "DUP": _Machine.dup,
    "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "GET": _Machine.get, "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
    "EMPTY_LIST": _Machine.make_empty_list, "LIST": _Machine.make_list,
    "APPEND": _Machine.append, "APPENDS": _Machine.appends, "ADDITEMS": _Machine.appends,
    "EMPTY_DICT": _Machine.make_empty_dict, "DICT": _Machine.make_dict,
    "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items,
    "EMPTY_SET": _Machine.make_empty_set, "FROZENSET": _Machine.make_frozen_set,
    "TUPLE": _Machine.make_tuple, "TUPLE1": _Machine.make_tuple1, "TUPLE2": _Machine.make_tuple2,
    "TUPLE3": _Machine.make_tuple3,
    "GLOBAL": _Machine.named, "STACK_GLOBAL": _Machine.stack_named,
    "BINPERSID": _Machine.reference,
    "NEWOBJ": _Machine.new_object, "NEWOBJ_EX": _Machine.new_object_ex,
    "REDUCE": _Machine.reduce, "INST": _Machine.instance, "OBJ": _Machine.make_object,
    "BUILD": _Machine.build,
}  # fmt: skip
