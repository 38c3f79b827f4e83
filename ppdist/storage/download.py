"""Resumable, checked and atomic download of a file.

    FILE.part, FILE.part.json   the bytes so far, and the address and version they are of
    FILE.lock                   one process of a host downloads, the others wait for it
    FILE                        appears by a rename, when all bytes are there and the checksum holds

http needs only the standard library: docs/dev/libraries.md explains what packages for this purpose
lack.  Proxies are taken from the environment.  A file of another store is read in parts
(`_StoreResponse`).
"""

import hashlib
import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from ppdist.common import addresses
from ppdist.common.errors import StorageError, UserError
from ppdist.common.files import (
    FileLock,
    make_folder,
    open_file,
    open_own,
    read_file,
    replace_file,
    writing,
)
from ppdist.common.machine import free_disk
from ppdist.common.retry import TOLD_SECONDS, unavailable, with_retries
from ppdist.storage import stores

_LOGGER = logging.getLogger("ppdist.data")

_BLOCK_BYTES = 1 << 18
_PART_BYTES = 4 << 20  # bytes per request to a store
_MAX_ATTEMPTS = 1 << 12  # each may bring only a few bytes
_REPORT_SECONDS = 5.0
_MAX_RECORD_BYTES = 1 << 16  # bytes of FILE.part.json
# Short, so that a silent server gets several attempts in the half minute of `with_retries`.
_TIMEOUT_SECONDS = 10.0
# Statuses of a server that is busy, restarting, or cannot reach its upstream; others are final.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_KEEP_PROXIES = "_original"  # fleetrun renames http_proxy for its ranks, as Paddle's launcher does


def _ignore(_: str) -> None:
    pass


def download(
    url: str,
    file: Path,
    *,
    sha256: str | None = None,
    fix: str = "",
    say: Callable[[str], None] = _ignore,
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """Downloads a file atomically, unless it already exists.

    Waits while another process on this host downloads it.  Retries after a lost connection, a
    silent server or a response such as 503, and resumes where it stopped if the server supports
    that; so does a later call.

    Args:
        url: http or https.
        file: destination; its folder is created.
        sha256: hexadecimal; None: none is published, and only the number of bytes is checked.
        fix: what else the user can do, for messages.
        say: receives a progress line every few seconds.
        timeout: seconds without any byte after which the connection counts as lost.
    Returns: the SHA-256 of the file, hexadecimal.
    Raises: UserError: the server refuses or is unreachable, the checksum differs, or the disk is
        full.
    """
    make_folder(file.parent)
    with _locked_part(file, say) as part:
        if file.exists():  # another process was faster
            return sha256_of(file)
        try:
            resumed = _download_part(url, part, fix, say, timeout)
            digest = sha256_of(part)
            if sha256 and digest != sha256 and resumed:  # perhaps halves of two versions
                _delete_part(part)
                _download_part(url, part, fix, say, timeout)
                digest = sha256_of(part)
        except StorageError as error:
            arrived = _part_size(part)
            hint = f"; {arrived} bytes are kept for the next start" if arrived else ""
            raise UserError(
                f"cannot be downloaded: {error.what}{hint}",
                code="download_failed",
                where=url,
                fix=fix,
            ) from error
        if sha256 and digest != sha256:
            _delete_part(part)
            raise UserError(
                f"SHA-256 is {digest}, expected {sha256}: the file was changed or damaged in "
                "transit, and was deleted",
                code="download_damaged",
                where=url,
                fix=fix,
            )
        with writing(file):
            part.replace(file)
        _delete_part(part)
    return digest


def local_copy(path: Path) -> Path:
    """Returns the path of a local file unchanged, or downloads a file from a store, once per host.

    Other processes and later runs reuse the download.

    Raises: UserError: it cannot be fetched or written.  StorageError: the store stays unavailable.
    """
    if not addresses.is_remote(path):
        return path
    url = addresses.absolute(path)
    try:
        identity = stores.identity_of(url)
    except OSError as error:
        raise _unreadable_error(error, url) from error
    # A folder for each address: files of two buckets may have the same name.
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    file = stores.copies_folder() / name / url.rpartition("/")[2]
    version = file.with_name("version.json")
    expected = json.dumps(
        [url, identity.bytes, stores.cache_mark(identity).decode(errors="replace")]
    )
    make_folder(file.parent)
    with _locked_part(file, _LOGGER.info) as part:
        try:
            current = read_file(version, _MAX_RECORD_BYTES).decode() == expected and file.is_file()
        except (OSError, UnicodeDecodeError):
            current = False
        if not current:
            _download_part(url, part, _check_address(url), _LOGGER.info, _TIMEOUT_SECONDS)
            # The version is written last: a crash between the two only repeats the download.
            with writing(file):
                part.replace(file)
                replace_file(version, expected.encode())
            _delete_part(part)
    return file


def _unreadable_error(error: OSError, url: str) -> UserError:
    fix = _check_address(url)
    if isinstance(error, PermissionError):
        fix = (
            "give credentials as the store's own tools take them (AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN), or for a public "
            "bucket FSSPEC_S3_ANON=true"
        )
    if isinstance(error, FileNotFoundError):
        fix = "check data.root and the names of the files"
    reason = error.strerror or str(error)
    return UserError(reason, code="store_file_unreadable", where=url, fix=fix)


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file's content, hexadecimal.  Raises: OSError."""
    content = hashlib.sha256()
    with open_file(file) as opened:
        while block := opened.read(_BLOCK_BYTES):
            content.update(block)
    return content.hexdigest()


@contextmanager
def _locked_part(file: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Locks a file against downloads by other processes on this host.

    Yields: the path to write to.
    """
    lock, begin = FileLock(file.with_name(file.name + ".lock")), time.monotonic()
    reported: float | None = None
    try:
        with writing(lock.path):
            lock.open()
        try:
            while not lock.try_acquire():
                now = time.monotonic()
                if reported is None or now - reported >= _REPORT_SECONDS:
                    reported = now
                    waited = f"({now - begin:.0f} s)"
                    say(f"waiting for another process that downloads {file.name} {waited}")
                # Polls, as a blocking lock would leave the user without a message.
                time.sleep(0.1)
        except OSError:  # no locks on this file system: each process downloads the whole file
            yield file.with_name(f"{file.name}.{os.getpid()}.part")
        else:
            yield file.with_name(f"{file.name}.part")
    finally:
        lock.close()


def _download_part(
    url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float
) -> bool:
    """Downloads all bytes of the file into `part`.

    Immediately repeats a request that ended early; repeats one that brought no byte after a pause.

    Returns: True if it continued an earlier download.
    Raises: StorageError: the server stays unreachable.  UserError: it refuses.
    """
    resumed = False
    for _ in range(_MAX_ATTEMPTS):

        def attempt() -> tuple[bool, str]:
            nonlocal resumed
            before = _part_size(part)
            continued, reason = _request_rest(url, part, fix, say, timeout)
            resumed = resumed or continued
            # Only an attempt without progress counts as unavailable: a slow server may need many.
            if reason and _part_size(part) <= before:
                raise unavailable(reason, url, "reach the server again")
            return continued, reason

        silent = True

        def pause(seconds: float, outage: StorageError) -> None:
            nonlocal silent
            if silent and seconds >= TOLD_SECONDS:
                silent = False
                say(f"{outage.what}; trying again for up to half a minute")
            time.sleep(seconds)

        _, reason = with_retries(attempt, pause=pause, quiet=True)
        if not reason:
            return resumed
        say(f"{url}: {reason}; retrying")
    raise unavailable(f"cut off {_MAX_ATTEMPTS} times", url, "reach the server again")


def _request_rest(
    url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float
) -> tuple[bool, str]:
    """Requests the bytes that are missing and appends them to `part`.

    Returns: (resumed, reason): True if it continued an earlier download; why it ended before the
    end of the file, "" if it did not.
    Raises: UserError: the server refuses.
    """
    # Not compressed: offsets and lengths have to be those of the file.
    headers, offset = {"Accept-Encoding": "identity", "User-Agent": "ppdist"}, 0
    if version := _version_of(part, url):
        offset = _part_size(part)
        headers |= {"Range": f"bytes={offset}-", "If-Range": version}
    try:
        with _open_url(url, headers, timeout) as response:
            resumed = response.status == http.client.PARTIAL_CONTENT
            # Appending another range than requested would corrupt the file.
            if resumed and not response.headers.get("Content-Range", "").startswith(
                f"bytes {offset}-"
            ):
                _delete_part(part)
                return False, "the server sent another part than requested"
            offset = offset if resumed else 0
            total = offset + _length_of(response, url, fix)
            _require_room(part, total - offset, url)
            if not resumed:
                _write_record(part, url, response.headers)
            arrived = _copy(response, part, offset, total, say)
    except urllib.error.HTTPError as error:
        with error:
            beyond_end = error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and offset
            if beyond_end and error.headers.get("Content-Range") == f"bytes */{offset}":
                return True, ""  # all bytes are there already
            if beyond_end:
                _delete_part(part)
                return False, "the file there has become a shorter one"
            if error.code in _PASSING:
                return False, f"HTTP {error.code} {error.reason}"
            raise UserError(
                f"HTTP {error.code} {error.reason}", code="server_refused", where=url, fix=fix
            ) from error
    except StorageError as error:
        return False, error.what
    except (http.client.HTTPException, OSError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        silent = isinstance(cause, TimeoutError)
        return False, "the server is silent" if silent else f"{cause}" or type(cause).__name__
    return resumed, "" if arrived == total else f"cut off after {arrived} of {total} bytes"


def _length_of(response: Any, url: str, fix: str) -> int:
    """Returns the number of bytes in the response.

    Raises: UserError: it is not a file, or its length is unknown.
    """
    # Login pages of networks answer requests for any address, with status 200.
    if "text/html" in (response.headers.get("Content-Type") or ""):
        raise UserError(
            "the server sent a web page instead of the file: a login page of the network, or the "
            "address has changed",
            code="server_refused",
            where=url,
            fix=fix,
        )
    length = response.headers.get("Content-Length")
    if length is None or not length.isdigit():
        raise UserError(
            "the server does not say how long the file is, so a cut could not be noticed",
            code="server_refused",
            where=url,
            fix=fix,
        )
    return int(length)


def _copy(response: Any, part: Path, offset: int, total: int, say: Callable[[str], None]) -> int:
    """Appends the response to the first `offset` bytes of `part`.

    Returns: the number of bytes in `part`.
    """
    begin, first, reported = time.monotonic(), offset, time.monotonic()
    with writing(part):
        # Unbuffered, so that a full disk is noticed here.
        output = open_own(part, "ab" if offset else "wb", buffering=0)
    with output:
        while block := response.read1(_BLOCK_BYTES):
            unwritten = memoryview(block)
            while unwritten:
                with writing(part):
                    unwritten = unwritten[output.write(unwritten) :]
            offset += len(block)
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported, rate = now, (offset - first) / 1e6 / (now - begin)
                say(f"{part.stem}: {offset / 1e6:.1f} of {total / 1e6:.1f} MB, {rate:.1f} MB/s")
        with writing(part):
            # Before the file is renamed: a power cut must not leave the final name on an incomplete
            # file.
            os.fsync(output.fileno())
    return offset


def _open_url(url: str, headers: Mapping[str, str], timeout: float) -> Any:
    """Sends a request for a file; returns the response, a context manager."""
    if addresses.is_remote(url) and not url.startswith("http"):
        return nullcontext(_StoreResponse(url, headers))
    if not url.startswith(("http://", "https://")):
        raise UserError("expected http:// or https://", code="server_refused", where=url)
    proxies = urllib.request.getproxies()
    for scheme in ("http", "https"):
        # A rank sees no http_proxy, yet its downloads have to go through it.
        proxy = os.environ.get(f"{scheme}_proxy{_KEEP_PROXIES}")
        if proxy:
            proxies.setdefault(scheme, proxy)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=timeout)


class _StoreResponse:
    """A file in a store, with the interface of an HTTP response."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        try:
            identity = stores.identity_of(url)
        except OSError as error:
            raise _unreadable_error(error, url) from error
        self._url, self._at, self._end = url, 0, identity.bytes
        resumes = identity.mark and headers.get("If-Range") == identity.mark
        if resumes:
            self._at = int(headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.status = http.client.PARTIAL_CONTENT if resumes else http.client.OK
        self.headers = {
            "ETag": identity.mark,
            "Content-Length": f"{self._end - self._at}",
            "Content-Range": f"bytes {self._at}-",
        }

    def read1(self, _: int) -> bytes:
        length = min(_PART_BYTES, self._end - self._at)
        if length <= 0:
            return b""
        content = stores.fetch(self._url, self._at, length, use_cache=False)
        self._at += length
        return content


def _check_address(url: str) -> str:
    endpoint = " (AWS_ENDPOINT_URL for a store other than Amazon's)" if url.startswith("s3") else ""
    return f"check the network and the address{endpoint}"


def _require_room(part: Path, missing: int, url: str) -> None:
    free = free_disk(part.parent)
    if missing > free:
        raise UserError(
            f"disk full: {url} needs {missing / 1e6:.1f} MB more, {free / 1e6:.1f} MB are free",
            code="disk_full",
            where=f"{part.parent}",
            fix="delete files, or set XDG_CACHE_HOME to a larger disk",
        )


# --- records of partial downloads -----------------------------------------------------------------


def _part_size(part: Path) -> int:
    with suppress(OSError):
        return part.stat().st_size
    return 0


def _write_record(part: Path, url: str, headers: Any) -> None:
    """Records the version of the partial file, if the server names one."""
    record = {"url": url, "version": stores.find_mark(headers, strong=True)}
    with writing(part):
        replace_file(_record_path(part), json.dumps(record).encode())


def _version_of(part: Path, url: str) -> str:
    """Returns the recorded version of the partial file, for If-Range; "": it cannot be resumed."""
    if not _part_size(part):
        return ""
    try:
        record = json.loads(read_file(_record_path(part), _MAX_RECORD_BYTES))
        return str(record["version"]) if record["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _record_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _delete_part(part: Path) -> None:
    for path in (part, _record_path(part)):
        with suppress(OSError):
            path.unlink(missing_ok=True)
