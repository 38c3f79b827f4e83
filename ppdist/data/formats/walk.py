"""The files below a folder, also where links lead."""

import os
from collections.abc import Iterator


def files_below(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Absolute paths, in an order that does not depend on the file system.

    Hidden files and folders, and what macOS adds to archives (`__MACOSX`), are left out.  Links to
    files and folders are followed, without end in no case: a linked folder counts once, and only if
    it lies outside `folder` (inside, it is met by its own name) and not above it.
    """
    start, top = os.path.abspath(folder), os.path.realpath(folder)
    seen: set[str] = set()
    for place, below, files in os.walk(start, followlinks=True):
        real = os.path.realpath(place)
        own_name = os.path.join(top, os.path.relpath(place, start))
        if real in seen or _inside(top, real) or (_inside(real, top) and real != own_name):
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not is_no_data(name))
        for file in sorted(files):
            if not is_no_data(file):
                yield f"{place}{os.sep}{file}"


def is_no_data(name: str) -> bool:
    """Whether a file or folder is none of the user's data by its name."""
    return name.startswith(".") or name == "__MACOSX"


def _inside(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, "")) and path != folder
