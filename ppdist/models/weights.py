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
from ppdist.common.manifest import MANIFEST, MAX_BYTES, checked_files
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
    """Raises: WeightsError: there is no such file or folder."""
    if not path.exists():
        raise WeightsError(
            "no such weight file or checkpoint directory",
            code="weights_not_found",
            where=str(path),
            fix=similar_names(path),
        )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of weights by key, as stored.

    Of a weight file or a checkpoint directory.

    bfloat16, which numpy lacks, comes as its uint16 bit patterns; see `as_numbers`.

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

    return _parsed(path, read)


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


def _parsed(path: Path, read: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Reads a weight file; failures become a WeightsError."""
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
    # Parsers of zip, JSON, numpy and pickle have no list of what they raise.
    except Exception as error:
        raise WeightsError(
            f"damaged or not a {path.suffix.lower()} file: {_detail(error)}",
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


def _refuse_known_mistakes(path: Path, ending: str) -> None:
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


def _detail(error: Exception) -> str:
    """A parser's message, short and without control characters."""
    try:
        return ascii(f"{type(error).__name__}: {error}")[1:-1][:200]
    except RecursionError:  # quoting something nested too deeply
        return type(error).__name__


def as_numbers(array: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32; everything else as it is."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path means.

    Of an output_dir, or of its folder of checkpoints, the best one, else the last, else the newest;
    every other path is what it is.
    """
    if not path.is_dir() or (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        steps = sorted((each.name for each in folder.glob("step-*")), reverse=True)
        # A file system without links has neither best nor last.
        for name in ("best", "last", *steps):
            if (folder / name / MANIFEST).exists():
                return folder / name
    return path


def digest_of_weights(path: Path) -> str:
    """Fingerprint of the weights that a path means."""
    weights = checkpoint_of(path)
    # The manifest holds checksums.
    return digest_of_file(weights / MANIFEST if weights.is_dir() else weights)


def through_links(path: Path, read: Callable[[Path], _T]) -> _T:
    """Reads a checkpoint in its real folder; again if a link moved."""
    while True:
        folder = path.resolve()
        try:
            return read(folder)
        except WeightsError:
            if path.resolve() == folder:
                raise


def _read_folder(path: Path) -> dict[str, np.ndarray]:
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
    found = checked_files(path, ("ema.safetensors", "model.safetensors"))
    if not found:
        raise WeightsError(
            "damaged checkpoint: manifest.json names no weights",
            code="checkpoint_damaged",
            where=str(path),
        )
    ((name, content),) = found.items()
    return _parsed(path / name, lambda: _parse_safetensors(content, path / name))


_SAFETENSORS = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1", "U16": "<u2", "U32": "<u4",
    "U64": "<u8",
}  # fmt: skip


_MOST_HEADER = 1 << 23  # bytes of a safetensors file before its numbers; a YOLOv5x has 150 KB


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    return _parse_safetensors(read_file(path, MAX_BYTES), path)


def _parse_safetensors(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """Args: path: the file that holds the content, for messages."""
    # A million tensors without numbers took 50 s and 1.3 GB.
    length = int.from_bytes(content[:8], "little")
    if length > _MOST_HEADER or len(json.loads(content[8 : 8 + length])) > MAX_ENTRIES + 1:
        raise WeightsError(
            f"refused: a header of {length} bytes, expected at most {_MOST_HEADER} and "
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

    np.load allocates whatever size an entry claims to have.
    """
    with open_file(path) as opened, zipfile.ZipFile(opened) as archive:
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
    """Writes a weight file, whole or not at all.

    Its ending names the kind.

    Args: notes: texts for `read_notes`, by names that no array has; .pdparams, .pt and .pth have no
        place for any.
    Raises: WeightsError: an unknown ending, or the disk refused.
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


def check_arrays(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Compares a file just written with its arrays."""
    found = read_arrays(path)
    wrong = [key for key in expected if key not in found
             or found[key].shape != expected[key].shape
             or found[key].tobytes() != expected[key].tobytes()]  # fmt: skip
    if wrong or len(found) != len(expected):
        raise WeightsError(
            f"reads back differently from what was written: {wrong[:5]}",
            code="weights_written_wrong",
            where=str(path),
            fix="do not use it",
        )


_Notes = Mapping[str, str]


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray], notes: _Notes) -> None:
    texts = {key: np.array(text) for key, text in notes.items()}
    with path.open("wb") as file:  # np.savez would add an ending to the draft's name
        np.savez(file, **arrays, **texts)  # type: ignore[arg-type]


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], notes: _Notes) -> None:
    save_file(dict(arrays), path, dict(notes) or None)


_WRITERS: dict[str, Callable[[Path, Mapping[str, np.ndarray], _Notes], None]] = {
    ".pdparams": lambda path, arrays, _: write_pdparams(path, arrays),
    ".pt": lambda path, arrays, _: write_torch(path, arrays),
    ".pth": lambda path, arrays, _: write_torch(path, arrays),
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}


def read_notes(path: Path) -> dict[str, str]:
    """Texts that `write_arrays` put into a file, by name.

    They stand beside its arrays.

    Other kinds of files have none.
    Raises: WeightsError: damaged, or refused.
    """
    reader = {".safetensors": _safetensors_notes, ".npz": _npz_notes}.get(path.suffix.lower())
    try:
        return {} if reader is None else reader(path)
    except Exception as error:  # as in read_arrays
        raise WeightsError(
            f"damaged or not a {path.suffix} file: {_detail(error)}",
            code="weights_damaged",
            where=str(path),
        ) from error


def _safetensors_notes(path: Path) -> dict[str, str]:
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"a header of {length} bytes, expected at most {_MOST_HEADER}")
        notes = json.loads(file.read(length)).get("__metadata__", {})
    return {key: text for key, text in notes.items() if isinstance(text, str)}


def _npz_notes(path: Path) -> dict[str, str]:
    notes = {}
    with open_file(path) as opened, zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".npy") and info.file_size <= _MOST_HEADER:
                with archive.open(info) as file:
                    if np.lib.format.read_magic(file) != (1, 0):
                        continue
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                    if dtype.kind == "U" and shape == ():
                        data = file.read(dtype.itemsize)
                        text = str(np.frombuffer(data, dtype)[0])
                        notes[info.filename.removesuffix(".npy")] = text
    return notes


_SHOWN = 5  # mismatches listed in a message
# What torch's DistributedDataParallel and compile put before every key of the model they wrap, and
# what a Lightning module calls its part; the latter only counts where nothing else fits.
_WRAPPED, _PART = ("module.", "_orig_mod."), "model."
_BATCHES = "num_batches_tracked"  # torch counts in every batch norm; neither family uses it


@dataclass(frozen=True)
class LoadReport:
    """What became of the entries; `str(report)` is the line for the log.

    loaded: model keys that took their value from the file.
    fresh: model keys that keep their initial value (class layers, or all but the backbone).
    ignored: file keys the model has no place for.
    reason: why something is fresh; empty when nothing is.
    prefix: what was taken away from the start of the file's keys.
    copied: parts that the file lacks and that start as copies of others (`ImageModel.init_from`).
    by_name: what became of the rows of classes, where names decided it.
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
            line += f"; {len(self.ignored)} of the file unused ({_some(self.ignored)})"
        return line


@dataclass(frozen=True)
class ClassNames:
    """Class names of weights and model, by number; (): not known."""

    of_file: tuple[str, ...]
    of_model: tuple[str, ...]

    def tell_apart(self) -> bool:
        """Returns True if they say which class is which, in file and model."""
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

    A name of the zoo is downloaded if needed; see `zoo.local_weights`.
    A file may use our keys or the original's (`model.official_keys()`), also behind the prefix of a
    wrapper; of a run's output_dir its best checkpoint is taken, else its last.  All or nothing: the
    model is untouched when an error is raised.  Where only the number of classes differs, the class
    layers keep their initial values, and are reported; a file with the backbone alone
    (ImageNet, or a detector's for a classifier and the reverse) fills the backbone.  Nothing else
    may be missing or misshapen.

    Args: names: each class takes the rows of the class of its name, wherever that stands in the
        file; the rows of the others keep their initial values.  None: row c is class c.
    Raises: WeightsError: no such file, not readable, unsafe, or not of this model.
    """
    path = checkpoint_of(local_weights(path))
    arrays = read_arrays(path)
    state = model.state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    official, linear = model.official_keys(), linear_keys(model)
    arrays, prefix = _without(_WRAPPED, arrays)
    matched, ignored = _match(arrays, model, official, linear)
    if not matched:
        inner, more = _without(
            _WRAPPED, {key.removeprefix(_PART): value for key, value in arrays.items()}
        )
        matched, ignored = _match(inner, model, official, linear)
        prefix += _PART + more
    if not matched:
        raise WeightsError(
            f"none of its {len(arrays)} entries belongs to this model; the file has "
            f"{_some(arrays)}, the model expects {_some(shapes)}; is it a weight file of another "
            "architecture?",
            code="weights_of_other_architecture",
            where=str(path),
        )
    _refuse_other_designs(path, ignored, matched, official)
    copied = _init_missing_parts(model, matched, shapes)
    by_name = None if names is None else _by_name(model, names, matched, shapes, linear)
    if by_name is not None:
        for key in by_name.keys:
            theirs = as_numbers(matched[key])
            matched[key] = by_name.reordered(key, theirs, state[key].numpy())
    fresh, reason = _fresh(model, matched, shapes, linear)
    _require_shapes(path, matched, shapes, fresh)
    loaded = {
        key: _converted(path, key, value, str(state[key].dtype).removeprefix("paddle."))
        for key, value in matched.items()
        if key not in fresh
    }
    for key, value in loaded.items():
        state[key].set_value(np.ascontiguousarray(value).reshape(shapes[key]))
    told = "" if by_name is None else by_name.told
    return LoadReport(path, tuple(loaded), fresh, tuple(ignored), reason, prefix, copied, told)


def load_all_weights(model: ImageModel, path: Path, names: ClassNames | None = None) -> str:
    """As `load_weights`, for a model that is used as it is.

    It is not trained any further.

    Args: names: if some differ, and every class that both sides have keeps its number, the data are
        taken to have renamed the others: row c is class c, which is reported.
    Returns: a line about the names of classes; "": there is nothing to say.
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
            f"({_some([f'{in_file} for {in_model}' for in_file, in_model in pairs])}): "
            "matched by order"
        )
    return report.by_name


def _without(
    prefixes: tuple[str, ...], arrays: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], str]:
    """Arrays without the prefixes of all their keys."""
    taken = ""
    while arrays:
        prefix = next((p for p in prefixes if all(key.startswith(p) for key in arrays)), "")
        if not prefix:
            break
        arrays = {key.removeprefix(prefix): value for key, value in arrays.items()}
        taken += prefix
    return arrays, taken


def _key_tables(model: ImageModel, official: Mapping[str, str]) -> Iterator[KeyTable]:
    """The names that a file may use, ours first, made on demand."""
    ours = {key: key for key in official}
    tables = [KeyTable(ours, torch=False), KeyTable(official, torch=official != ours)]
    yield from tables
    more = model.key_tables()
    yield from more
    yield from (table.of_backbone() for table in (*tables, *more))
    published = {f"backbone.{key}": name for key, name in model.backbone.original_keys().items()}
    yield KeyTable(published)


def _match(
    arrays: Mapping[str, np.ndarray],
    model: ImageModel,
    official: Mapping[str, str],
    linear: Collection[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Arrays by model key, in our layout, and leftover file keys.

    A file has the names of one implementation: that which finds most of our entries, of equals
    the first.

    Args: official: see `ImageModel.official_keys`; linear: see `linear_keys`.
    """
    sources, torch = dict[str, tuple[str, ...]](), False
    for table in _key_tables(model, official):
        found = table.sources(arrays)
        if len(found) > len(sources):
            sources, torch = found, table.torch
        if len(found) == len(official):
            break
    matched = {}
    for key, names in sources.items():
        parts = [arrays[name] for name in names]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        whole = whole.T if torch and key in linear else whole
        matched[key] = whole[:-1] if torch and key in model.padded_keys else whole
    used = {name for names in sources.values() for name in names}
    return matched, [key for key in arrays if key not in used and not key.endswith(_BATCHES)]


def linear_keys(model: ImageModel) -> frozenset[str]:
    """Keys of weights [in, out], which torch keeps as [out, in].

    They are those of nn.Linear, and what a layer names in `linear_weights` (an attention whose
    projections are one matrix).  Other matrices, such as embeddings and tables of positions, are
    alike in both.
    """
    found = set()
    for layer in model.sublayers():
        own = ("weight",) if isinstance(layer, nn.Linear) else getattr(layer, "linear_weights", ())
        found |= {id(getattr(layer, name)) for name in own}
    return frozenset(key for key, value in model.state_dict().items() if id(value) in found)


def _refuse_other_designs(
    path: Path,
    ignored: list[str],
    matched: Mapping[str, np.ndarray],
    official: Mapping[str, str],
) -> None:
    """Files that fit in part, and would compute something else."""
    names = {name for pair in official.items() for name in pair}
    for key in ignored:
        norm = key.removesuffix("conv.bias") + "bn."
        if not key.endswith(".conv.bias") or f"{norm}weight" not in names:
            continue
        if any(f"{norm}weight" in (ours, official[ours]) for ours in matched):
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
    """Starts parts that the file lacks as copies of others."""
    said = []
    for part, source in model.init_from:
        own = [key for key in shapes if key.startswith(part)]
        pairs = {key: source + key.removeprefix(part) for key in own}
        if any(key in matched for key in own) or not any(
            each in matched for each in pairs.values()
        ):
            continue
        matched |= {key: matched[each] for key, each in pairs.items() if each in matched}
        said.append(f"the file lacks {part[:-1]}, which starts as a copy of its {source[:-1]}")
    return tuple(said)


@dataclass(frozen=True)
class _ByName:
    """Which class of the file becomes which of the model.

    keys: of the class layers; linear: of those whose classes are the last axis.
    before: see ImageModel.rows_before_classes.
    pairs: class in the file, class in the model.
    """

    keys: tuple[str, ...]
    linear: Collection[str]
    before: int
    names: ClassNames
    pairs: tuple[tuple[int, int], ...]

    @property
    def told(self) -> str:
        wanted = len(self.names.of_model)
        line = f"{len(self.pairs)} of {wanted} classes kept by name"
        kept = {ours for _, ours in self.pairs}
        fresh = [name for c, name in enumerate(self.names.of_model) if c not in kept]
        if fresh:
            return f"{line}, fresh: {_some(fresh)}"
        return f"{line}, in another order" if len(self.names.of_file) == wanted else line

    def reordered(self, key: str, theirs: np.ndarray, ours: np.ndarray) -> np.ndarray:
        """A class layer's entry: file rows for matching names, else `ours`."""
        swap = key in self.linear
        theirs, mixed = theirs.T if swap else theirs, (ours.T if swap else ours).copy()
        counts = len(self.names.of_file), len(self.names.of_model)
        theirs_G, mixed_G = (
            rows.reshape(-1, self.before + count, *rows.shape[1:])
            for rows, count in zip((theirs, mixed), counts)
        )
        mixed_G[:, : self.before] = theirs_G[:, : self.before]
        for source, target in self.pairs:
            mixed_G[:, self.before + target] = theirs_G[:, self.before + source]
        return mixed.T if swap else mixed


def _by_name(
    model: ImageModel,
    names: ClassNames,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    linear: Collection[str],
) -> _ByName | None:
    """Which class of the file becomes which of the model.

    None where names do not help: not known, not those of the class layers, the same in the same
    order; or none agrees and the file has another number, which leaves layers of classes fresh.
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
    found = _ByName(keys, linear, model.rows_before_classes, names, pairs)
    for key in keys:
        there, here = (
            _classes_first(shape, key in linear) for shape in (matched[key].shape, shapes[key])
        )
        groups, odd = divmod(here[0], found.before + len(in_model))
        if odd or there != (groups * (found.before + len(in_file)), *here[1:]):
            return None
    return found


def _classes_first(shape: tuple[int, ...], linear: bool) -> tuple[int, ...]:
    """Shape with the classes first, for linear layers, too."""
    return shape[::-1] if linear else shape


def _fresh(
    model: ImageModel,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    linear: Collection[str],
) -> tuple[tuple[str, ...], str]:
    """The model keys that may keep their initial values, and why."""
    missing = [key for key in shapes if key not in matched]
    if _is_backbone_alone(matched, missing):
        absent = sorted({_part(key) for key in missing if key.startswith("backbone.")})
        parts = ["the file holds only a backbone", *(f"without {part}" for part in absent)]
        return tuple(missing), ", ".join(parts)
    fresh, reasons = [], list[str]()
    for key in filter(lambda each: each.startswith(model.class_layers), matched):
        found, wanted = (
            _classes_first(shape, key in linear) for shape in (matched[key].shape, shapes[key])
        )
        if len(found) == len(wanted) and found[0] != wanted[0] and found[1:] == wanted[1:]:
            fresh.append(key)
            reasons = reasons or [_class_reason(model, found[0], wanted[0])]
    training_only = [key for key in shapes if key.startswith(model.training_only)]
    if training_only and not any(key in matched for key in training_only):
        fresh += training_only
        reasons.append("the file lacks what only training uses")
    return tuple(fresh), "; ".join(reasons)


def _is_backbone_alone(matched: Mapping[str, np.ndarray], missing: list[str]) -> bool:
    """Whether the file fills whole parts of the backbone, and nothing else."""
    lacking = [key for key in missing if key.startswith("backbone.")]
    return (
        bool(missing)
        and all(key.startswith("backbone.") for key in matched)
        and len(lacking) < len(matched)
        and not {_part(key) for key in lacking} & {_part(key) for key in matched}
    )


def _part(key: str) -> str:
    """What stands before the second dot, such as `backbone.stem`."""
    return ".".join(key.split(".")[:2])


def _class_reason(model: ImageModel, found: int, wanted: int) -> str:
    """Why a class layer of other channels starts fresh."""
    if wanted == model.num_classes:
        return f"class layers, the file knows {found} classes, the model {wanted}"
    return (
        f"class layers, they have {found} channels in the file and {wanted} in the model of "
        f"{model.num_classes} classes"
    )


def _require_shapes(
    path: Path,
    matched: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    fresh: tuple[str, ...],
) -> None:
    """Entries that are missing or misshapen, and may not start fresh."""
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
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(
            "does not fit this model (check model.size and the rest of model:); "
            f"{len(problems)} of {len(shapes)} entries differ:\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more,
            code="weights_shape_mismatch",
            where=str(path),
        )


def _converted(path: Path, key: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers as the model keeps them.

    Raises: WeightsError: they are not weights.
    """
    numbers = as_numbers(value)
    # A constant as Python wrote it is whole (`reg_scale: 4` of D-FINE); weights are many numbers.
    if dtype.startswith("float") and numbers.dtype.kind != "f" and numbers.size > 1:
        raise WeightsError(
            f"holds {numbers.dtype} numbers, expected floating point",
            code="weights_quantised",
            where=f"{path}: {key}",
            fix="give the model's weights from before quantisation",
        )
    with np.errstate(over="ignore"):
        numbers = numbers.astype(dtype)
    broken = int((~np.isfinite(numbers)).sum()) if numbers.dtype.kind == "f" else 0
    if broken:
        raise WeightsError(
            f"{broken} of {numbers.size} values are NaN or infinite",
            code="weights_not_finite",
            where=f"{path}: {key}",
            fix="the training went wrong before it was saved, so give an earlier checkpoint",
        )
    return numbers


def _some(keys: Collection[str]) -> str:
    return ", ".join(map(shown, list(keys)[:3])) + (", ..." if len(keys) > 3 else "") or "nothing"


def arrays_of(model: ImageModel) -> dict[str, np.ndarray]:
    """The model's entries under our keys, in our layout."""
    return {key: value.numpy() for key, value in model.state_dict().items()}


def official_arrays_of(model: ImageModel) -> dict[str, np.ndarray]:
    """The model's entries as the original keeps them.

    Keys, layout, and where that is a torch model also the counters its strict loading asks for (0).
    """
    official, linear = model.official_keys(), linear_keys(model)
    torch = any(theirs != key for key, theirs in official.items())
    result = {}
    for key, value in arrays_of(model).items():
        theirs = official[key]
        value = np.pad(value, ((0, 1), (0, 0))) if torch and key in model.padded_keys else value
        result[theirs] = value.T if torch and key in linear else value
        if theirs != key and theirs.endswith(".running_var"):
            result[theirs.replace("running_var", _BATCHES)] = np.zeros([], np.int64)
    return result
