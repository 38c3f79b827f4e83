"""Drafts: files and folders that a process has not finished writing.

.NAME.HOST.PID   beside NAME, under which a process writes it, or deletes it
"""

import os
import re
import shutil
import socket
import time
from pathlib import Path

from ppdist.common.process import is_alive

_ABANDONED_SECONDS = 24 * 3600.0  # whatever process has the number of an older one


def draft_of(path: Path) -> Path:
    """The name under which this process writes, or deletes, a path."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def remove_drafts(folder: Path, names: str) -> None:
    """Deletes drafts of this host's ended processes; others after a day.

    Args: names: regular expression of what they are drafts of.
    """
    pattern = re.compile(rf"\.({names})\.((?P<host>.+)\.)?(?P<pid>\d+)")
    for path in folder.glob(".*"):
        made_by = pattern.fullmatch(path.name)
        if made_by is None or _is_in_use(path, made_by["host"], int(made_by["pid"])):
            continue
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


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
