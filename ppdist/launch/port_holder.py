"""Which process listens on a port of this machine, as Linux shows it under /proc."""

import contextlib
import os
from pathlib import Path

_LISTENING = "0A"  # state in /proc/net/tcp
_COMMAND_LENGTH = 200


def holder(port: int) -> str:
    """`process 123 (python train.py)`; "" where that cannot be found out, as for other users'."""
    inodes = {f"socket:[{inode}]" for inode in _inodes(port)}
    for place in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in inodes for link in (place / "fd").iterdir()):
                return f"process {place.name} ({_command(place)})"
    return ""


def _inodes(port: int) -> set[str]:
    """Of the sockets that listen on it."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found


def _command(place: Path) -> str:
    text = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= _COMMAND_LENGTH else f"{shown[:_COMMAND_LENGTH]}..."
