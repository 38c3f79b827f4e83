"""Two trainings must not write into one folder: the second is refused while the first lives."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ppdist.errors import ConfigError

_FILE = "run.lock"
_PATIENCE_SECONDS = 5.0  # a run that was killed just now takes a moment to be gone
_held: dict[Path, int] = {}  # folder -> descriptor, open for the life of this process


def hold(output_dir: Path) -> list[str]:
    """Takes `output_dir` for this process until it ends, however it ends; rank 0 alone calls it.

    The lock belongs to the process, not to the file, which stays and means nothing by itself.  It
    is one of POSIX rather than flock's: that would pass to the loader's workers, which may outlive
    a killed rank for a moment.  Such a lock ends when its process closes the file anywhere, so it
    is opened here alone, and once.

    Returns: a warning where the file system has no locks, else nothing.
    Raises: ConfigError: another process holds it, or nothing can be written there.
    """
    folder = output_dir.resolve()
    if folder in _held:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {output_dir}: {error}",
            code="folder_unwritable",
            where="output_dir",
        ) from error
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                return [
                    f"output_dir: {output_dir} is on a file system without locks "
                    f"({error.strerror}): nothing keeps a second training from writing there"
                ]
            if time.monotonic() > deadline:
                holder = _described(os.read(handle, 4096))
                os.close(handle)
                raise ConfigError(
                    f"{output_dir}: another training writes there ({holder})",
                    code="output_dir_in_use",
                    where="output_dir",
                    fix=(
                        "wait for it or stop it, or give this one a folder of its own: -o "
                        "output_dir=..."
                    ),
                ) from error
        time.sleep(0.1)
    _held[folder] = handle
    about = {"pid": os.getpid(), "host": socket.gethostname()}
    about["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(about).encode(), 0)
    except OSError:  # a full disk: the lock holds all the same
        pass
    return []


def is_held(output_dir: Path) -> bool:
    """Whether a training writes into the folder now, as far as its file system tells."""
    if output_dir.resolve() in _held:  # by this process, which would lose it by looking
        return True
    try:
        handle = os.open(output_dir / _FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(handle)  # and with it the lock, if it was free
    return False


def _described(content: bytes) -> str:
    """`process 123 on host a since 2024-01-01 00:00:00`"""
    try:
        about = json.loads(content)
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has not yet said which"
