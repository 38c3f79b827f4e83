"""Object stores: files at s3://, gs://, http:// and others, through fsspec.

Every failure is an OSError, as with a disk: FileNotFoundError, PermissionError, or
`StoreUnavailable` if the same request may succeed later.  No message contains a key, a token or a
library's own text.

`Path` and `os.path` collapse double slashes, so `s3:/bucket/key` is read as `s3://bucket/key`.
Event loops and clients do not survive a fork: each process opens its own at its first request.
"""

import errno
import hashlib
import json
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ppdist.common.errors import UserError
from ppdist.common.files import FileLock, pauses, replace_file, user_cache, writing
from ppdist.storage.identity import Identity, mark_in
from ppdist.storage.keyed_cache import KeyedCache

_LOGGER = logging.getLogger("ppdist.data")
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])")
_CREDENTIALS = re.compile(r"//[^/]*@|[?&](X-|sig=|token=|key=|Signature|AWSAccessKeyId)", re.I)
_BLOCK_BYTES = 4 << 20  # of one request for a part of a large file
_TRIES = 4  # of a request that fails immediately
_FIRST_SECONDS = 30.0  # that a start waits for a store not reached yet
_LISTING_SECONDS = 300.0
_PASSING_STATUS = (408, 425, 429)
_T = TypeVar("_T")


class StoreUnavailable(OSError):
    """A store is slow, busy or out of reach: the same request may succeed later."""

    def __init__(self, why: str, path: str) -> None:
        super().__init__(errno.EREMOTEIO, why, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreUnavailable, (self.strerror, self.filename)


@dataclass
class _Settings:
    """Settings of this process.  cache: None: no caching; seconds: timeout of a request."""

    folder: Path | None = None
    cache: KeyedCache | None = None
    seconds: float = 20.0


_settings = _Settings()
_filesystems: dict[tuple[int, str], Any] = {}  # by process
_listings: dict[str, Mapping[str, Identity] | None] = {}  # by folder; workers inherit their rank's
_RUN = uuid.uuid4().hex  # mark of files without one: valid in this process and its forks


def use(folder: str | None, cache_bytes: int, seconds: float) -> None:
    """Sets how this process and its forks access stores from now on.

    Args:
        folder: of the cache; None: ppdist in $XDG_CACHE_HOME or ~/.cache.
        cache_bytes: limit of the cached images; 0: none are cached.
        seconds: timeout of a request.
    """
    home = user_cache() if folder is None else Path(folder)
    place = None if home is None else home / "stores"
    _settings.seconds = seconds
    kept = _settings.cache
    if place is None or not cache_bytes:
        _settings.folder, _settings.cache = place, None
    elif kept is None or _settings.folder != place or kept.most_bytes != cache_bytes:
        _settings.folder = place
        _settings.cache = KeyedCache(place / "objects", cache_bytes, _say_uncached)


def _say_uncached(why: str) -> None:
    _LOGGER.warning(
        "data.store_cache_gib: %s; the run goes on and fetches each time what is not there", why
    )


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a store."""
    found = _REMOTE.match(os.fspath(path))
    return found is not None and found[1] != "file"


def url_of(path: str | os.PathLike[str]) -> str:
    """URL of a path in a store, with both slashes; absolute path of a local one."""
    text = os.fspath(path)
    if text.startswith("file:/"):
        return "/" + text[len("file:") :].lstrip("/")
    found = _REMOTE.match(text)
    return os.path.abspath(text) if found is None else f"{found[1]}://{text[found.end() :]}"


def holds_credentials(path: str) -> bool:
    """Whether an address contains a user or a signature, which logs would show."""
    return is_remote(path) and _CREDENTIALS.search(url_of(path)) is not None


def identity_of(path: str | os.PathLike[str]) -> Identity:
    """Asks for the content identity of one file.  Raises: OSError."""
    found = _ask(path, "info")
    if found.get("type") == "directory":
        raise IsADirectoryError(errno.EISDIR, "a folder", url_of(path))
    return _identity(found)


@lru_cache(maxsize=1 << 16)
def _asked_identity(url: str) -> Identity:
    return identity_of(url)


def listed_identity(url: str) -> Identity | None:
    """Identity in the listing of the file's folder; None: not listed."""
    folder, _, name = url.rpartition("/")
    return (_listings.get(folder) or {}).get(name)


def known_identity(path: str | os.PathLike[str]) -> Identity:
    """Like `identity_of`, from earlier listings and requests until `look_anew`."""
    url = url_of(path)
    return listed_identity(url) or _asked_identity(url)


def list_folder(folder: str) -> Mapping[str, Identity] | None:
    """The files of a folder, listed once; None: the store cannot list (http).

    Raises: OSError; FileNotFoundError: there is nothing.
    """
    url = url_of(folder)
    if url not in _listings:
        _listings[url] = None if url.startswith(("http:", "https:")) else _listing(url)
    return _listings[url]


def _listing(url: str) -> Mapping[str, Identity]:
    entries = with_retries(lambda: _ask(url, "ls", detail=True, seconds=_LISTING_SECONDS))
    return {
        str(each["name"]).rstrip("/").rpartition("/")[2]: _identity(each)
        for each in entries
        if each.get("type") != "directory"
    }


def look_anew(folders: Iterable[str]) -> None:
    """Forgets listings of these folders, and all identities asked for."""
    for folder in folders:
        _listings.pop(url_of(folder), None)
    _asked_identity.cache_clear()


def answers(path: str | os.PathLike[str]) -> bool:
    """Whether the store can be reached now, even if it refuses this path."""
    try:
        _ask(path, "info")
    except StoreUnavailable:
        return False
    except OSError:
        return True
    return True


def fetch(
    path: str | os.PathLike[str], begin: int = 0, length: int | None = None, kept: bool = True
) -> bytes:
    """Content of a file, or `length` bytes of it, from the cache or the store.

    Cached content belongs to one content identity, or to this run if the file has none.

    Args: kept: whether the cache keeps it.
    Raises: OSError.
    """
    url, cache = url_of(path), _settings.cache if kept else None
    key = ""
    if cache is not None:
        mark = known_identity(url).mark or _RUN  # first, as the content may be newer
        key = f"{url}\0{begin}\0{length}\0{mark}"
        content = cache.get(key)
        if content is not None:
            return content
    end = None if length is None else begin + length
    content = _ask(path, "cat_file", start=begin if length is not None else None, end=end)
    if length is not None and len(content) > length:  # a server without ranges sends all
        content = content[begin:end]
    if length is not None and len(content) != length:
        what = f"{len(content)} bytes came of {length}: it was replaced since the start"
        raise OSError(errno.EINVAL, what, url)
    if cache is not None:
        cache.put(key, content)
    return bytes(content)


def local_copy(path: str | os.PathLike[str]) -> Path:
    """Local copy of a file in a store, downloaded once per host.

    Other processes and later runs reuse it.

    Raises: UserError: it cannot be fetched or written.
    """
    url = url_of(path)
    try:
        found = with_retries(lambda: identity_of(url))
        folder = _settings.folder or Path(tempfile.gettempdir()) / f"ppdist-stores-{os.getuid()}"
        name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
        file = folder / "copies" / name / url.rpartition("/")[2]
        note = file.with_name("version.json")
        wanted = json.dumps([url, found.bytes, found.mark or _RUN])
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file.with_name("lock"))
            with suppress(OSError):  # without locks, each process downloads it and renames
                lock.open()
                lock.acquire()
        try:
            if _said(note) != wanted or not file.is_file() or file.stat().st_size != found.bytes:
                draft = file.with_name(f"{file.name}.{os.getpid()}")
                _download(url, found.bytes, draft)
                with writing(file):
                    draft.replace(file)
                    replace_file(note, wanted.encode())
        finally:
            lock.close()
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            error.strerror or str(error), code="store_file_unreadable", where=url, fix=_fix(error)
        ) from error
    return file


def _said(note: Path) -> str:
    try:
        return note.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _download(url: str, size: int, draft: Path) -> None:
    with writing(draft), open(draft, "wb") as file:
        for begin in range(0, size, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, size - begin)
            block = with_retries(lambda at=begin, n=length: fetch(url, at, n, kept=False))  # type: ignore[misc]
            file.write(block)


def _fix(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            "give credentials as the store's own tools take them (AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN), or for a public "
            "bucket FSSPEC_S3_ANON=true"
        )
    if isinstance(error, FileNotFoundError):
        return "check data.root and the names of the files"
    return "check the network and the address (AWS_ENDPOINT_URL for a store other than Amazon's)"


def with_retries(call: Callable[[], _T]) -> _T:
    """Retries a call for half a minute while a store is away.  Raises: OSError."""
    left = pauses(_FIRST_SECONDS)
    while True:
        try:
            return call()
        except StoreUnavailable as away:
            pause = next(left, None)
            if pause is None:
                raise
            _LOGGER.warning("%s: %s; trying again", away.filename, away.strerror)
            time.sleep(pause)


# --- requests -------------------------------------------------------------------------------------


def _ask(
    path: str | os.PathLike[str], what: str, seconds: float | None = None, **arguments: Any
) -> Any:
    """Sends a request, with retries if it fails immediately.

    It takes at most about twice the timeout.

    Raises: OSError; UserError: the library for such addresses is not installed.
    """
    url = url_of(path)
    filesystem = _filesystem(url)
    limit = _settings.seconds if seconds is None else seconds
    if filesystem.async_impl:  # the others have limits of their own
        arguments["timeout"] = limit
    deadline = time.monotonic() + limit
    for tried in range(1, _TRIES + 1):
        try:
            return getattr(filesystem, what)(url, **arguments)
        except Exception as error:  # the libraries share no narrower base
            problem = _problem(error, url, limit)
        # Not `from error`: a library's text may contain secrets.
        pause = 0.1 * 2**tried
        if tried == _TRIES or not isinstance(problem, StoreUnavailable):
            raise problem
        if time.monotonic() + pause > deadline:
            raise problem
        time.sleep(pause)
    raise AssertionError("unreachable")


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
            f"{protocol}:// is read by a package that is not installed ({error.name or protocol})",
            code="store_library_missing",
            where=url,
            fix="pip install 'ppdist[stores]'" + (f" {package}" if package else ""),
        ) from None
    except ValueError:
        known = "s3://, gs://, hf://, http:// and what else fsspec opens"
        raise UserError(
            f"nothing is known of {protocol}://; expected a folder, or {known}",
            code="store_unknown",
            where=url,
        ) from None


def _problem(error: Exception, url: str, limit: float) -> OSError:
    """Translates the exception of any library into an OSError."""
    status, code = _answer(error)
    name = f"HTTP {status} {code}".strip() if status else code
    cut = isinstance(error, FileNotFoundError) and url.startswith("http") and not status
    if cut and error.__cause__ is not None:  # fsspec says so of every failed HEAD
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
        return StoreUnavailable(f"no answer within {limit:g} s", url)
    if status and 400 <= status < 500 and status not in _PASSING_STATUS:
        return OSError(errno.EINVAL, f"the store answers {name}", url)
    if not status and isinstance(error, ValueError | TypeError | AttributeError | KeyError):
        return OSError(errno.EINVAL, f"the store's library failed ({type(error).__name__})", url)
    return StoreUnavailable(f"the store answers {name}" if name else _cut(error), url)


def _cut(error: BaseException) -> str:
    return f"the connection failed ({type(error).__name__})"


def _answer(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code in any library's exception; 0, "": no response."""
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
