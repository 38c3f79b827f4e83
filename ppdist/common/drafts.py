"""Drafts: files and folders that a process has not finished writing.

.NAME.HOST.PID.xRANDOM   beside NAME, under which a process writes or deletes it (`draft_of`)
"""

import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from ppdist.common.machine import is_alive

_ABANDONED_SECONDS = 24 * 3600.0  # after which a draft is deleted even if its pid is in use


def remove_drafts(folder: Path, names: str) -> None:
    """Deletes drafts of processes that have ended on this host, and drafts more than a day old.

    Args: names: regular expression that matches the names of the drafted files.
    """
    pattern = re.compile(rf"\.({names})\.((?P<host>.+)\.)?(?P<pid>\d+)(\.x[0-9a-f]{{8}})?")
    for path in folder.glob(".*"):
        owner = pattern.fullmatch(path.name)
        if owner is None or _is_in_use(path, owner["host"], int(owner["pid"])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_in_use(draft: Path, host: str | None, pid: int) -> bool:
    """Returns True if a process may still write the draft, as far as this host can tell."""
    try:
        is_old = time.time() - draft.lstat().st_mtime > _ABANDONED_SECONDS
    except OSError:  # gone already
        return True
    if is_old or host is None:
        return False
    if host != socket.gethostname():
        return True
    return pid != os.getpid() and is_alive(pid)
