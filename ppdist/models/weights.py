"""Weights into a model and out of it; runs no code.

    read_arrays, write_arrays       a file or checkpoint <-> arrays by key
    read_notes                      the texts beside them (models/model_card.py)
    load_weights                    a file into a model, and what became of its entries
    arrays_of, official_arrays_of   a model to arrays: our keys, the original's keys

.pdparams, .pdema   Paddle's pickled dict (paddle.load would execute whatever the file says)
.pt, .pth, .ckpt    what torch.save writes: a state dict, or a checkpoint with a pickled model
.safetensors        as it is
.npz                as it is; entries that are not numeric are left out
a directory         one of our checkpoints: its averaged weights, else its raw ones (read only);
                    an output_dir: its best checkpoint, else its last

Entries have our keys or the original implementation's.
"""

import json
import math
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import safetensors
from paddle import nn
from safetensors.numpy import save_file

from ppdist.common.class_names import classes_differ, match_classes, tell_apart
from ppdist.common.errors import WeightsError
from ppdist.common.files import digest_of_file, draft_of, make_parent, open_file, read_file
from ppdist.common.manifest import MANIFEST, MAX_BYTES, checked_files, follow_pointer
from ppdist.models.base import ImageModel, KeyTable
from ppdist.models.unpickle import (
    MAX_ENTRIES,
    MAX_KEY_LENGTH,
    NotSupportedError,
    read_pdparams,
    read_torch,
    shown,
    write_pdparams,
    write_torch,
)
from ppdist.models.zoo import local_weights, similar_names

_T = TypeVar("_T")


def require_there(path: Path) -> None:
    """Checks that a path exists.

    Raises: WeightsError: there is no such file or folder.
    """
    if not path.exists():
        raise WeightsError(
            "no such weight file or checkpoint directory",
            code="weights_not_found",
            where=str(path),
            fix=similar_names(path),
        )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a weight file or a checkpoint directory by key, as stored.

    bfloat16, which numpy lacks, is returned as uint16 bit patterns; see `as_numbers`.

    Raises: WeightsError: no such file, of an unknown kind, damaged, refused, or without arrays.
    """
    require_there(path)
    if path.is_dir():
        return through_links(checkpoint_of(path), _read_folder)
    require_known_ending(path)
    ending = path.suffix.lower()
    reader = _READERS[ending]

    def read() -> dict[str, np.ndarray]:
        _refuse_known_mistakes(path, ending)
        return reader(path)

    return _read_or_damaged(path, read)


def require_known_ending(path: Path) -> None:
    """Checks that `path` is a folder, or ends as one of the readable weight formats.

    Raises: WeightsError `weights_format`: neither.
    """
    ending = path.suffix.lower()
    if ending not in _READERS and not path.is_dir():
        raise WeightsError(
            f"cannot read weights from {ending or 'a file without an ending'}; expected "
            f"{', '.join(_READERS)} or a checkpoint directory",
            code="weights_format",
            where=str(path),
        )


def _read_or_damaged(
    path: Path, read: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Calls a reader of a weight file; failures become a WeightsError."""
    try:
        arrays = read()
    except WeightsError:
        raise
    except NotSupportedError as error:
        raise WeightsError(
            str(error),
            code="weights_type_unsupported",
            where=str(path),
            fix="convert them to float32",
        ) from error
    # Parsers of zip, JSON, numpy and pickle have no list of the errors that they raise.
    except Exception as error:
        raise WeightsError(
            f"damaged or not a {path.suffix.lower()} file: {_describe_error(error)}",
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


_DOWNLOAD = "the download went wrong: fetch the file again, and inspect it before you use it"
# Files that users give by mistake: their first bytes, the endings that may begin so, a description.
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


def _refuse_known_mistakes(path: Path, ending: str) -> None:
    """Refuses files whose first bytes show that they are of another kind."""
    try:
        with open_file(path) as file:
            start = file.read(32)
    except OSError as error:
        raise WeightsError(
            f"cannot be read: {error.strerror or error}", code="file_unreadable", where=str(path)
        ) from error
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


def _describe_error(error: Exception) -> str:
    """Returns a parser's message, short and without control characters."""
    try:
        return ascii(f"{type(error).__name__}: {error}")[1:-1][:200]
    except RecursionError:  # quoting something nested too deeply
        return type(error).__name__


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Converts bfloat16 bit patterns (uint16) to float32; returns other arrays as they are."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def checkpoint_of(path: Path) -> Path:
    """Returns the checkpoint that a path means.

    For an output_dir, or its folder of checkpoints, this is the best checkpoint, else the last,
    else the newest; other paths are returned as they are.
    """
    if not path.is_dir() or (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        steps = sorted((entry.name for entry in folder.glob("step-*")), reverse=True)
        # A file system without links has neither `best` nor `last`.
        for name in ("best", "last", *steps):
            checkpoint = follow_pointer(folder / name)
            if (checkpoint / MANIFEST).exists():
                return checkpoint
    return path


def digest_of_weights(path: Path) -> str:
    """Computes a fingerprint of the weights that a path means."""
    weights = checkpoint_of(path)
    # The manifest holds the checksums of all files.
    return digest_of_file(weights / MANIFEST if weights.is_dir() else weights)


def through_links(path: Path, read: Callable[[Path], _T]) -> _T:
    """Reads a checkpoint in its real folder; reads again if a link moved meanwhile."""
    while True:
        folder = path.resolve()
        try:
            return read(folder)
        except WeightsError:
            if path.resolve() == folder:
                raise


def _read_folder(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a checkpoint: the averaged weights, else the raw ones."""
    if not (path / MANIFEST).exists():
        raise WeightsError(
            "not a checkpoint: it has no manifest.json, nor checkpoints/ with any",
            code="not_a_checkpoint",
            where=str(path),
            fix=(
                "give the output_dir of a run, a directory such as "
                "output/NAME/checkpoints/best, or a weight file"
            ),
        )
    contents = checked_files(path, ("ema.safetensors", "model.safetensors"))
    if not contents:
        raise WeightsError(
            "damaged checkpoint: manifest.json names no weights",
            code="checkpoint_damaged",
            where=str(path),
        )
    ((name, content),) = contents.items()
    return _read_or_damaged(path / name, lambda: _parse_safetensors(content, path / name))


_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1", "U16": "<u2", "U32": "<u4",
    "U64": "<u8",
}  # fmt: skip


_MAX_HEADER_BYTES = 1 << 23  # bytes of a safetensors file before its numbers; a YOLOv5x has 150 KB


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a safetensors file."""
    return _parse_safetensors(read_file(path, MAX_BYTES), path)


def _parse_safetensors(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """Parses the content of a safetensors file.

    Args: path: the file that holds the content, for messages.
    """
    # Bounded first: a million tensors without numbers took 50 s and 1.3 GB.
    length = int.from_bytes(content[:8], "little")
    if length > _MAX_HEADER_BYTES or len(json.loads(content[8 : 8 + length])) > MAX_ENTRIES + 1:
        raise WeightsError(
            f"refused: a header of {length} bytes, expected at most {_MAX_HEADER_BYTES} and "
            f"{MAX_ENTRIES} entries",
            code="weights_unsafe",
            where=str(path),
        )
    # safetensors.numpy.load_file knows no bfloat16; deserialize has checked header and bounds.
    arrays = {}
    for key, entry in safetensors.deserialize(content):
        if entry["dtype"] not in _SAFETENSORS:
            raise NotSupportedError(
                f"{shown(key)}: numbers of type {entry['dtype']} are not supported"
            )
        data = np.frombuffer(entry["data"], _SAFETENSORS[entry["dtype"]])
        arrays[key] = data.reshape(entry["shape"])
    return arrays


_FREE_INFLATION = 1 << 30  # bytes an .npz may hold beyond _INFLATION times its size
_INFLATION = 4  # trained weights compress by some per cent


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Reads an .npz without pickles, within bounds.

    np.load would allocate whatever size an entry claims to have.
    """
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
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
        entries_by_key = {
            info.filename.removesuffix(".npy"): _read_npy(archive, info) for info in entries
        }
        arrays = {key: array for key, array in entries_by_key.items() if array is not None}
        if not arrays:
            inside = ", ".join(shown(name) for name in archive.namelist()[:5]) or "nothing"
            raise WeightsError(
                f"expected arrays of numbers; found {inside}",
                code="weights_not_arrays",
                where=str(path),
            )
        return arrays


def _read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray | None:
    """Reads one array of an .npz; None: it is not numeric, such as a note beside the weights."""
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


_READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    ".pdparams": read_pdparams,
    ".pdema": read_pdparams,
    ".pt": read_torch,
    ".pth": read_torch,
    ".ckpt": read_torch,
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
}


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], notes: Mapping[str, str] | None = None
) -> None:
    """Writes a weight file, completely or not at all; its ending names the kind.

    Args: notes: texts for `read_notes`, by names that no array has; .pdparams, .pt and .pth have no
        place for any.
    Raises: WeightsError: an unknown ending, or the file cannot be written.
    """
    check_writable(path)
    writer = _WRITERS[path.suffix.lower()]
    draft = draft_of(path)
    in_order = {key: np.asarray(value, order="C") for key, value in arrays.items()}
    try:
        writer(draft, in_order, notes or {})
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise WeightsError(
            f"cannot be written: {error}", code="file_unwritable", where=str(path)
        ) from error


def check_writable(path: Path) -> None:
    """Checks the ending of a file that `write_arrays` will write, and makes its folder.

    Raises: WeightsError: it does not know the ending; UserError: the folder cannot be made.
    """
    if path.suffix.lower() not in _WRITERS:
        raise WeightsError(
            f"cannot write this ending; expected {', '.join(_WRITERS)}",
            code="weights_format",
            where=str(path),
        )
    make_parent(path)


def check_arrays(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Reads a file that was just written, and compares it with its arrays.

    Raises: WeightsError: they differ.
    """
    reread = read_arrays(path)
    wrong = [key for key in expected if key not in reread
             or reread[key].shape != expected[key].shape
             or reread[key].tobytes() != expected[key].tobytes()]  # fmt: skip
    if wrong or len(reread) != len(expected):
        raise WeightsError(
            f"reads back differently from what was written: {wrong[:5]}",
            code="weights_written_wrong",
            where=str(path),
            fix="do not use it",
        )


_Notes = Mapping[str, str]


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray], notes: _Notes) -> None:
    """Writes arrays and notes as an .npz."""
    texts = {key: np.array(text) for key, text in notes.items()}
    with path.open("wb") as file:  # np.savez would add an ending to the draft's name
        np.savez(file, **arrays, **texts)  # type: ignore[arg-type]


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], notes: _Notes) -> None:
    """Writes arrays, with the notes in the header."""
    save_file(dict(arrays), path, dict(notes) or None)


_WRITERS: dict[str, Callable[[Path, Mapping[str, np.ndarray], _Notes], None]] = {
    ".pdparams": lambda path, arrays, _: write_pdparams(path, arrays),
    ".pt": lambda path, arrays, _: write_torch(path, arrays),
    ".pth": lambda path, arrays, _: write_torch(path, arrays),
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}


def read_notes(path: Path) -> dict[str, str]:
    """Reads the texts that `write_arrays` put into a file beside its arrays, by name.

    Kinds of files without notes give none.
    Raises: WeightsError: damaged, or refused.
    """
    reader = {".safetensors": _safetensors_notes, ".npz": _npz_notes}.get(path.suffix.lower())
    try:
        return {} if reader is None else reader(path)
    except Exception as error:  # as in read_arrays
        raise WeightsError(
            f"damaged or not a {path.suffix} file: {_describe_error(error)}",
            code="weights_damaged",
            where=str(path),
        ) from error


def _safetensors_notes(path: Path) -> dict[str, str]:
    """Reads the texts in the header of a safetensors file."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes, expected at most {_MAX_HEADER_BYTES}")
        notes = json.loads(file.read(length)).get("__metadata__", {})
    return {key: text for key, text in notes.items() if isinstance(text, str)}


def _npz_notes(path: Path) -> dict[str, str]:
    """Reads the scalar text entries of an .npz."""
    notes = {}
    with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy") and info.file_size <= _MAX_HEADER_BYTES:
                with archive.open(info) as file:
                    if np.lib.format.read_magic(file) != (1, 0):
                        continue
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                    if dtype.kind == "U" and shape == ():
                        data = file.read(dtype.itemsize)
                        text = str(np.frombuffer(data, dtype)[0])
                        notes[info.filename.removesuffix(".npy")] = text
    return notes


_MAX_SHOWN = 5  # mismatches listed in a message
# Prefixes that torch's DistributedDataParallel and compile put before every key of the model that
# they wrap, and that of a Lightning module's part, which is only tried where nothing else fits.
_WRAPPER_PREFIXES, _LIGHTNING_PREFIX = ("module.", "_orig_mod."), "model."
_BATCHES = (
    "num_batches_tracked"  # torch has this counter in every batch norm; our models do not use it
)


@dataclass(frozen=True)
class LoadReport:
    """Result of loading weights; `str(report)` is the line for the log.

    loaded: model keys whose value comes from the file.
    fresh: model keys that keep their initial value (class layers, or all but the backbone).
    ignored: file keys that no key of the model matches.
    reason: why model keys are fresh; empty if none is.
    prefix: prefix that was stripped from the file's keys.
    copied: parts that the file lacks and that start as copies of others (`ImageModel.init_from`).
    by_name: result of matching classes by name; empty if they were matched by number.
    """

    source: Path
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]
    reason: str
    prefix: str = ""
    copied: tuple[str, ...] = ()
    by_name: str = ""

    def __str__(self) -> str:
        """Writes the line for the log."""
        line = f"weights: {len(self.loaded)} tensors from {self.source}"
        if self.prefix:
            line += f", keys without their {self.prefix!r}"
        if self.copied:
            line += f"; {'; '.join(self.copied)}"
        if self.by_name:
            line += f"; {self.by_name}"
        if self.fresh:
            line += f"; {len(self.fresh)} start fresh: {self.reason}"
        if self.ignored:
            line += f"; {len(self.ignored)} of the file unused ({_abbreviate(self.ignored)})"
        return line


@dataclass(frozen=True)
class ClassNames:
    """Class names of weights and model, by number; (): not known."""

    of_file: tuple[str, ...]
    of_model: tuple[str, ...]

    def tell_apart(self) -> bool:
        """Returns True if the names distinguish all classes, in file and model."""
        return tell_apart(self.of_file) and tell_apart(self.of_model)

    def are_renamed(self, path: Path) -> bool:
        """Returns True if the file has other names for the same classes, in the same order.

        Raises: ConfigError: the file lacks classes of the model, and cannot just have other names
            for them: it has another number of classes, or some of them in another place.
        """
        places = match_classes(self.of_model, self.of_file)
        if not self.tell_apart() or None not in places:
            return False
        is_reordered = any(place not in (None, number) for number, place in enumerate(places))
        if not is_reordered and len(self.of_file) == len(self.of_model):
            return True
        raise classes_differ(
            self.of_model, self.of_file, where=f"{path}", owner="the data",
            fix="use weights that know every class of the data",
        )  # fmt: skip


def load_weights(
    model: ImageModel, path: Path | str, names: ClassNames | None = None
) -> LoadReport:
    """Copies weights into the model.

    Every rank calls it and reads the file itself.

    A name of the zoo is downloaded if needed; see `zoo.local_weights`.  A file may use our keys or
    the original's (`model.official_keys()`), also with the prefix of a wrapper; a run's output_dir
    stands for its best checkpoint, else its last.  If an error is raised, the model is unchanged.
    If only the number of classes differs, the class layers keep their initial values, which the
    report names.  A file with only a backbone (ImageNet, or a detector's for a classifier and the
    reverse) fills the backbone.  Nothing else may be missing or misshapen.

    Args: names: each class takes the rows of the class of the same name, wherever they are in the
        file; the rows of other classes keep their initial values.  None: row c is class c.
    Raises: WeightsError: no such file, not readable, unsafe, or not of this model.
    """
    path = checkpoint_of(local_weights(path))
    arrays = read_arrays(path)
    state = model.state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    official, linear = model.official_keys(), linear_keys(model)
    # All is matched and checked before the first tensor is set, so that an error changes nothing.
    arrays, prefix = _strip_prefixes(_WRAPPER_PREFIXES, arrays)
    matched, ignored = _match(arrays, model, official, linear)
    # The prefix of a Lightning module is a common name of parts, too, so it is stripped last.
    if not matched:
        inner_arrays, inner_prefix = _strip_prefixes(
            _WRAPPER_PREFIXES,
            {key.removeprefix(_LIGHTNING_PREFIX): value for key, value in arrays.items()},
        )
        matched, ignored = _match(inner_arrays, model, official, linear)
        prefix += _LIGHTNING_PREFIX + inner_prefix
    if not matched:
        raise WeightsError(
            f"none of its {len(arrays)} entries belongs to this model; the file has "
            f"{_abbreviate(arrays)}, the model expects {_abbreviate(shapes)}",
            code="weights_of_other_architecture",
            where=str(path),
            fix="give weights of this model (`ppdist verify zoo` lists the published ones), or "
            "choose the model that they are of (`ppdist config list`)",
        )
    _refuse_other_designs(path, ignored, matched, official)
    copied = _init_missing_parts(model, matched, shapes)
    class_mapping = None if names is None else _map_classes(model, names, matched, shapes, linear)
    if class_mapping is not None:
        for key in class_mapping.keys:
            file_rows = as_numbers(matched[key])
            matched[key] = class_mapping.reorder(key, file_rows, state[key].numpy())
    fresh, reason = _find_fresh(model, matched, shapes, linear)
    _require_shapes(path, matched, shapes, fresh)
    loaded = {
        key: _convert(path, key, value, str(state[key].dtype).removeprefix("paddle."))
        for key, value in matched.items()
        if key not in fresh
    }
    for key, value in loaded.items():
        state[key].set_value(np.ascontiguousarray(value).reshape(shapes[key]))
    summary = "" if class_mapping is None else class_mapping.summary
    return LoadReport(path, tuple(loaded), fresh, tuple(ignored), reason, prefix, copied, summary)


def load_all_weights(model: ImageModel, path: Path, names: ClassNames | None = None) -> str:
    """Copies weights into a model that is used without further training.

    Args: names: if some differ, and every class that file and model share has the same number, the
        other classes count as renamed: row c is class c, which is reported.
    Returns: a line about the names of classes; "": there is nothing to report.
    Raises: WeightsError: also where a layer would keep its random initial values, or start as a
        copy of another.  ConfigError: see `ClassNames.are_renamed`.
    """
    renamed = names is not None and names.are_renamed(path)
    report = load_weights(model, path, None if renamed else names)
    if report.copied:
        raise WeightsError(
            f"{report.copied[0]}: a start for training, not yet trained to predict without "
            "suppression",
            code="weights_of_other_config",
            where=str(path),
            fix="give the config these weights were trained with",
        )
    # What only training uses cannot change a prediction.
    fresh = [key for key in report.fresh if not key.startswith(model.training_only)]
    if fresh:
        raise WeightsError(
            f"holds no values for {len(fresh)} tensors ({fresh[0]}, ...): {report.reason}",
            code="weights_of_other_config",
            where=str(path),
            fix="give the config these weights were trained with",
        )
    if names is not None and renamed:
        pairs = [pair for pair in zip(names.of_file, names.of_model) if pair[0] != pair[1]]
        return (
            f"{len(pairs)} of {len(names.of_model)} classes have other names in the weights "
            f"({_abbreviate([f'{in_file} for {in_model}' for in_file, in_model in pairs])}): "
            "matched by order"
        )
    return report.by_name


def _strip_prefixes(
    prefixes: tuple[str, ...], arrays: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], str]:
    """Strips the prefixes that all keys have; returns the arrays, and what was stripped."""
    removed = ""
    while arrays:
        prefix = next((p for p in prefixes if all(key.startswith(p) for key in arrays)), "")
        if not prefix:
            break
        arrays = {key.removeprefix(prefix): value for key, value in arrays.items()}
        removed += prefix
    return arrays, removed


def _key_tables(model: ImageModel, official: Mapping[str, str]) -> Iterator[KeyTable]:
    """Yields the names that a file may use, ours first, built on demand."""
    identity = {key: key for key in official}
    tables = [KeyTable(identity, torch=False), KeyTable(official, torch=official != identity)]
    yield from tables
    further = model.key_tables()
    yield from further
    yield from (table.of_backbone() for table in (*tables, *further))
    published = {f"backbone.{key}": name for key, name in model.backbone.original_keys().items()}
    yield KeyTable(published)


def _match(
    arrays: Mapping[str, np.ndarray],
    model: ImageModel,
    official: Mapping[str, str],
    linear: Collection[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns arrays by model key, in our layout, and the leftover file keys.

    A file uses the names of one implementation: the one that finds most of our entries, of several
    the first.

    Args: official: see `ImageModel.official_keys`; linear: see `linear_keys`.
    """
    sources, torch = dict[str, tuple[str, ...]](), False
    for table in _key_tables(model, official):
        candidates = table.sources(arrays)
        if len(candidates) > len(sources):
            sources, torch = candidates, table.torch
        # Complete: no other table can match more, and building them takes time.
        if len(candidates) == len(official):
            break
    matched = {}
    for key, names in sources.items():
        parts = [arrays[name] for name in names]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        array = array.T if torch and key in linear else array
        matched[key] = array[:-1] if torch and key in model.padded_keys else array
    used = {name for names in sources.values() for name in names}
    return matched, [key for key in arrays if key not in used and not key.endswith(_BATCHES)]


def linear_keys(model: ImageModel) -> frozenset[str]:
    """Returns the keys of weights [in, out], which torch keeps as [out, in].

    These are weights of nn.Linear, and those that a layer names in `linear_weights` (an attention
    whose projections are one matrix).  Other matrices, such as embeddings and tables of positions,
    have the same layout in Paddle and torch.
    """
    identities = set()
    for layer in model.sublayers():
        names = (
            ("weight",) if isinstance(layer, nn.Linear) else getattr(layer, "linear_weights", ())
        )
        identities |= {id(getattr(layer, name)) for name in names}
    return frozenset(key for key, value in model.state_dict().items() if id(value) in identities)


def _refuse_other_designs(
    path: Path,
    ignored: list[str],
    matched: Mapping[str, np.ndarray],
    official: Mapping[str, str],
) -> None:
    """Refuses files that fit in part, but belong to a network that computes something else."""
    names = {name for pair in official.items() for name in pair}
    # A bias of a convolution that this model normalises instead: batch norms were folded into the
    # file, or its network is another one.
    for key in ignored:
        norm = key.removesuffix("conv.bias") + "bn."
        if not key.endswith(".conv.bias") or f"{norm}weight" not in names:
            continue
        if any(f"{norm}weight" in (our_key, official[our_key]) for our_key in matched):
            raise WeightsError(
                f"{shown(key)} stands beside a batch norm, and this model's convolution has no "
                "bias there; the file is of another architecture",
                code="weights_of_other_architecture",
                where=str(path),
            )
        raise WeightsError(
            f"its batch norms are folded into the convolutions ({shown(key)} is there, "
            f"{shown(norm)}* is not), as fuse() and exports for inference do, which cannot be "
            "undone",
            code="weights_folded",
            where=str(path),
            fix="give the checkpoint from before folding, such as the training's best.pt",
        )
    masks = [key for key in ignored if ".proto." in key]
    if masks and not all(key.startswith("backbone.") for key in matched):
        raise WeightsError(
            f"a segmentation model ({shown(masks[0])}), whose head also predicts masks",
            code="weights_of_segmentation",
            where=str(path),
            fix="give the weights of a detector",
        )


def _init_missing_parts(
    model: ImageModel, matched: dict[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Fills parts that the file lacks with copies of others; returns a line for each."""
    lines = []
    for part, source in model.init_from:
        part_keys = [key for key in shapes if key.startswith(part)]
        pairs = {key: source + key.removeprefix(part) for key in part_keys}
        has_part = any(key in matched for key in part_keys)
        has_source = any(source_key in matched for source_key in pairs.values())
        if has_part or not has_source:
            continue
        matched |= {
            key: matched[source_key] for key, source_key in pairs.items() if source_key in matched
        }
        lines.append(f"the file lacks {part[:-1]}, which starts as a copy of its {source[:-1]}")
    return tuple(lines)


@dataclass(frozen=True)
class _ClassMapping:
    """Mapping of the file's classes to those of the model.

    keys: keys of the class layers; linear: keys of layers whose last axis is that of classes.
    before: see ImageModel.rows_before_classes.
    pairs: class in the file, class in the model.
    """

    keys: tuple[str, ...]
    linear: Collection[str]
    before: int
    names: ClassNames
    pairs: tuple[tuple[int, int], ...]

    @property
    def summary(self) -> str:
        """Describes how many classes keep their rows."""
        class_count = len(self.names.of_model)
        line = f"{len(self.pairs)} of {class_count} classes kept by name"
        targets = {target for _, target in self.pairs}
        fresh = [name for c, name in enumerate(self.names.of_model) if c not in targets]
        if fresh:
            return f"{line}, fresh: {_abbreviate(fresh)}"
        return f"{line}, in another order" if len(self.names.of_file) == class_count else line

    def reorder(self, key: str, file_rows: np.ndarray, model_rows: np.ndarray) -> np.ndarray:
        """Returns a class layer's entry with the file's rows for matching names, else
        `model_rows`.
        """
        classes_last = key in self.linear
        file_rows, mixed = (
            file_rows.T if classes_last else file_rows,
            (model_rows.T if classes_last else model_rows).copy(),
        )
        counts = len(self.names.of_file), len(self.names.of_model)
        # Groups of rows, one for each anchor: rows before the classes, then one row per class.
        file_G, mixed_G = (
            rows.reshape(-1, self.before + count, *rows.shape[1:])
            for rows, count in zip((file_rows, mixed), counts)
        )
        mixed_G[:, : self.before] = file_G[:, : self.before]
        for source, target in self.pairs:
            mixed_G[:, self.before + target] = file_G[:, self.before + source]
        return mixed.T if classes_last else mixed


def _map_classes(
    model: ImageModel,
    names: ClassNames,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    linear: Collection[str],
) -> _ClassMapping | None:
    """Maps the file's classes to those of the model by name.

    It returns None where names do not help: they are not known, not those of the class layers, or
    the same in the same order; or no name agrees and the number of classes differs, in which case
    the class layers stay fresh anyway.
    """
    in_file, in_model = names.of_file, names.of_model
    places = match_classes(in_model, in_file)
    if (
        not names.tell_apart()
        or len(in_model) != model.num_classes
        or places == [*range(len(in_file))]
    ):
        return None
    pairs = tuple((place, number) for number, place in enumerate(places) if place is not None)
    keys = tuple(key for key in matched if key.startswith(model.class_layers))
    of_classes_alone = model.rows_before_classes == 0
    if not keys or (not pairs and len(in_file) != len(in_model) and of_classes_alone):
        return None
    mapping = _ClassMapping(keys, linear, model.rows_before_classes, names, pairs)
    for key in keys:
        file_shape, model_shape = (
            _classes_first(shape, key in linear) for shape in (matched[key].shape, shapes[key])
        )
        groups, remainder = divmod(model_shape[0], mapping.before + len(in_model))
        if remainder or file_shape != (groups * (mapping.before + len(in_file)), *model_shape[1:]):
            return None
    return mapping


def _classes_first(shape: tuple[int, ...], linear: bool) -> tuple[int, ...]:
    """Returns the shape with the axis of classes first, for linear layers, too."""
    return shape[::-1] if linear else shape


def _find_fresh(
    model: ImageModel,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    linear: Collection[str],
) -> tuple[tuple[str, ...], str]:
    """Returns the model keys that may keep their initial values, and the reason."""
    missing = [key for key in shapes if key not in matched]
    if _is_backbone_alone(matched, missing):
        absent = sorted({_stage_of(key) for key in missing if key.startswith("backbone.")})
        parts = ["the file holds only a backbone", *(f"without {part}" for part in absent)]
        return tuple(missing), ", ".join(parts)
    fresh, reasons = [], list[str]()
    for key in filter(lambda matched_key: matched_key.startswith(model.class_layers), matched):
        file_shape, model_shape = (
            _classes_first(shape, key in linear) for shape in (matched[key].shape, shapes[key])
        )
        if (
            len(file_shape) == len(model_shape)
            and file_shape[0] != model_shape[0]
            and file_shape[1:] == model_shape[1:]
        ):
            fresh.append(key)
            reasons = reasons or [_class_reason(model, file_shape[0], model_shape[0])]
    training_only = [key for key in shapes if key.startswith(model.training_only)]
    if training_only and not any(key in matched for key in training_only):
        fresh += training_only
        reasons.append("the file lacks what only training uses")
    return tuple(fresh), "; ".join(reasons)


def _is_backbone_alone(matched: Mapping[str, np.ndarray], missing: list[str]) -> bool:
    """Returns True if the file fills complete parts of the backbone, and nothing else."""
    # Parts may be missing as a whole, such as the SPPF that a classifier does not have.
    lacking = [key for key in missing if key.startswith("backbone.")]
    return (
        bool(missing)
        and all(key.startswith("backbone.") for key in matched)
        and len(lacking) < len(matched)
        and not {_stage_of(key) for key in lacking} & {_stage_of(key) for key in matched}
    )


def _stage_of(key: str) -> str:
    """Returns the key up to its second dot, such as `backbone.stem`."""
    return ".".join(key.split(".")[:2])


def _class_reason(model: ImageModel, file_channels: int, model_channels: int) -> str:
    """Explains why a class layer with another number of channels starts fresh."""
    if model_channels == model.num_classes:
        return f"class layers, the file knows {file_channels} classes, the model {model_channels}"
    return (
        f"class layers, they have {file_channels} channels in the file and {model_channels} in the "
        f"model of {model.num_classes} classes"
    )


def _require_shapes(
    path: Path,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    fresh: tuple[str, ...],
) -> None:
    """Refuses entries that are missing or misshapen, and may not start fresh."""
    problems = [
        f"{key}: {list(shape)} in the model, not in the file"
        for key, shape in shapes.items()
        if key not in matched and key not in fresh
    ]
    for key, value in matched.items():
        one_number = value.size == 1 == math.prod(shapes[key])  # shape [1] or []
        if value.shape != shapes[key] and key not in fresh and not one_number:
            problems.append(
                f"{key}: {list(shapes[key])} in the model, {list(value.shape)} in the file"
            )
    if problems:
        more = (
            f"\n  ... and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        )
        raise WeightsError(
            "does not fit this model (check model.size and the rest of model:); "
            f"{len(problems)} of {len(shapes)} entries differ:\n  "
            + "\n  ".join(problems[:_MAX_SHOWN])
            + more,
            code="weights_shape_mismatch",
            where=str(path),
        )


def _convert(path: Path, key: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Converts an array to the dtype in which the model keeps it.

    Raises: WeightsError: the numbers are not weights.
    """
    numbers = as_numbers(value)
    # A single integer may be a constant as Python wrote it (`reg_scale: 4` of D-FINE).
    if dtype.startswith("float") and numbers.dtype.kind != "f" and numbers.size > 1:
        raise WeightsError(
            f"holds {numbers.dtype} numbers, expected floating point",
            code="weights_quantised",
            where=f"{path}: {key}",
            fix="give the model's weights from before quantisation",
        )
    # A float64 beyond float32 becomes infinite, which is reported below.
    with np.errstate(over="ignore"):
        numbers = numbers.astype(dtype)
    not_finite = int((~np.isfinite(numbers)).sum()) if numbers.dtype.kind == "f" else 0
    if not_finite:
        raise WeightsError(
            f"{not_finite} of {numbers.size} values are NaN or infinite",
            code="weights_not_finite",
            where=f"{path}: {key}",
            fix="the training went wrong before it was saved, so give an earlier checkpoint",
        )
    return numbers


def _abbreviate(keys: Collection[str]) -> str:
    """Lists the first three keys, for messages."""
    return ", ".join(map(shown, list(keys)[:3])) + (", ..." if len(keys) > 3 else "") or "nothing"


def arrays_of(model: ImageModel) -> dict[str, np.ndarray]:
    """Returns the model's entries under our keys, in our layout."""
    return {key: value.numpy() for key, value in model.state_dict().items()}


def official_arrays_of(model: ImageModel) -> dict[str, np.ndarray]:
    """Returns the model's entries as the original keeps them.

    They have the original's keys and layout, and for a torch model also the counters (0) that its
    strict loading requires.
    """
    official, linear = model.official_keys(), linear_keys(model)
    torch = any(official_key != key for key, official_key in official.items())
    result = {}
    for key, value in arrays_of(model).items():
        official_key = official[key]
        value = np.pad(value, ((0, 1), (0, 0))) if torch and key in model.padded_keys else value
        result[official_key] = value.T if torch and key in linear else value
        if official_key != key and official_key.endswith(".running_var"):
            result[official_key.replace("running_var", _BATCHES)] = np.zeros([], np.int64)
    return result
