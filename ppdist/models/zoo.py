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

import yaml

from ppdist.common.errors import ConfigError, WeightsError
from ppdist.common.files import read_file, replace_file, user_cache
from ppdist.common.process import say
from ppdist.storage.download import download, sha256_of

MIRROR, OFFLINE = "PPDIST_WEIGHTS", "PPDIST_OFFLINE"
_WEB = ("http://", "https://")
_ADDRESS = re.compile(r"^https?:/+")
_OTHER_YOLO = re.compile(r"yolo-?((?!v5)(?:v\d+|\d+|x))")  # yolov8n.pt, yolo11n.pt
_MOST_NOTE = 1 << 16


@dataclass(frozen=True)
class Protocol:
    """How a published figure was measured.

    overrides: keys of the configuration that evaluate so; images: of the data set, None: unknown.
    """

    name: str
    about: str
    dataset: str
    images: int | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Who publishes weights, and under which licence."""

    home: str
    documents: str
    licence: str
    remark: str


@dataclass(frozen=True)
class PublishedWeights:
    """One file of weights.

    sha256: None: its publisher names none.  config, overrides: what it fits, a shipped config.
    parameters: millions; mebibytes: of the file; None: not published.
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
        """Name of the file, as published."""
        return self.url.rpartition("/")[2]


@functools.cache
def zoo() -> dict[str, PublishedWeights]:
    """All published weights, by name."""
    text = Path(__file__).with_suffix(".yml").read_text(encoding="utf-8")
    read = yaml.safe_load(text)
    sources = {name: Source(**of) for name, of in read["sources"].items()}
    protocols = {
        name: Protocol(name, **of | {"overrides": tuple(of["overrides"])})
        for name, of in read["protocols"].items()
    }
    found = {}
    for name, of in read["weights"].items():
        of["source"] = sources[of["source"]]
        of["overrides"] = tuple(of.get("overrides", ()))
        classes = read["classes"].get(of.pop("classes", None), {})
        of |= {key: tuple(each) for key, each in classes.items()}
        if "protocol" in of:
            of["protocol"] = protocols[of["protocol"]]
        found[name] = PublishedWeights(name=name, **of)
    return found


def published(weights: Path | str) -> PublishedWeights | None:
    """The entry of a name, address or file; None: none."""
    entry, name = entry_of(weights), Path(weights).name
    return entry or next((each for each in zoo().values() if each.file == name), None)


def entry_of(weights: Path | str) -> PublishedWeights | None:
    """The entry of a name or an address; None: neither."""
    text = f"{weights}"
    if _ADDRESS.match(text):
        return next((each for each in zoo().values() if _plain(each.url) == _plain(text)), None)
    return zoo().get(text)


def _plain(url: str) -> str:
    """Address without scheme (a Path loses a slash) and server alias."""
    return _ADDRESS.sub("", url).replace("bj.bcebos.com/v1/paddledet/", "paddledet.bj.bcebos.com/")


def is_name(weights: Path | str) -> bool:
    """Whether that is a name or address of the zoo."""
    return entry_of(weights) is not None and not Path(weights).exists()


def similar_names(weights: Path | str) -> str:
    """What may have been meant by an unknown name."""
    if _ADDRESS.match(f"{weights}"):
        return "download it, and give the file; addresses of docs/model_zoo.md are known"
    if entry := published(weights):
        return f"the published file is downloaded by its name: {entry.name}"
    other = _OTHER_YOLO.match(Path(weights).name)
    if other:
        return (
            f"YOLO{other[1]} is not supported: ppdist has YOLOv5, PP-YOLOE, RT-DETR and D-FINE; "
            "`ppdist verify zoo` lists their weights"
        )
    if Path(weights).suffix or len(Path(weights).parts) > 1:
        return ""
    close = difflib.get_close_matches(f"{weights}", zoo(), 3, 0.5)
    return f"did you mean {' or '.join(close)}? " * bool(close) + "`ppdist verify zoo` lists names"


def local_weights(weights: Path | str, alive: Callable[[], None] = lambda: None) -> Path:
    """File of a name of the zoo, downloaded where needed.

    Any other path as it is.

    Local; other processes of the host that need the same file wait for it.

    Args: alive: called every few seconds of a download.
    Raises: WeightsError: it is not here and may not or cannot be downloaded, or is damaged.
        UserError: the cache cannot be written to.
    """
    entry = entry_of(weights)
    if entry is None or Path(weights).exists():
        return Path(weights)
    file, noted = _here(entry)
    if file is not None:
        _require_sum(file, entry.sha256 or noted)
        return file
    cache, mirror = _cache(), os.environ.get(MIRROR, "")
    from_web = mirror.startswith(_WEB)
    file = cache / entry.file
    by_hand = (
        f"fetch {entry.url} elsewhere and put it into {cache}, or into a folder that {MIRROR} "
        f"names, or give the file in place of the name: --weights {entry.file}"
    )
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
    say(f"ppdist: downloading {entry.name} from {url}")

    def report(line: str) -> None:
        alive()
        say(f"ppdist: {line}")

    found = download(url, file, sha256=entry.sha256, fix=by_hand, say=report)
    _note(file, url, entry, found)
    return file


# --- files of this host ---------------------------------------------------------------------------


def is_here(entry: PublishedWeights) -> bool:
    """Whether its file is on this host."""
    return _here(entry)[0] is not None


def _here(entry: PublishedWeights) -> tuple[Path | None, str | None]:
    """File in the mirror's folder or the cache, and its noted SHA-256."""
    mirror = os.environ.get(MIRROR, "")
    if mirror and not mirror.startswith(_WEB) and (file := Path(mirror) / entry.file).is_file():
        return file, None
    cache = user_cache()
    if cache is not None and (file := cache / "weights" / entry.file).is_file():
        return file, _noted(file)
    return None, None


def _cache() -> Path:
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
    """Raises: WeightsError: the file is not the one that has this SHA-256."""
    if sha256 is None:
        return
    try:
        found = sha256_of(file)
    except OSError as error:
        raise WeightsError(
            f"cannot be read: {error.strerror or error}", code="file_unreadable", where=f"{file}"
        ) from error
    if found != sha256:
        raise WeightsError(
            f"damaged or replaced: SHA-256 is {found}, it was {sha256}",
            code="weights_damaged",
            where=f"{file}",
            fix="delete it, and it is downloaded again",
        )


def _note(file: Path, url: str, entry: PublishedWeights, sha256: str) -> None:
    """Keeps what has arrived from where, beside the file."""
    note = {"name": entry.name, "url": url, "sha256": sha256}
    note |= {"licence": entry.source.licence, "source": entry.source.home}
    say(f"ppdist: {file}: SHA-256 {sha256}")
    with suppress(OSError):  # of the weights nothing is missing
        replace_file(_note_of(file), json.dumps(note, indent=1).encode())


def _noted(file: Path) -> str | None:
    """SHA-256 of a file when it arrived; None: put there by hand."""
    try:
        return str(json.loads(read_file(_note_of(file), _MOST_NOTE))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note_of(file: Path) -> Path:
    return file.with_name(file.name + ".json")
