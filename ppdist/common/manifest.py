"""The manifest of a checkpoint: its files with their sizes and checksums."""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppdist.common.errors import WeightsError
from ppdist.common.files import read_file

MANIFEST = "manifest.json"
CARD_FILE = "model_card.json"  # in a checkpoint
CARD_NOTE = "model_card"  # the same text in .safetensors, .npz and ONNX
MAX_BYTES = 1 << 36  # largest file of weights: 64 GiB
_STEP = re.compile(r"step-\d+")
_MOST_BYTES = 1 << 22  # largest manifest; real ones have some hundred bytes


def follow_pointer(link: Path) -> Path:
    """Returns the checkpoint that `last` or `best` names; other paths are returned unchanged.

    In a folder that was copied from an object store they are text, in place of links.
    """
    with suppress(OSError, ValueError):
        if link.is_file() and _STEP.fullmatch(name := read_file(link, 99).decode().strip()):
            return link.with_name(name)
    return link


def checked_files(
    folder: Path, names: Sequence[str] | None = None, most_bytes: int = MAX_BYTES
) -> dict[str, bytes]:
    """Reads files of a checkpoint, by name, and checks them against its manifest.

    Args: names: reads only the first of these that the manifest has; None: all files.
    Returns: contents by file name; {} if the manifest has none of the names.
    Raises: WeightsError: a file is absent, torn, altered, or larger than `most_bytes`; the error
        names it.
    """
    path, files = folder / MANIFEST, dict[str, bytes]()
    try:
        manifest = json.loads(read_file(path, _MOST_BYTES))["files"]
        present = [name for name in names or () if name in manifest]
        for name in manifest if names is None else present[:1]:
            if Path(name).name != name:
                raise ValueError(f"{name!r} is in another folder")
            path = folder / name
            files[name] = read_file(path, most_bytes)
            if hashlib.sha256(files[name]).hexdigest() != manifest[name]["sha256"]:
                raise WeightsError(
                    f"damaged: its SHA-256 is not the one in {MANIFEST}",
                    code="checkpoint_damaged",
                    where=str(path),
                )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"damaged checkpoint: {error!r}", code="checkpoint_damaged", where=str(path)
        ) from error
    return files
