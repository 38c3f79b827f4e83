"""Resumable, checked download of a file; whole or not at all.

    FILE.part, FILE.part.json   what has arrived, and of which address and version it is
    FILE.lock                   one process of a host downloads, the others wait for it
    FILE                        appears by a rename, when all bytes are there and the checksum holds

http takes only the standard library: docs/dev/libraries.md says what packages for this lack.
Proxies are those of the environment.  A file of another store is read in parts (`_OfStore`).
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
from ppdist.common.retry import unavailable, with_retries
from ppdist.storage import stores

_LOGGER = logging.getLogger("ppdist.data")

_BLOCK_BYTES = 1 << 18
_PART_BYTES = 4 << 20  # of one request to a store
_MOST_ATTEMPTS = 1 << 12  # however little each brings
_REPORT_SECONDS = 5.0
_MOST_NOTE = 1 << 16  # bytes of FILE.part.json
# Without any byte that count as a cut: a silent server gets several tries in the half minute of
# `with_retries`.
_TIMEOUT_SECONDS = 10.0
# That the server is busy, being restarted, or lost another one it asks; the rest is final.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_KEEP_PROXIES = "_original"  # fleetrun renames http_proxy for its ranks, as Paddle's launcher does


def _quiet(_: str) -> None:
    pass


def download(
    url: str,
    file: Path,
    *,
    sha256: str | None = None,
    fix: str = "",
    say: Callable[[str], None] = _quiet,
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """Downloads a file atomically, unless it is already there.

    It waits until no other process of this host downloads it.  A cut, a silent server, and answers
    such as 503 are retried, from where it stopped if the server can; a later call resumes, too.

    Args:
        url: http or https.
        file: its place; the folder is made.
        sha256: hexadecimal; None: none is published, and only the number of bytes is checked.
        fix: what else the user can do, for messages.
        say: gets a line every few seconds.
        timeout: seconds without any byte that count as a cut.
    Returns: the SHA-256 of the file, hexadecimal.
    Raises: UserError: refused, unreachable, of another content, or no room.
    """
    make_folder(file.parent)
    with _alone(file, say) as part:
        if file.exists():  # another process was faster
            return sha256_of(file)
        try:
            resumed = _arrive(url, part, fix, say, timeout)
            found = sha256_of(part)
            if sha256 and found != sha256 and resumed:  # perhaps halves of two versions
                _drop(part)
                _arrive(url, part, fix, say, timeout)
                found = sha256_of(part)
        except StorageError as error:
            arrived = _size(part)
            kept = f"; {arrived} bytes are kept for the next start" if arrived else ""
            raise UserError(
                f"cannot be downloaded: {error.what}{kept}",
                code="download_failed",
                where=url,
                fix=fix,
            ) from error
        if sha256 and found != sha256:
            _drop(part)
            raise UserError(
                f"SHA-256 is {found}, expected {sha256}: the file was changed or damaged in "
                "transit, and was deleted",
                code="download_damaged",
                where=url,
                fix=fix,
            )
        with writing(file):
            part.replace(file)
        _drop(part)
    return found


def local_copy(path: Path) -> Path:
    """A file itself, or the local copy of one in a store, downloaded once per host.

    Other processes and later runs reuse it.

    Raises: UserError: it cannot be fetched or written.  StorageError.
    """
    if not addresses.is_remote(path):
        return path
    url = addresses.absolute(path)
    try:
        found = stores.identity_of(url)
    except OSError as error:
        raise _unreadable(error, url) from error
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    file = stores.folder_of_copies() / name / url.rpartition("/")[2]
    version = file.with_name("version.json")
    wanted = json.dumps([url, found.bytes, stores.mark_of_run(found).decode(errors="replace")])
    make_folder(file.parent)
    with _alone(file, _LOGGER.info) as part:
        try:
            current = read_file(version, _MOST_NOTE).decode() == wanted and file.is_file()
        except (OSError, UnicodeDecodeError):
            current = False
        if not current:
            _arrive(url, part, _check_address(url), _LOGGER.info, _TIMEOUT_SECONDS)
            with writing(file):
                part.replace(file)
                replace_file(version, wanted.encode())
            _drop(part)
    return file


def _unreadable(error: OSError, url: str) -> UserError:
    fix = _check_address(url)
    if isinstance(error, PermissionError):
        fix = (
            "give credentials as the store's own tools take them (AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN), or for a public "
            "bucket FSSPEC_S3_ANON=true"
        )
    if isinstance(error, FileNotFoundError):
        fix = "check data.root and the names of the files"
    why = error.strerror or str(error)
    return UserError(why, code="store_file_unreadable", where=url, fix=fix)


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content, hexadecimal.  Raises: OSError."""
    content = hashlib.sha256()
    with open_file(file) as opened:
        while block := opened.read(_BLOCK_BYTES):
            content.update(block)
    return content.hexdigest()


@contextmanager
def _alone(file: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Waits until no other process of this host downloads the file.

    Yields: the place to write to.
    """
    lock, begin = FileLock(file.with_name(file.name + ".lock")), time.monotonic()
    told: float | None = None
    try:
        with writing(lock.path):
            lock.open()
        try:
            while not lock.try_acquire():
                now = time.monotonic()
                if told is None or now - told >= _REPORT_SECONDS:
                    told = now
                    waited = f"({now - begin:.0f} s)"
                    say(f"waiting for another process that downloads {file.name} {waited}")
                time.sleep(0.1)
        except OSError:  # no locks on this file system: each downloads alone, from the start
            yield file.with_name(f"{file.name}.{os.getpid()}.part")
        else:
            yield file.with_name(f"{file.name}.part")
    finally:
        lock.close()


def _arrive(url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float) -> bool:
    """Downloads all bytes of the file into `part`.

    An attempt that ends early is followed by another; one that brought no byte, after a pause.

    Returns: whether some were there before.
    Raises: StorageError: the server stays unreachable.  UserError: it refuses.
    """
    resumed = False
    for _ in range(_MOST_ATTEMPTS):

        def attempt() -> tuple[bool, str]:
            nonlocal resumed
            before = _size(part)
            goes_on, why = _attempt(url, part, fix, say, timeout)
            resumed = resumed or goes_on
            if why and _size(part) <= before:
                raise unavailable(why, url, "reach the server again")
            return goes_on, why

        _, why = with_retries(attempt)
        if not why:
            return resumed
        say(f"{url}: {why}; retrying")
    raise unavailable(f"cut off {_MOST_ATTEMPTS} times", url, "reach the server again")


def _attempt(
    url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float
) -> tuple[bool, str]:
    """Makes one request.

    Returns: whether it resumed an earlier one; why it ended before the file did, "": it did not.
    Raises: UserError: refused.
    """
    headers, at = {"Accept-Encoding": "identity", "User-Agent": "ppdist"}, 0
    if version := _version_of(part, url):
        at = _size(part)
        headers |= {"Range": f"bytes={at}-", "If-Range": version}
    try:
        with _opened(url, headers, timeout) as answer:
            goes_on = answer.status == http.client.PARTIAL_CONTENT
            if goes_on and not answer.headers.get("Content-Range", "").startswith(f"bytes {at}-"):
                _drop(part)
                return False, "the server sent another part than requested"
            at = at if goes_on else 0
            total = at + _length_of(answer, url, fix)
            _require_room(part, total - at, url)
            if not goes_on:
                _note(part, url, answer.headers)
            arrived = _copy(answer, part, at, total, say)
    except urllib.error.HTTPError as error:
        with error:
            gone = error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and at
            if gone and error.headers.get("Content-Range") == f"bytes */{at}":
                return True, ""  # all bytes are there already
            if gone:
                _drop(part)
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
    return goes_on, "" if arrived == total else f"cut off after {arrived} of {total} bytes"


def _length_of(answer: Any, url: str, fix: str) -> int:
    """Number of bytes in the response.

    Raises: UserError: it is not a file, or its length is unknown.
    """
    if "text/html" in (answer.headers.get("Content-Type") or ""):
        raise UserError(
            "the server sent a web page instead of the file: a login page of the network, or the "
            "address has changed",
            code="server_refused",
            where=url,
            fix=fix,
        )
    length = answer.headers.get("Content-Length")
    if length is None or not length.isdigit():
        raise UserError(
            "the server does not say how long the file is, so a cut could not be noticed",
            code="server_refused",
            where=url,
            fix=fix,
        )
    return int(length)


def _copy(answer: Any, part: Path, at: int, total: int, say: Callable[[str], None]) -> int:
    """Writes the response after the first `at` bytes.

    Returns: bytes that are there then.
    """
    began, first, told = time.monotonic(), at, time.monotonic()
    with writing(part):
        written = open_own(part, "ab" if at else "wb", buffering=0)  # a full disk is noticed here
    with written:
        while block := answer.read1(_BLOCK_BYTES):
            left = memoryview(block)
            while left:
                with writing(part):
                    left = left[written.write(left) :]
            at += len(block)
            now = time.monotonic()
            if now - told > _REPORT_SECONDS:
                told, rate = now, (at - first) / 1e6 / (now - began)
                say(f"{part.stem}: {at / 1e6:.1f} of {total / 1e6:.1f} MB, {rate:.1f} MB/s")
        with writing(part):
            os.fsync(written.fileno())
    return at


def _opened(url: str, headers: Mapping[str, str], timeout: float) -> Any:
    """The answer to a request for a file, a context manager."""
    if addresses.is_remote(url) and not url.startswith("http"):
        return nullcontext(_OfStore(url, headers))
    if not url.startswith(("http://", "https://")):
        raise UserError("expected http:// or https://", code="server_refused", where=url)
    proxies = urllib.request.getproxies()
    for scheme in ("http", "https"):
        kept = os.environ.get(f"{scheme}_proxy{_KEEP_PROXIES}")
        if kept:
            proxies.setdefault(scheme, kept)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=timeout)


class _OfStore:
    """A file of a store as http would answer for it."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        try:
            found = stores.identity_of(url)
        except OSError as error:
            raise _unreadable(error, url) from error
        self._url, self._at, self._end = url, 0, found.bytes
        goes_on = found.mark and headers.get("If-Range") == found.mark
        if goes_on:
            self._at = int(headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.status = http.client.PARTIAL_CONTENT if goes_on else http.client.OK
        self.headers = {
            "ETag": found.mark,
            "Content-Length": f"{self._end - self._at}",
            "Content-Range": f"bytes {self._at}-",
        }

    def read1(self, _: int) -> bytes:
        length = min(_PART_BYTES, self._end - self._at)
        if length <= 0:
            return b""
        content = stores.fetch(self._url, self._at, length, kept=False)
        self._at += length
        return content


def _check_address(url: str) -> str:
    other = " (AWS_ENDPOINT_URL for a store other than Amazon's)" if url.startswith("s3") else ""
    return f"check the network and the address{other}"


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


def _size(part: Path) -> int:
    with suppress(OSError):
        return part.stat().st_size
    return 0


def _note(part: Path, url: str, headers: Any) -> None:
    """Records the version of the partial file, if the server names one."""
    note = {"url": url, "version": stores.mark_in(headers, strong=True)}
    with writing(part):
        replace_file(_note_of(part), json.dumps(note).encode())


def _version_of(part: Path, url: str) -> str:
    """Version of the partial file, for If-Range; "" without a resumable one."""
    if not _size(part):
        return ""
    try:
        note = json.loads(read_file(_note_of(part), _MOST_NOTE))
        return str(note["version"]) if note["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _note_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _drop(part: Path) -> None:
    for path in (part, _note_of(part)):
        with suppress(OSError):
            path.unlink(missing_ok=True)
