"""Files of weights: what their endings mean, reading and writing them.  No file runs code.

.pdparams, .pdema   Paddle's pickled dict (paddle.load would execute whatever the file says)
.pt, .pth, .ckpt    what torch.save writes: a state dict, or a checkpoint with a pickled model
.safetensors        as it is
.npz                as it is; entries that are no numbers are left out
a directory         one of our checkpoints: its averaged weights, else its raw ones (read only);
                    an output_dir: its best checkpoint, else its last
"""

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from ppdist.errors import WeightsError
from ppdist.files import digest_of_file, make_parent
from ppdist.models.inert_pickle import NotSupportedError, shown
from ppdist.models.paddle_file import read_pdparams, write_pdparams
from ppdist.models.torch_file import MAX_KEY_LENGTH, read_torch
from ppdist.models.torch_writer import write_torch

_MANIFEST = "manifest.json"
_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1", "U16": "<u2", "U32": "<u4",
    "U64": "<u8",
}  # fmt: skip
_DOWNLOAD = "the download went wrong: fetch the file again, and look at it before you use it"
# How files start that people give by mistake, the endings for which that is right, what they are.
_STARTS: tuple[tuple[bytes, tuple[str, ...], str], ...] = (
    (b"version https://git-lfs", (), "a Git LFS pointer instead of the file: run git lfs pull"),
    (b"<!DOCTYPE", (), f"a web page; {_DOWNLOAD}"),
    (b"<!doctype", (), f"a web page; {_DOWNLOAD}"),
    (b"<html", (), f"a web page; {_DOWNLOAD}"),
    (b"<?xml", (), f"an XML page; {_DOWNLOAD}"),
    (b"\x93NUMPY", (), "a single array of np.save; write a dict of arrays with np.savez"),
    (b"\x89HDF", (), "an HDF5 file; save its arrays with np.savez"),
    (b"PK\x03\x04", (".pt", ".pth", ".ckpt", ".npz"),
     "a zip archive as torch.save and np.savez write it; name it .pt or .npz"),
    (b"\x80", (".pt", ".pth", ".ckpt", ".pdparams", ".pdema", ".safetensors"),
     "a pickle as paddle.save and old torch.save write it; name it .pdparams or .pt"),
)  # fmt: skip
_FREE_INFLATION = 1 << 30  # bytes an .npz may hold beyond _INFLATION times its size
_INFLATION = 4  # trained weights compress by some per cent


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a weight file or checkpoint directory, by key, as they are stored.

    bfloat16, which numpy lacks, comes as its uint16 bit patterns; see `as_numbers`.

    Raises: WeightsError: no such file, of an unknown kind, damaged, refused, or without arrays.
    """
    if not path.exists():
        raise WeightsError(
            "no such weight file or checkpoint directory", code="weights_not_found", where=str(path)
        )
    if path.is_dir():
        return _read_checkpoint(checkpoint_of(path))
    ending = path.suffix.lower()
    reader = _READERS.get(ending)
    if reader is None:
        raise WeightsError(
            f"cannot read weights from {ending or 'a file without an ending'}; expected "
            f"{', '.join(_READERS)} or a checkpoint directory",
            code="weights_format",
            where=str(path),
        )
    try:
        _refuse_known_mistakes(path, ending)
        arrays = reader(path)
    except WeightsError:
        raise
    except NotSupportedError as error:
        raise WeightsError(
            str(error),
            code="weights_type_unsupported",
            where=str(path),
            fix="convert them to float32",
        ) from error
    except (
        Exception
    ) as error:  # zip, JSON, numpy and pickle parsers have no list of what they raise
        raise WeightsError(
            f"damaged or not a {ending} file: {_detail(error)}",
            code="weights_damaged",
            where=str(path),
        ) from error
    for key in arrays:
        if len(key) > MAX_KEY_LENGTH or not key.isprintable():
            raise WeightsError(
                f"damaged: an entry is called '{shown(key)}'",
                code="weights_damaged",
                where=str(path),
            )
    return arrays


def _refuse_known_mistakes(path: Path, ending: str) -> None:
    with path.open("rb") as file:
        start = file.read(32)
    if not start:
        raise WeightsError("an empty file", code="weights_damaged", where=str(path))
    for mark, right, meaning in _STARTS:
        if start.startswith(mark) and ending not in right:
            raise WeightsError(
                f"not a {ending} file but {meaning}", code="weights_format", where=str(path)
            )
    if start[8:10] == b'{"' and ending != ".safetensors":
        raise WeightsError(
            f"not a {ending} file but one of safetensors: name it so",
            code="weights_format",
            where=str(path),
        )


def _detail(error: Exception) -> str:
    """What a parser said, short and without control characters; it may quote the file."""
    try:
        return ascii(f"{type(error).__name__}: {error}")[1:-1][:200]
    except RecursionError:  # quoting something nested too deeply
        return type(error).__name__


def check_writable(path: Path) -> None:
    """Makes the folder of a file that `write_arrays` is to write.

    Raises: WeightsError: it does not know the ending; UserError: the folder cannot be made.
    """
    if path.suffix.lower() not in _WRITERS:
        raise WeightsError(
            f"cannot write this ending; expected {', '.join(_WRITERS)}",
            code="weights_format",
            where=str(path),
        )
    make_parent(path)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a weight file of the kind its ending names; it appears whole or not at all.

    Raises: WeightsError: an unknown ending, or the disk refused.
    """
    check_writable(path)
    writer = _WRITERS[path.suffix.lower()]
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        writer(draft, {key: np.asarray(value, order="C") for key, value in arrays.items()})
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WeightsError(
            f"cannot be written: {error}", code="file_unwritable", where=str(path)
        ) from error


def check_arrays(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Reads a file just written.  Raises: WeightsError: it does not hold exactly these arrays."""
    found = read_arrays(path)
    wrong = [key for key in expected if key not in found
             or found[key].shape != expected[key].shape
             or found[key].tobytes() != expected[key].tobytes()]  # fmt: skip
    if wrong or len(found) != len(expected):
        raise WeightsError(
            f"what was written reads differently: {wrong[:5]}",
            code="weights_written_wrong",
            where=str(path),
            fix="do not use it",
        )


def as_numbers(array: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32; everything else as it is."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    # safetensors.numpy.load_file knows no bfloat16; deserialize has checked header and bounds.
    arrays = {}
    for key, entry in safetensors.deserialize(path.read_bytes()):
        if entry["dtype"] not in _SAFETENSORS:
            raise NotSupportedError(
                f"{shown(key)}: numbers of type {entry['dtype']} are not supported"
            )
        data = np.frombuffer(entry["data"], _SAFETENSORS[entry["dtype"]])
        arrays[key] = data.reshape(entry["shape"])
    return arrays


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """As np.load without pickles, which allocates whatever size an entry claims to have."""
    with zipfile.ZipFile(path) as archive:
        entries = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        claimed, size = sum(info.file_size for info in entries), path.stat().st_size
        if sum(info.compress_size for info in entries) > size:
            raise ValueError("its entries claim more bytes than the file has")
        if claimed > _FREE_INFLATION + _INFLATION * size:
            raise WeightsError(
                f"refused: its entries claim to unpack to {claimed} bytes",
                code="weights_unsafe",
                where=str(path),
            )
        found = {info.filename.removesuffix(".npy"): _read_npy(archive, info) for info in entries}
        arrays = {key: array for key, array in found.items() if array is not None}
        if not arrays:
            inside = ", ".join(shown(name) for name in archive.namelist()[:5]) or "nothing"
            raise WeightsError(
                f"expected arrays of numbers; found {inside}",
                code="weights_not_arrays",
                where=str(path),
            )
        return arrays


def _read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray | None:
    """None: not of numbers, such as a note beside the weights."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        if dtype.kind not in "fiub":
            return None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
            raise ValueError(f"{info.filename} has fewer numbers than its header claims")
        data = file.read()
    count = math.prod(shape)
    return np.frombuffer(data, dtype, count).reshape(shape, order="F" if fortran else "C")


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:  # np.savez would add an ending to the draft's name
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    save_file(dict(arrays), path)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path means: of an output_dir, or of its folder of checkpoints, the best
    one, else the last, else the newest; every other path is what it is."""
    if not path.is_dir() or (path / _MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        steps = sorted((each.name for each in folder.glob("step-*")), reverse=True)
        # A file system without links has neither best nor last.
        for name in ("best", "last", *steps):
            if (folder / name / _MANIFEST).exists():
                return folder / name
    return path


def digest_of_weights(path: Path) -> str:
    """A fingerprint of a weight file or of the checkpoint a path means; see `digest_of_file`."""
    weights = checkpoint_of(path)
    # The manifest holds checksums.
    return digest_of_file(weights / _MANIFEST if weights.is_dir() else weights)


def _read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    manifest = path / _MANIFEST
    if not manifest.exists():
        raise WeightsError(
            "not a checkpoint: it has no manifest.json, nor checkpoints/ with any",
            code="not_a_checkpoint",
            where=str(path),
            fix=(
                "give the output_dir of a run, a directory such as "
                "output/NAME/checkpoints/best, or a weight file"
            ),
        )
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        file = path / next(n for n in ("ema.safetensors", "model.safetensors") if n in files)
        expected = files[file.name]["sha256"]
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise WeightsError(
            f"damaged checkpoint: {error!r}", code="checkpoint_damaged", where=str(path)
        ) from error
    if found != expected:
        raise WeightsError(
            "damaged: its SHA-256 is not the one in manifest.json",
            code="checkpoint_damaged",
            where=str(file),
        )
    return read_arrays(file)


_READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".pdparams": read_pdparams,
    ".pdema": read_pdparams,
    ".pt": read_torch,
    ".pth": read_torch,
    ".ckpt": read_torch,
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
}
_WRITERS: dict[str, Callable[[Path, Mapping[str, np.ndarray]], None]] = {
    ".pdparams": write_pdparams,
    ".pt": write_torch,
    ".pth": write_torch,
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}
