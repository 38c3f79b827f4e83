"""Where a path of a data set leads: to a disk, through a tar shard, into a store.

A path is what it was: `/data/images/a.jpg`; through a shard `/data/shards/train-000003.tar/a.jpg`;
in a store `s3://bucket/images/a.jpg`, and both at once.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

SHARD_SUFFIX = ".tar"
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")
_CREDENTIALS = re.compile(r"//[^/]*@|[?&](X-|sig=|token=|key=|Signature|AWSAccessKeyId)", re.I)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a store."""
    found = _REMOTE.match(os.fspath(path))
    return found is not None and found[1] != "file"


def absolute(path: str | os.PathLike[str]) -> str:
    """URL of a path in a store; of a local one, absolute."""
    text = os.fspath(path)
    if text.startswith("file:/"):
        return "/" + text[len("file:") :].lstrip("/")
    found = _REMOTE.match(text)
    return os.path.abspath(text) if found is None else f"{found[1]}://{text[found.end() :]}"


def holds_credentials(path: str) -> bool:
    """Whether an address contains a user or a signature."""
    return is_remote(path) and _CREDENTIALS.search(absolute(path)) is not None


def folder_of(root: str, name: str = "") -> Path:
    """A folder, or what is relative to it; an address stays one."""
    if is_remote(name) or name.startswith("file:/"):
        root, name = name, ""
    place = absolute(root) if root.startswith("file:/") else root
    return Path(place, name)


class Place(NamedTuple):
    """A path through a shard, taken apart: folder/shard/name."""

    folder: str
    shard: str
    name: str


def place_in_shard(path: str) -> Place | None:
    """Where a path leads through a tar file; None: it does not.

    On disk a folder may be called so, too, and is one.
    """
    begin = 0
    while (at := path.find(f"{SHARD_SUFFIX}/", begin)) >= 0:
        begin = at + len(SHARD_SUFFIX)
        shard, name = path[:begin], path[begin + 1 :]
        if is_remote(path) or os.path.isfile(shard):
            return Place(*os.path.split(shard), name)
    return None


def is_in_shard(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a tar file, or leads through one."""
    return place_in_shard(f"{os.fspath(path)}/") is not None
