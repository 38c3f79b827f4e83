"""Resumable, checked download of a file; whole or not at all.

    FILE.part, FILE.part.json   what has arrived, and of which address and version it is
    FILE.lock                   one process of a host downloads, the others wait for it
    FILE                        appears by a rename, when all bytes are there and the checksum holds

Only the standard library: docs/dev/libraries.md says what packages for this lack.  Proxies are
those of the environment.
"""

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ppdist.common.errors import UserError
from ppdist.common.files import FileLock, make_folder, open_file, read_file, replace_file, writing
from ppdist.common.machine import free_disk
from ppdist.storage.identity import mark_in

_BLOCK_BYTES = 1 << 18
_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each new attempt; one that got bytes starts anew
_MOST_WAIT = 60.0  # seconds that a server may ask for
_MOST_ATTEMPTS = 1 << 12  # however little each brings
_REPORT_SECONDS = 5.0
_MOST_NOTE = 1 << 16  # bytes of FILE.part.json
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
    timeout: float = 30.0,
) -> str:
    """Downloads a file atomically, unless it is already there.

    It waits until no other process of this host downloads it.  A cut, a silent server, and answers
    such as 503 are retried, from where it stopped if the server can; a later call resumes, too.

    Args:
        url: http or https.
        file: its place; the folder is made.
        sha256: hexadecimal; None: nobody published one, and the number of bytes alone is checked.
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
        resumed = _arrive(url, part, fix, say, timeout)
        found = sha256_of(part)
        if sha256 and found != sha256 and resumed:  # perhaps halves of two versions
            _drop(part)
            _arrive(url, part, fix, say, timeout)
            found = sha256_of(part)
        if sha256 and found != sha256:
            _drop(part)
            raise UserError(
                f"SHA-256 is {found}, expected {sha256}: the file was changed or damaged on its "
                "way, and was deleted",
                code="download_damaged",
                where=url,
                fix=fix,
            )
        with writing(file):
            part.replace(file)
        _drop(part)
    return found


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
        except OSError:  # a file system without locks: each writes for itself, and begins anew
            yield file.with_name(f"{file.name}.{os.getpid()}.part")
        else:
            yield file.with_name(f"{file.name}.part")
    finally:
        lock.close()


class _Cut(Exception):
    """An attempt ended before the file did.

    wait: seconds that the server asks for.
    """

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def _arrive(url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float) -> bool:
    """Downloads all bytes of the file into `part`, with retries.

    Returns: whether some were there before.
    """
    resumed, fruitless = False, 0
    for _ in range(_MOST_ATTEMPTS):
        before = _size(part)
        try:
            resumed = _attempt(url, part, fix, say, timeout) or resumed
            return resumed
        except _Cut as cut:
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless > len(_WAITS):
                arrived = f"; {_size(part)} bytes are kept, and the next start goes on" * (
                    _size(part) > 0
                )
                raise UserError(
                    f"cannot be downloaded: {cut}{arrived}",
                    code="download_failed",
                    where=url,
                    fix=fix,
                ) from cut
            pause = min(_MOST_WAIT, max(cut.wait, _WAITS[max(0, fruitless - 1)]))
            say(f"{url}: {cut}; trying again in {pause:g} s")
            time.sleep(pause)
    raise UserError(
        f"cannot be downloaded: cut off {_MOST_ATTEMPTS} times",
        code="download_failed",
        where=url,
        fix=fix,
    )


def _attempt(url: str, part: Path, fix: str, say: Callable[[str], None], timeout: float) -> bool:
    """Makes one request.

    Returns: whether it resumed an earlier one.  Raises: _Cut.
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
                raise _Cut("the server sent another part than it was asked for")
            at = at if goes_on else 0
            total = at + _length_of(answer, url, fix)
            _require_room(part, total - at, url)
            if not goes_on:
                _note(part, url, answer.headers)
            arrived = _copy(answer, part, at, total, say)
    except urllib.error.HTTPError as error:
        with error:
            return _refused(error, url, part, at, fix)
    except (http.client.HTTPException, OSError) as error:
        raise _Cut(_reason(error)) from error
    if arrived != total:
        raise _Cut(f"cut off after {arrived} of {total} bytes")
    return goes_on


def _refused(error: urllib.error.HTTPError, url: str, part: Path, at: int, fix: str) -> bool:
    """Handles an HTTP status other than success.

    Returns: True: all bytes are there already.
    Raises: _Cut: worth a retry.  UserError: refused.
    """
    if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and at:
        if error.headers.get("Content-Range") == f"bytes */{at}":
            return True
        _drop(part)
        raise _Cut("the file there has become a shorter one") from error
    if error.code in _PASSING:
        raise _Cut(f"HTTP {error.code} {error.reason}", _asked(error.headers)) from error
    raise UserError(
        f"HTTP {error.code} {error.reason}", code="server_refused", where=url, fix=fix
    ) from error


def _length_of(answer: Any, url: str, fix: str) -> int:
    """Number of bytes in the response.

    Raises: UserError: it is no file, or its length is unknown.
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
        written = part.open("ab" if at else "wb", buffering=0)  # a full disk is noticed here
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
    if not url.startswith(("http://", "https://")):
        raise UserError("expected http:// or https://", code="server_refused", where=url)
    proxies = urllib.request.getproxies()
    for scheme in ("http", "https"):
        kept = os.environ.get(f"{scheme}_proxy{_KEEP_PROXIES}")
        if kept:
            proxies.setdefault(scheme, kept)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=timeout)


def _reason(error: Exception) -> str:
    """Why no answer came, in short."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "the server is silent"
    return f"{cause}" or type(cause).__name__


def _asked(headers: Any) -> float:
    """Seconds of Retry-After; 0: none, or a date."""
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def _require_room(part: Path, missing: int, url: str) -> None:
    free = free_disk(part.parent)
    if missing > free:
        raise UserError(
            f"disk full: {url} needs {missing / 1e6:.1f} MB more, {free / 1e6:.1f} MB are free",
            code="disk_full",
            where=f"{part.parent}",
            fix="delete files, or set XDG_CACHE_HOME to a larger disk",
        )


# --- what is known of a part ----------------------------------------------------------------------


def _size(part: Path) -> int:
    with suppress(OSError):
        return part.stat().st_size
    return 0


def _note(part: Path, url: str, headers: Any) -> None:
    """Records the version of the partial file, if the server names one."""
    note = {"url": url, "version": mark_in(headers, strong=True)}
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
