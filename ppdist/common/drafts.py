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

_ABANDONED_SECONDS = 24 * 3600.0  # whatever process has the number of an older one


def remove_drafts(folder: Path, names: str) -> None:
    """Deletes drafts of this host's ended processes; others after a day.

    Args: names: regular expression of what they are drafts of.
    """
    pattern = re.compile(rf"\.({names})\.((?P<host>.+)\.)?(?P<pid>\d+)(\.x[0-9a-f]{{8}})?")
    for path in folder.glob(".*"):
        made_by = pattern.fullmatch(path.name)
        if made_by is None or _is_in_use(path, made_by["host"], int(made_by["pid"])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_in_use(draft: Path, host: str | None, pid: int) -> bool:
    """Whether a process may still write a draft, to this host's knowledge."""
    try:
        old = time.time() - draft.lstat().st_mtime > _ABANDONED_SECONDS
    except OSError:  # gone already
        return True
    if old or host is None:
        return False
    if host != socket.gethostname():
        return True
    return pid != os.getpid() and is_alive(pid)
