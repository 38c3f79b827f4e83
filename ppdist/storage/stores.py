"""Object stores: files at s3://, gs://, http:// and others, through fsspec.

Every failure is an OSError, as with a disk: FileNotFoundError, PermissionError.  If the same
request may succeed later, it is sent again (common/retry.py), at last a StorageError.  No message
contains a key, a token or a library's own text.

`Path` and `os.path` collapse double slashes, so `s3:/bucket/key` is read as `s3://bucket/key`.
Event loops and clients do not survive a fork: each process opens its own at its first request.
"""

import errno
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppdist.common.addresses import absolute
from ppdist.common.errors import StorageError, UserError
from ppdist.common.files import user_cache
from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.opener import Identity
from ppdist.common.retry import unavailable, with_retries

_LOGGER = logging.getLogger("ppdist.data")
_LISTING_SECONDS = 300.0
_PASSING_STATUS = (408, 425, 429)
_T = TypeVar("_T")
_MOST_ASKED = 1 << 16
_HTTP = ("http:", "https:")
# What a server's headers, or a store's description, may have to tell contents apart.
_VALIDATORS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")


@dataclass
class _Settings:
    """Settings of this process.

    cache: None: no caching.  seconds: timeout of a request.
    """

    cache: KeyedCache | None = None
    seconds: float = 20.0


_settings = _Settings()
_filesystems: dict[tuple[int, str], Any] = {}  # by process
_listings: dict[str, Mapping[str, Identity] | None] = {}  # by folder; workers inherit their rank's
_asked: dict[str, Identity] = {}  # by URL
_RUN = uuid.uuid4().hex  # mark of files without one: valid in this process and its forks


def folder_of_copies() -> Path:
    """Where whole files of stores are kept."""
    home = user_cache()
    folder = Path(tempfile.gettempdir()) / f"ppdist-stores-{os.getuid()}"
    return (folder if home is None else home / "stores") / "copies"


def use(cache_bytes: int, seconds: float) -> None:
    """Sets how this process and its forks access stores from now on.

    Args:
        cache_bytes: limit of the cached images; 0: none are cached.
        seconds: timeout of a request.
    """
    home = user_cache()
    place = None if home is None else home / "stores" / "objects"
    kept, _settings.seconds = _settings.cache, seconds
    if place is None or not cache_bytes:
        _settings.cache = None
    elif kept is None or (kept.folder, kept.most_bytes) != (place, cache_bytes):
        _settings.cache = KeyedCache(place, cache_bytes, _say_uncached)


def _say_uncached(why: str) -> None:
    _LOGGER.warning("data.store_cache_gib: %s; files that are not kept are fetched each time", why)


def identity_of(path: str | os.PathLike[str]) -> Identity:
    """Asks for the content identity of one file.  Raises: OSError, StorageError."""
    found = _ask(path, "info")
    if found.get("type") == "directory":
        raise IsADirectoryError(errno.EISDIR, "a folder", absolute(path))
    return _identity(found)


def listed_identity(url: str) -> Identity | None:
    """Identity in the listing of the file's folder; None: not listed."""
    folder, _, name = url.rpartition("/")
    return (_listings.get(folder) or {}).get(name)


def known_identity(path: str | os.PathLike[str]) -> Identity:
    """Like `identity_of`, from earlier listings and requests until `look_anew`."""
    url = absolute(path)
    found = listed_identity(url) or _asked.get(url)
    return _note(url, identity_of(url)) if found is None else found


def _note(url: str, found: Identity) -> Identity:
    if len(_asked) >= _MOST_ASKED:
        _asked.clear()
    _asked[url] = found
    return found


def list_folder(folder: str) -> Mapping[str, Identity] | None:
    """The files of a folder, listed once; None: http cannot list.

    Raises: OSError; FileNotFoundError: there is nothing.  StorageError.
    """
    url = absolute(folder)
    if url not in _listings:
        _listings[url] = None if url.startswith(_HTTP) else _listing(url)
    return _listings[url]


def _listing(url: str) -> Mapping[str, Identity]:
    entries = _ask(url, "ls", detail=True, seconds=_LISTING_SECONDS)
    return {
        str(each["name"]).rstrip("/").rpartition("/")[2]: _identity(each)
        for each in entries
        if each.get("type") != "directory"
    }


def look_anew(folders: Iterable[str]) -> None:
    """Forgets listings of these folders, and all identities asked for."""
    for folder in folders:
        _listings.pop(absolute(folder), None)
    _asked.clear()


def fetch(
    path: str | os.PathLike[str], begin: int = 0, length: int | None = None, kept: bool = True
) -> bytes:
    """Content of a file, or of a part, from cache or store.

    Cached content belongs to one content identity, or to this run if the file has none.

    Args: kept: whether the cache keeps it.
    Raises: OSError, StorageError.
    """
    url, cache = absolute(path), _settings.cache if kept else None
    key = f"{url}\0{begin}\0{length}"
    entry = None if cache is None else cache.get(key)
    if entry is not None:
        mark, _, content = entry.partition(b"\n")
        if mark == mark_of_run(known_identity(url)):
            return content
    end, found = None if length is None else begin + length, Identity(0, "")
    if url.startswith(_HTTP):
        content, found = _get(url, begin, end)
    else:
        if cache is not None:
            found = known_identity(url)  # first, as the content may be newer
        start = None if length is None else begin
        content = bytes(_ask(url, "cat_file", start=start, end=end))
    if length is not None and len(content) > length:  # a server without ranges sends all
        content = content[begin:end]
    if length is not None and len(content) != length:
        what = f"{len(content)} bytes came of {length}: it was replaced since the start"
        raise OSError(errno.EINVAL, what, url)
    if cache is not None:
        cache.put(key, mark_of_run(found) + b"\n", content)
    return content


def mark_of_run(found: Identity) -> bytes:
    """Mark of an identity; without one, that of this run."""
    return (found.mark or _RUN).encode("utf-8", "surrogateescape")


def mark_in(told: Mapping[str, Any], *, strong: bool = False) -> str:
    """Mark in a response's headers, or a store's description; "": none.

    Args: strong: guarantees equal bytes, as a resumed download needs; weak ETags do not count.
    """
    for key in _VALIDATORS:
        value = told.get(key)
        if value is not None and not (strong and str(value).startswith("W/")):
            return str(value)
    return ""


# --- requests -------------------------------------------------------------------------------------


def _ask(
    path: str | os.PathLike[str], what: str, seconds: float | None = None, **arguments: Any
) -> Any:
    """Calls a method of the store's file system for a path.

    Args: seconds: timeout of the request.
    Raises: as `_request`.
    """
    url = absolute(path)
    filesystem = _filesystem(url)
    limit = _settings.seconds if seconds is None else seconds
    if filesystem.async_impl:  # the others have limits of their own
        arguments["timeout"] = limit
    return _request(lambda: getattr(filesystem, what)(url, **arguments), url, limit)


def _get(url: str, begin: int, end: int | None) -> tuple[bytes, Identity]:
    """Content behind http, and the file's identity from the same answer."""
    from fsspec.asyn import sync

    filesystem, seconds = _filesystem(url), _settings.seconds
    headers = {"Accept-Encoding": "identity"}
    if end is not None:
        headers["Range"] = f"bytes={begin}-{end - 1}"

    async def get() -> tuple[bytes, str]:
        session, options = await filesystem.set_session(), dict(filesystem.kwargs)
        options["headers"] = {**options.get("headers", {}), **headers}
        async with session.get(filesystem.encode_url(url), **options) as answer:
            answer.raise_for_status()
            return await answer.read(), mark_in(answer.headers)

    content, mark = _request(lambda: sync(filesystem.loop, get, timeout=seconds), url, seconds)
    return content, _note(url, Identity(0 if end else len(content), mark.strip('"')))


def _request(send: Callable[[], _T], url: str, seconds: float) -> _T:
    """Sends a request, again while the store is away.

    Raises: OSError; StorageError: it stays away.  UserError: its library is not installed.
    """

    def once() -> _T:
        try:
            return send()
        except Exception as error:  # the libraries have no narrower common base
            problem = _problem(error, url, seconds)
        raise problem  # not `from error`: a library's text may contain secrets

    return with_retries(once)


def _filesystem(url: str) -> Any:
    protocol = url.partition(":")[0]
    found = _filesystems.get((os.getpid(), protocol))
    if found is None:
        found = _filesystems[os.getpid(), protocol] = _opened(protocol, url)
    return found


def _opened(protocol: str, url: str) -> Any:
    try:
        import fsspec

        for library in ("botocore", "aiobotocore", "s3fs", "fsspec", "gcsfs"):
            logging.getLogger(library).setLevel(logging.ERROR)  # they log where keys were found
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if protocol in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
            seconds = _settings.seconds
            options["config_kwargs"] = {
                "connect_timeout": min(5.0, seconds),
                "read_timeout": seconds,
                "retries": {"max_attempts": 1},
            }
        filesystem = fsspec.filesystem(protocol, **options)
        if protocol in ("s3", "s3a"):
            filesystem.retries = 1  # only our retries, within the timeout
        return filesystem
    except ImportError as error:
        package = {"gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs",
                   "abfs": "adlfs"}.get(protocol)  # fmt: skip
        raise UserError(
            f"{protocol}:// needs a package that is not installed ({error.name or protocol})",
            code="store_library_missing",
            where=url,
            fix="pip install 'ppdist[stores]'" + (f" {package}" if package else ""),
        ) from None
    except ValueError:
        known = "s3://, gs://, hf://, http:// and what else fsspec opens"
        raise UserError(
            f"unknown protocol {protocol}://; expected a folder, or {known}",
            code="store_unknown",
            where=url,
        ) from None


def _problem(error: Exception, url: str, limit: float) -> OSError | StorageError:
    """Translates the exception of any library."""
    status, code = _answer(error)
    name = f"HTTP {status} {code}".strip() if status else code
    unclear = isinstance(error, FileNotFoundError) and url.startswith("http") and not status
    if unclear and error.__cause__ is not None:  # fsspec's message for every failed HEAD
        return _problem(error.__cause__, url, limit)  # type: ignore[arg-type]
    absent = isinstance(error, FileNotFoundError) and status in (0, 404, 410)
    if absent or status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "does not exist in the store", url)
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return FileNotFoundError(errno.ENOENT, "a folder of the store, no file", url)
    refused = isinstance(error, PermissionError) or status in (401, 403)
    if refused or "Credential" in type(error).__name__:
        why = f"the store refuses access ({name or 'no credentials'})"
        return PermissionError(errno.EACCES, why, url)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return _away(f"no answer within {limit:g} s", url)
    if status and 400 <= status < 500 and status not in _PASSING_STATUS:
        return OSError(errno.EINVAL, f"the store answers {name}", url)
    if not status and isinstance(error, ValueError | TypeError | AttributeError | KeyError):
        return OSError(errno.EINVAL, f"the store's library failed ({type(error).__name__})", url)
    cut = f"the connection failed ({type(error).__name__})"
    return _away(f"the store answers {name}" if name else cut, url)


def _away(why: str, url: str) -> StorageError:
    return unavailable(why, url, "reach the store again")


def _answer(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code in an exception; 0, "": no response."""
    each: BaseException | None = error
    while each is not None:
        response = getattr(each, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            return int(status or 0), code if re.fullmatch(r"[A-Za-z]{1,40}", code) else ""
        for holder in (response, each):
            for attribute in ("status_code", "status", "code"):
                if attribute == "code" and type(holder).__name__ != "HttpError":
                    continue  # gcsfs's; aiohttp uses the name for a truncated response
                status = getattr(holder, attribute, None)
                if isinstance(status, int) and 100 <= status < 600:
                    return status, ""
        each = each.__cause__ or each.__context__
    return 0, ""


def _identity(found: dict[str, Any]) -> Identity:
    return Identity(int(found.get("size") or 0), mark_in(found).strip('"'))
