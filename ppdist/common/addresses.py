"""Addresses of files of a data set: on a disk, in a tar shard, in an object store.

A path keeps its plain form: `/data/images/a.jpg`; through a shard
`/data/shards/train-000003.tar/a.jpg`; in a store `s3://bucket/images/a.jpg`, and both at once.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

SHARD_SUFFIX = ".tar"
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")
_CREDENTIALS = re.compile(r"//[^/]*@|[?&](X-|sig=|token=|key=|Signature|AWSAccessKeyId)", re.I)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path is in an object store."""
    match = _REMOTE.match(os.fspath(path))
    return match is not None and match[1] != "file"


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute form of a path; for a path in an object store, its URL."""
    text = os.fspath(path)
    if text.startswith("file:/"):
        return "/" + text[len("file:") :].lstrip("/")
    match = _REMOTE.match(text)
    return os.path.abspath(text) if match is None else f"{match[1]}://{text[match.end() :]}"


def holds_credentials(path: str) -> bool:
    """Returns True if an address contains a user or a signature."""
    return is_remote(path) and _CREDENTIALS.search(absolute(path)) is not None


def folder_of(root: str, name: str = "") -> Path:
    """Joins `root` and `name`; a `name` that is an address replaces `root`."""
    if is_remote(name) or name.startswith("file:/"):
        root, name = name, ""
    folder = absolute(root) if root.startswith("file:/") else root
    return Path(folder, name)


def work_folder(output_dir: str | os.PathLike[str]) -> Path:
    """Returns the local folder of a run; for s3://bucket/run, it is output/s3/bucket/run.

    A local output_dir is returned unchanged.
    """
    if not is_remote(output_dir):
        return Path(output_dir)
    protocol, _, place = absolute(output_dir).partition("://")
    return Path("output", protocol, place)


class Place(NamedTuple):
    """A path into a shard, split into its parts: folder/shard/name."""

    folder: str
    shard: str
    name: str


def place_in_shard(path: str) -> Place | None:
    """Splits a path into a tar file into folder, shard and name; None for other paths.

    A folder on disk whose name ends with .tar counts as a plain folder.
    """
    begin = 0
    while (position := path.find(f"{SHARD_SUFFIX}/", begin)) >= 0:
        begin = position + len(SHARD_SUFFIX)
        shard, name = path[:begin], path[begin + 1 :]
        if is_remote(path) or os.path.isfile(shard):
            return Place(*os.path.split(shard), name)
    return None


def is_in_shard(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path is a tar file, or leads through one."""
    return place_in_shard(f"{os.fspath(path)}/") is not None
