"""Object stores: files at s3://, gs://, http:// and others, through fsspec.

Every failure is an OSError, as with a disk: FileNotFoundError, PermissionError.  If the same
request may succeed later, it is sent again (common/retry.py), and finally becomes a StorageError.
No message contains a key, a token or a library's own text.

`Path` and `os.path` collapse double slashes, so `s3:/bucket/key` is read as `s3://bucket/key`.
Event loops and clients do not survive a fork: each process opens its own at its first request.
"""

import errno
import logging
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppdist.common.addresses import absolute, holds_credentials, is_remote, work_folder
from ppdist.common.errors import ConfigError, StorageError, UserError
from ppdist.common.files import is_disk_full, user_cache
from ppdist.common.keyed_cache import KeyedCache
from ppdist.common.opener import Identity
from ppdist.common.retry import unavailable, with_retries

_LOGGER = logging.getLogger("ppdist.data")
_PROTOCOLS = ("s3://", "s3a://", "gs://", "gcs://")  # stores to which a run can write
_CREDENTIALS = (
    "give credentials as the store's own tools take them (AWS_PROFILE, AWS_ACCESS_KEY_ID, "
    "AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS), with the right to list, read, write and "
    "delete objects there"
)
_LISTING_SECONDS = 300.0
_SLOWEST_BYTES_PER_SECOND = 250e3  # 2 Mbit/s; a slower transfer of a whole file is given up
_PASSING_STATUS = (408, 425, 429)
_T = TypeVar("_T")
_MAX_IDENTITIES = 1 << 16
_HTTP = ("http:", "https:")
# Fields in a server's headers, or a store's description, that distinguish contents.
_VALIDATORS = ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "updated", "created")


@dataclass
class _Settings:
    """Settings of this process.

    cache: None disables caching.  seconds: timeout of a request.
    """

    cache: KeyedCache | None = None
    seconds: float = 20.0


_settings = _Settings()
_filesystems: dict[tuple[int, str], Any] = {}  # by process
_listings: dict[str, Mapping[str, Identity] | None] = {}  # by folder; workers inherit their rank's
_identities: dict[str, Identity] = {}  # by URL
_RUN = uuid.uuid4().hex  # mark of files without one: valid in this process and its forks


def copies_folder() -> Path:
    """Returns the folder for local copies of whole files from stores."""
    home = user_cache()
    folder = Path(tempfile.gettempdir()) / f"ppdist-stores-{os.getuid()}"
    return (folder if home is None else home / "stores") / "copies"


def configure(cache_bytes: int, seconds: float) -> None:
    """Configures how this process and its forks access stores from now on.

    Args:
        cache_bytes: limit on the size of the cached images; 0 disables caching.
        seconds: timeout of a request.
    """
    home = user_cache()
    place = None if home is None else home / "stores" / "objects"
    cache, _settings.seconds = _settings.cache, seconds
    if place is None or not cache_bytes:
        _settings.cache = None
    elif cache is None or (cache.folder, cache.most_bytes) != (place, cache_bytes):
        _settings.cache = KeyedCache(place, cache_bytes, _warn_uncached)


def _warn_uncached(reason: str) -> None:
    _LOGGER.warning(
        "data.store_cache_gib: %s; files that are not kept are fetched each time", reason
    )


def identity_of(path: str | os.PathLike[str]) -> Identity:
    """Requests the content identity of one file.  Raises: OSError, StorageError."""
    description = _call_filesystem(path, "info")
    if description.get("type") == "directory":
        raise IsADirectoryError(errno.EISDIR, "a folder", absolute(path))
    return _parse_identity(description)


def listed_identity(url: str) -> Identity | None:
    """Returns the identity from a cached listing of the file's folder; None if there is none."""
    folder, _, name = url.rpartition("/")
    return (_listings.get(folder) or {}).get(name)


def cached_identity(path: str | os.PathLike[str]) -> Identity:
    """Returns the content identity of one file, from earlier listings and requests if possible.

    `forget_listings` discards these.  Raises: OSError, StorageError.
    """
    url = absolute(path)
    identity = listed_identity(url) or _identities.get(url)
    return _remember_identity(url, identity_of(url)) if identity is None else identity


def _remember_identity(url: str, identity: Identity) -> Identity:
    if len(_identities) >= _MAX_IDENTITIES:
        _identities.clear()
    _identities[url] = identity
    return identity


def list_folder(folder: str) -> Mapping[str, Identity] | None:
    """Lists the files of a folder, once per process; None for http, which cannot list.

    Raises: OSError: FileNotFoundError if the folder does not exist.  StorageError.
    """
    url = absolute(folder)
    if url not in _listings:
        _listings[url] = None if url.startswith(_HTTP) else _read_listing(url)
    return _listings[url]


def _read_listing(url: str) -> Mapping[str, Identity]:
    entries = _call_filesystem(url, "ls", detail=True, seconds=_LISTING_SECONDS)
    return {
        str(entry["name"]).rstrip("/").rpartition("/")[2]: _parse_identity(entry)
        for entry in entries
        if entry.get("type") != "directory"
    }


def forget_listings(folders: Iterable[str]) -> None:
    """Forgets the listings of these folders, and all identities of single files."""
    for folder in folders:
        _listings.pop(absolute(folder), None)
    _identities.clear()


def fetch(
    path: str | os.PathLike[str], begin: int = 0, length: int | None = None, use_cache: bool = True
) -> bytes:
    """Reads a file in a store, or a part of it, from the cache if possible.

    Cached content belongs to one content identity, or to this run if the file has none.

    Args: use_cache: False: reads from the store and caches nothing.
    Raises: OSError, StorageError.
    """
    url, cache = absolute(path), _settings.cache if use_cache else None
    key = f"{url}\0{begin}\0{length}"
    entry = None if cache is None else cache.get(key)
    if entry is not None:
        mark, _, content = entry.partition(b"\n")
        # The file in the store may have been replaced since it was cached.
        if mark == cache_mark(cached_identity(url)):
            return content
    end, identity = None if length is None else begin + length, Identity(0, "")
    if url.startswith(_HTTP):
        content, identity = _get_http(url, begin, end)
    else:
        if cache is not None:
            identity = cached_identity(url)  # first, as the content may be newer
        start = None if length is None else begin
        content = bytes(_call_filesystem(url, "cat_file", start=start, end=end))
    if length is not None and len(content) > length:  # a server without ranges sends all
        content = content[begin:end]
    if length is not None and len(content) != length:
        message = f"{len(content)} bytes came of {length}: it was replaced since the start"
        raise OSError(errno.EINVAL, message, url)
    if cache is not None:
        cache.put(key, cache_mark(identity) + b"\n", content)
    return content


def cache_mark(identity: Identity) -> bytes:
    """Returns the mark of an identity; without one, a mark of this run."""
    return (identity.mark or _RUN).encode("utf-8", "surrogateescape")


def find_mark(headers: Mapping[str, Any], *, strong: bool = False) -> str:
    """Returns the mark in a response's headers or a store's description of a file; "": none.

    Args: strong: True ignores weak ETags: a resumed download needs a guarantee of equal bytes.
    """
    for key in _VALIDATORS:
        value = headers.get(key)
        if value is not None and not (strong and str(value).startswith("W/")):
            return str(value)
    return ""


# --- writing --------------------------------------------------------------------------------------


def write(url: str, content: bytes, *, only_new: bool = False) -> None:
    """Writes a small object in one request.

    Args: only_new: uses a conditional put (If-None-Match): only one of several writers succeeds.
    Raises: OSError: FileExistsError if `only_new` and the object exists.  StorageError.
    """
    arguments = {"mode": "create"} if only_new else {}
    seconds = request_seconds(len(content))
    _call_filesystem(url, "pipe_file", seconds, content, **arguments)


def upload(file: Path, url: str) -> None:
    """Uploads a file that nobody is changing to a store; the object appears only when complete.

    Raises: OSError, StorageError.
    """
    # Parts of 50 MiB are held in memory; s3fs holds ten of them unless it is limited.
    arguments = {"max_concurrency": 2} if url.startswith(("s3:", "s3a:")) else {}
    _copy(url, "put_file", (str(file), url), file.stat().st_size, **arguments)


def download(url: str, file: Path, size: int) -> None:
    """Downloads an object from a store into a new file.

    Args: size: its size in bytes, as returned by `list_below`.
    Raises: OSError, StorageError.
    """
    _copy(url, "get_file", (url, str(file)), size)


def _copy(url: str, method: str, places: tuple[str, str], size: int, **arguments: Any) -> None:
    filesystem, seconds = _open_once(url), request_seconds(size)
    if filesystem.async_impl:
        arguments["timeout"] = seconds
    _request(lambda: getattr(filesystem, method)(*places, **arguments), url, seconds)


def delete(url: str) -> None:
    """Deletes an object; one that does not exist is no error.  Raises: OSError, StorageError."""
    with suppress(FileNotFoundError):
        _call_filesystem(url, "rm_file")


def list_below(folder: str) -> dict[str, int]:
    """Lists the objects below a folder at any depth: relative name -> size in bytes.

    Names that are not paths below the folder, such as `../x`, are left out.
    Raises: OSError, StorageError.
    """
    entries = _call_filesystem(folder, "find", seconds=_LISTING_SECONDS, detail=True)
    prefix = folder.partition("://")[2] + "/"  # names begin with the bucket; some with a slash
    sizes = {
        name.lstrip("/").removeprefix(prefix): int(entry.get("size") or 0)
        for name, entry in entries.items()
        if name.lstrip("/").startswith(prefix) and entry.get("type") != "directory"
    }
    return {name: size for name, size in sizes.items() if not {"", ".", ".."} & {*name.split("/")}}


def place_of_run(output_dir: str | os.PathLike[str]) -> str:
    """Returns the URL of an output_dir in a store.

    Raises: ConfigError: a run cannot write there.
    """
    url = absolute(output_dir).rstrip("/")
    problem = ""
    if holds_credentials(url):
        url = url.partition("://")[0] + "://..."
        problem = "the address contains a password or a signature"
    elif not url.startswith(_PROTOCOLS):
        problem = "a run cannot write there"
    elif {"", ".", ".."} & {*url.partition("://")[2].split("/")} or url.count("/") < 3:
        problem = "it names no folder in a bucket"
    if problem:
        raise ConfigError(
            f"{url}: {problem}",
            code="output_dir_unwritable",
            where="output_dir",
            fix="expected a folder, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER with credentials "
            "in the environment",
        )
    return url


def require_writable(url: str) -> str:
    """Checks that a run can write to a store, with an object that is then deleted; returns a line.

    Raises: UserError, StorageError: the run cannot write there.
    """
    probe = f"{url}/.ppdist-{uuid.uuid4().hex}"
    with explained(url):
        write(probe, b"ppdist", only_new=True)
        delete(probe)
    return f"{url} can be written; a run writes to {work_folder(url)} first"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns a refusal of the store into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        if not is_remote(str(error.filename)):  # a file here
            raise UserError(
                f"cannot be written: {error.strerror or error}",
                code="disk_full" if is_disk_full(error) else "file_unwritable",
                where=f"{error.filename}",
            ) from error
        absent = isinstance(error, FileNotFoundError)
        raise UserError(
            "there is no such bucket" if absent else f"{error.strerror}",
            code="store_refused",
            where=url,
            fix="check its name, and AWS_ENDPOINT_URL if it is not Amazon's"
            if absent
            else _CREDENTIALS,
        ) from error


def copy_command(path: str | os.PathLike[str]) -> str:
    """Returns the command that copies a store's folder to a disk; "" if there is none."""
    copy = {"s3": "aws s3 sync", "gs": "gcloud storage cp -r"}
    url = absolute(path)
    tool = copy.get(url.partition("://")[0]) if is_remote(path) else None
    return "" if tool is None else f"copy it to a disk first: {tool} {url} FOLDER"


def request_seconds(size: int) -> float:
    """Returns the timeout of a request that sends or receives this many bytes."""
    return _settings.seconds + size / _SLOWEST_BYTES_PER_SECOND


# --- requests -------------------------------------------------------------------------------------


def _call_filesystem(
    path: str | os.PathLike[str],
    method: str,
    seconds: float | None = None,
    *values: Any,
    **arguments: Any,
) -> Any:
    """Calls a method of the store's file system for a path.

    Args:
        seconds: timeout of the request.
        values, arguments: positional (after the path) and keyword arguments of the method.
    Raises: see `_request`.
    """
    url = absolute(path)
    filesystem = _open_once(url)
    timeout = _settings.seconds if seconds is None else seconds
    if filesystem.async_impl:  # other libraries have limits of their own
        arguments["timeout"] = timeout
    return _request(lambda: getattr(filesystem, method)(url, *values, **arguments), url, timeout)


def _get_http(url: str, begin: int, end: int | None) -> tuple[bytes, Identity]:
    """Reads a file, or a part of it, over HTTP, with the identity in the response's headers."""
    from fsspec.asyn import sync

    filesystem, seconds = _open_once(url), _settings.seconds
    headers = {"Accept-Encoding": "identity"}
    if end is not None:
        headers["Range"] = f"bytes={begin}-{end - 1}"

    # fsspec returns only the content, but its mark has to come from the same response.
    async def get() -> tuple[bytes, str]:
        session, options = await filesystem.set_session(), dict(filesystem.kwargs)
        options["headers"] = {**options.get("headers", {}), **headers}
        async with session.get(filesystem.encode_url(url), **options) as response:
            response.raise_for_status()
            return await response.read(), find_mark(response.headers)

    content, mark = _request(lambda: sync(filesystem.loop, get, timeout=seconds), url, seconds)
    return content, _remember_identity(url, Identity(0 if end else len(content), mark.strip('"')))


def _request(send: Callable[[], _T], url: str, seconds: float) -> _T:
    """Sends a request; repeats it while the store is unavailable.

    Raises: OSError.  StorageError: it stays unavailable.  UserError: its library is not installed.
    """

    def send_once() -> _T:
        try:
            return send()
        except Exception as error:  # the libraries have no narrower common base
            translated = _translate_error(error, url, seconds)
        raise translated  # not `from error`: a library's text may contain secrets

    return with_retries(send_once)


def _open_once(url: str) -> Any:
    protocol = url.partition(":")[0]
    filesystem = _filesystems.get((os.getpid(), protocol))
    if filesystem is None:
        filesystem = _filesystems[os.getpid(), protocol] = _open_filesystem(protocol, url)
    return filesystem


def _open_filesystem(protocol: str, url: str) -> Any:
    try:
        import fsspec

        for library in ("botocore", "aiobotocore", "s3fs", "fsspec", "gcsfs"):
            # These libraries log where they found credentials.
            logging.getLogger(library).setLevel(logging.ERROR)
        # fsspec would cache file systems across forks, and listings until the process ends.
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
        protocols = "s3://, gs://, hf://, http:// and what else fsspec opens"
        raise UserError(
            f"unknown protocol {protocol}://; expected a folder, or {protocols}",
            code="store_unknown",
            where=url,
        ) from None


def _translate_error(error: Exception, url: str, timeout: float) -> OSError | StorageError:
    """Translates the exception of any library into one of a disk, or a StorageError."""
    if isinstance(error, OSError) and is_disk_full(error):  # of a download
        return OSError(error.errno, "no space left on the local disk", error.filename)
    status, code = _error_status(error)
    status_text = f"HTTP {status} {code}".strip() if status else code
    unclear = isinstance(error, FileNotFoundError) and url.startswith("http") and not status
    if unclear and error.__cause__ is not None:  # fsspec's message for every failed HEAD
        return _translate_error(error.__cause__, url, timeout)  # type: ignore[arg-type]
    absent = isinstance(error, FileNotFoundError) and status in (0, 404, 410)
    if absent or status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "does not exist in the store", url)
    if isinstance(error, FileExistsError) or status == 412:
        return FileExistsError(errno.EEXIST, "exists in the store", url)
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        return FileNotFoundError(errno.ENOENT, "a folder of the store, no file", url)
    refused = isinstance(error, PermissionError) or status in (401, 403)
    if refused or "Credential" in type(error).__name__:
        reason = f"the store refuses access ({status_text or 'no credentials'})"
        return PermissionError(errno.EACCES, reason, url)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return _unavailable_error(f"no answer within {timeout:g} s", url)
    if status and 400 <= status < 500 and status not in _PASSING_STATUS:
        return OSError(errno.EINVAL, f"the store answers {status_text}", url)
    if not status and isinstance(error, ValueError | TypeError | AttributeError | KeyError):
        return OSError(errno.EINVAL, f"the store's library failed ({type(error).__name__})", url)
    cut = f"the connection failed ({type(error).__name__})"
    return _unavailable_error(f"the store answers {status_text}" if status_text else cut, url)


def _unavailable_error(reason: str, url: str) -> StorageError:
    return unavailable(reason, url, "reach the store again")


def _error_status(error: BaseException) -> tuple[int, str]:
    """Returns the HTTP status and error code in an exception or its causes; 0, "": no response."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response.get("Error", {}).get("Code", ""))
            # Only a plain code, as any other text may contain credentials.
            return int(status or 0), code if re.fullmatch(r"[A-Za-z]{1,40}", code) else ""
        for holder in (response, cause):
            for attribute in ("status_code", "status", "code"):
                if attribute == "code" and type(holder).__name__ != "HttpError":
                    continue  # gcsfs's; aiohttp uses the name for a truncated response
                status = getattr(holder, attribute, None)
                if isinstance(status, int) and 100 <= status < 600:
                    return status, ""
        cause = cause.__cause__ or cause.__context__
    return 0, ""


def _parse_identity(description: dict[str, Any]) -> Identity:
    return Identity(int(description.get("size") or 0), find_mark(description).strip('"'))
