"""Paddle's .pdparams: a pickled dict of numpy arrays, read without running it."""

import math
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np

from ppdist.models.inert_pickle import (
    Made,
    Name,
    NotSupportedError,
    describe,
    mapping,
    read_pickle,
    shown,
)
from ppdist.models.weight_search import find_weights, nothing_found

# numpy 1 keeps these in numpy.core, numpy 2 in numpy._core.
_RECONSTRUCT = {Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
_FROM_BUFFER = {Name(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
_TUPLES = (Name("builtins", "tuple"), Name("__builtin__", "tuple"))
_DTYPE = Name("numpy", "dtype")
_ENCODE = Name("_codecs", "encode")
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_PROTOCOL = 4  # of Paddle's own; 5 needs numpy.core.numeric, which moved


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the dict by key; entries that are none (Paddle's table of names) are left out.

    The dict may be in another one under the usual names (weight_search.WRAPPERS).

    Raises:
        WeightsError: no dict of arrays in it, or refused.
        Exception: damaged; see weight_files.read_arrays.
    """
    content = read_pickle(BytesIO(path.read_bytes()), path)
    found = find_weights(content, _arrays_of)
    if not found:
        raise nothing_found(path, content)
    return {key: _array(value) for key, value in found if isinstance(value, Made)}


def _arrays_of(value: Made) -> list[tuple[str, object]]:
    entries = [(key, _unnamed(entry)) for key, entry in (mapping(value) or {}).items()]
    return [
        (key, entry)
        for key, entry in entries
        if isinstance(entry, Made) and entry.maker in _RECONSTRUCT | _FROM_BUFFER
    ]


def _unnamed(value: object) -> object:
    """The array of a tensor that paddle.save met inside another dict: `tuple((name, array))`."""
    if isinstance(value, Made) and value.maker in _TUPLES and len(value.args) == 1:
        pair = value.args[0]
        return pair[1] if isinstance(pair, tuple) and len(pair) == 2 else value
    return value


def write_pdparams(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes what `paddle.load` reads as a state dict; keys as they are."""
    path.write_bytes(pickle.dumps(dict(arrays), protocol=_PROTOCOL))


def _array(made: Made) -> np.ndarray:
    """The array as numpy's own __setstate__ or _frombuffer would build it, sizes checked first."""
    if made.maker in _FROM_BUFFER:
        raw, dtype, shape, order = made.args
        fortran = order == "F"
    else:
        _, shape, dtype, fortran, raw = made.state
    kind, data = _dtype(dtype), _bytes(raw)
    if not isinstance(shape, tuple) or any(type(side) is not int or side < 0 for side in shape):
        raise ValueError("an array without a sensible shape")
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and type {kind}")
    return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")


def _dtype(value: object) -> np.dtype:
    if isinstance(value, Made) and value.maker == _DTYPE:
        code, order = value.args[0], value.state[1]
        if code in _TYPES and order in tuple("<>|="):
            return np.dtype(f"{order}{code}")
        if isinstance(code, str):
            raise NotSupportedError(f"arrays of type {shown(code)} are not supported")
    raise ValueError(f"an array of type {describe(value)}")


def _bytes(value: object) -> bytes | bytearray:
    """Bytes, which protocol 2 of Python 3 and all of Python 2 keep in text of one byte a letter."""
    if isinstance(value, Made) and value.maker == _ENCODE:
        value = value.args[0]
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return value
    raise ValueError(f"an array of {describe(value)}")
