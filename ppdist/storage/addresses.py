"""Addresses of files in stores."""

import os
import re

_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")
_CREDENTIALS = re.compile(r"//[^/]*@|[?&](X-|sig=|token=|key=|Signature|AWSAccessKeyId)", re.I)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a store."""
    found = _REMOTE.match(os.fspath(path))
    return found is not None and found[1] != "file"


def url_of(path: str | os.PathLike[str]) -> str:
    """URL of a path in a store; of a local one, absolute."""
    text = os.fspath(path)
    if text.startswith("file:/"):
        return "/" + text[len("file:") :].lstrip("/")
    found = _REMOTE.match(text)
    return os.path.abspath(text) if found is None else f"{found[1]}://{text[found.end() :]}"


def holds_credentials(path: str) -> bool:
    """Whether an address contains a user or a signature."""
    return is_remote(path) and _CREDENTIALS.search(url_of(path)) is not None
