"""Published weights by name, and their files on this host.

    zoo.yml   name -> address, licence, the config that fits, published AP and by which protocol
    name -> PPDIST_WEIGHTS (a folder), else the cache ($XDG_CACHE_HOME/ppdist/weights), else a
            download into it, from PPDIST_WEIGHTS (an address) or the publisher's own

PPDIST_OFFLINE=1 downloads nothing.  Files keep their published names everywhere, so one that was
fetched by hand can be put into either folder.
"""

import difflib
import functools
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from ppdist.common.errors import ConfigError, WeightsError
from ppdist.common.files import read_file, replace_file, user_cache
from ppdist.common.machine import suggest_path
from ppdist.common.process import say
from ppdist.storage.download import download, sha256_of
from ppdist.storage.stores import copy_command

MIRROR, OFFLINE = "PPDIST_WEIGHTS", "PPDIST_OFFLINE"
_WEB = ("http://", "https://")
_ADDRESS = re.compile(r"^https?:/+")
_OTHER_YOLO = re.compile(r"yolo-?((?!v5)(?:v\d+|\d+|x))")  # yolov8n.pt, yolo11n.pt
_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True)
class Protocol:
    """Measurement of a published figure.

    overrides: keys of the configuration for the same evaluation; images: number of them in the data
        set, None: unknown.
    """

    name: str
    about: str
    dataset: str
    images: int | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Publisher of weights, and their licence."""

    home: str
    documents: str
    licence: str
    remark: str


@dataclass(frozen=True)
class PublishedWeights:
    """A file of weights.

    sha256: None: its publisher names none.  config, overrides: the shipped config that it fits.
    parameters: millions; mebibytes: size of the file; None: not published.
    class_names, category_ids: of class 0, 1, ... and what a COCO result calls it; (): not known.
    published: 0..100, of the metric, measured by the protocol; all None where there is none.
    """

    name: str
    url: str
    sha256: str | None
    source: Source
    config: str
    overrides: tuple[str, ...] = ()
    parameters: float | None = None
    mebibytes: float | None = None
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    published: float | None = None
    metric: str | None = None
    protocol: Protocol | None = None

    @property
    def file(self) -> str:
        """Returns the name of the file, as published."""
        return self.url.rpartition("/")[2]


@functools.cache
def zoo() -> dict[str, PublishedWeights]:
    """Returns all published weights by name."""
    text = Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    sources = {name: Source(**fields) for name, fields in read["sources"].items()}
    protocols = {
        name: Protocol(name, **fields | {"overrides": tuple(fields["overrides"])})
        for name, fields in read["protocols"].items()
    }
    entries = {}
    for name, fields in read["weights"].items():
        fields["source"] = sources[fields["source"]]
        fields["overrides"] = tuple(fields.get("overrides", ()))
        classes = read["classes"].get(fields.pop("classes", None), {})
        fields |= {key: tuple(values) for key, values in classes.items()}
        if "protocol" in fields:
            fields["protocol"] = protocols[fields["protocol"]]
        entries[name] = PublishedWeights(name=name, **fields)
    return entries


def published(weights: Path | str) -> PublishedWeights | None:
    """Finds the entry of a name, address or file; None: there is none."""
    entry, name = entry_of(weights), Path(weights).name
    return entry or next(
        (candidate for candidate in zoo().values() if candidate.file == name), None
    )


def entry_of(weights: Path | str) -> PublishedWeights | None:
    """Finds the entry of a name or an address; None: it is neither."""
    text = f"{weights}"
    if _ADDRESS.match(text):
        address = _normalise_address(text)
        entries = zoo().values()
        return next((entry for entry in entries if _normalise_address(entry.url) == address), None)
    return zoo().get(text)


def _normalise_address(url: str) -> str:
    """Strips the scheme (a Path loses a slash) and a server alias from an address."""
    return _ADDRESS.sub("", url).replace("bj.bcebos.com/v1/paddledet/", "paddledet.bj.bcebos.com/")


def is_name(weights: Path | str) -> bool:
    """Returns True for a name or address of the zoo that is not also a path."""
    return entry_of(weights) is not None and not Path(weights).exists()


def similar_names(weights: Path | str) -> str:
    """Suggests what an unknown name may have meant, as a hint for a message."""
    if command := copy_command(weights):
        return command
    if _ADDRESS.match(f"{weights}"):
        return "download it, and give the file; addresses of docs/model_zoo.md are known"
    if entry := published(weights):
        return f"the published file is downloaded by its name: {entry.name}"
    match = _OTHER_YOLO.match(Path(weights).name)
    if match:
        return (
            f"YOLO{match[1]} is not supported: ppdist has YOLOv5, PP-YOLOE, RT-DETR and D-FINE; "
            "`ppdist verify zoo` lists their weights"
        )
    if Path(weights).suffix or len(Path(weights).parts) > 1:
        return suggest_path(Path(weights)) or "give the folder of a run, or a file of weights"
    close = difflib.get_close_matches(f"{weights}", zoo(), 3, 0.5)
    return f"did you mean {' or '.join(close)}? " * bool(close) + "`ppdist verify zoo` lists names"


def local_weights(weights: Path | str, alive: Callable[[], None] = lambda: None) -> Path:
    """Returns the file of a name of the zoo, downloaded if needed; other paths as they are.


    Local; other processes of the host that need the same file wait for it.

    Args: alive: called every few seconds of a download.
    Raises: WeightsError: it is neither on this host nor can be downloaded, or it is damaged.
        UserError: the cache cannot be written to.
    """
    entry = entry_of(weights)
    if entry is None or Path(weights).exists():
        return Path(weights)
    file, recorded_sum = _find_local(entry)
    if file is not None:
        _require_sum(file, entry.sha256 or recorded_sum)
        return file
    cache, mirror = _cache(), os.environ.get(MIRROR, "")
    from_web = mirror.startswith(_WEB)
    file = cache / entry.file
    into = (
        f"elsewhere and put it into {cache}, or into a folder that {MIRROR} names, or give the "
        f"file in place of the name: --weights {entry.file}"
    )
    by_hand = f"fetch {entry.url} {into}"
    # With a folder as mirror nothing is downloaded: the host may have no network.
    if mirror and not from_web:
        raise WeightsError(
            f"{entry.file} is neither in {MIRROR}={mirror} nor in {cache}",
            code="weights_not_in_mirror",
            where=entry.name,
            fix=by_hand,
        )
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        raise WeightsError(
            f"{entry.file} is not in {cache}, and {OFFLINE} allows no download",
            code="weights_offline",
            where=entry.name,
            fix=by_hand,
        )
    url = f"{mirror.rstrip('/')}/{entry.file}" if from_web else entry.url
    say(f"ppdist: downloading {entry.name} from {urlsplit(url).hostname}")

    def report(line: str) -> None:
        alive()
        say(f"ppdist: {line}")

    checksum = download(url, file, sha256=entry.sha256, fix=f"fetch it {into}", say=report)
    _write_note(file, url, entry, checksum)
    return file


# --- files of this host ---------------------------------------------------------------------------


def is_here(entry: PublishedWeights) -> bool:
    """Returns True if its file is on this host."""
    return _find_local(entry)[0] is not None


def _find_local(entry: PublishedWeights) -> tuple[Path | None, str | None]:
    """Finds the file in the mirror's folder or the cache, with its recorded SHA-256."""
    # Files of a mirror's folder are the user's: they have no recorded checksum.
    mirror = os.environ.get(MIRROR, "")
    if mirror and not mirror.startswith(_WEB) and (file := Path(mirror) / entry.file).is_file():
        return file, None
    cache = user_cache()
    if cache is not None and (file := cache / "weights" / entry.file).is_file():
        return file, _recorded_sum(file)
    return None, None


def _cache() -> Path:
    """Returns the folder of downloaded weights.

    Raises: ConfigError: this user has no home.
    """
    cache = user_cache()
    if cache is None:
        raise ConfigError(
            "this user has no home, so there is no place for downloaded weights",
            code="cache_missing",
            where="XDG_CACHE_HOME",
            fix=f"set it to a folder, or {MIRROR} to one that holds the files",
        )
    return cache / "weights"


def _require_sum(file: Path, sha256: str | None) -> None:
    """Compares the SHA-256 of a file.

    Raises: WeightsError: it differs, or the file cannot be read.
    """
    if sha256 is None:
        return
    try:
        actual = sha256_of(file)
    except OSError as error:
        raise WeightsError(
            f"cannot be read: {error.strerror or error}", code="file_unreadable", where=f"{file}"
        ) from error
    if actual != sha256:
        raise WeightsError(
            f"damaged or replaced: SHA-256 is {actual}, it was {sha256}",
            code="weights_damaged",
            where=f"{file}",
            fix="delete it, and it is downloaded again",
        )


def _write_note(file: Path, url: str, entry: PublishedWeights, sha256: str) -> None:
    """Records beside the file what was downloaded from where."""
    note = {"name": entry.name, "url": url, "sha256": sha256}
    note |= {"licence": entry.source.licence, "source": entry.source.home}
    say(f"ppdist: {file}: SHA-256 {sha256}")
    with suppress(OSError):  # the weights are complete without the note
        replace_file(_note_file(file), json.dumps(note, indent=1).encode())


def _recorded_sum(file: Path) -> str | None:
    """Returns the SHA-256 that was recorded at the download; None: no record, put there by hand."""
    try:
        return str(json.loads(read_file(_note_file(file), _MAX_NOTE_BYTES))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note_file(file: Path) -> Path:
    """Returns the path of a file's note."""
    return file.with_name(file.name + ".json")
