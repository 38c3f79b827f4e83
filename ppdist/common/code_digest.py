"""Digests of the files of ppdist: ranks compare them, a checkpoint holds one of all."""

import json
from functools import cache
from pathlib import Path

import ppdist
from ppdist.common.files import digest_of_file, digest_of_text


@cache
def digests_of_package() -> dict[str, str]:
    """Returns a digest of every file of ppdist by path, computed at the first call."""
    package = Path(ppdist.__file__).parent
    return {
        f"ppdist/{path.relative_to(package).as_posix()}": digest_of_file(path)
        for path in sorted(package.rglob("*.py"))
    }


def digest_of_package() -> str:
    """Returns one digest of all files of ppdist."""
    return digest_of_text(json.dumps(digests_of_package()))
