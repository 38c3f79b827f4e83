"""The manifest of a checkpoint: its files with their sizes and checksums."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ppdist.common.errors import WeightsError
from ppdist.common.files import read_file

MANIFEST = "manifest.json"
CARD_FILE = "model_card.json"  # in a checkpoint
CARD_NOTE = "model_card"  # the same text in .safetensors, .npz and ONNX
MAX_BYTES = 1 << 36  # of a file of weights: 64 GiB
_MOST_BYTES = 1 << 22  # of a manifest; real ones have some hundreds


def checked_files(
    folder: Path, names: Sequence[str] | None = None, most_bytes: int = MAX_BYTES
) -> dict[str, bytes]:
    """Reads files of a checkpoint, by name, and checks them against its manifest.

    Args: names: reads only the first of these that the manifest has; None: all files.
    Returns: {}: the manifest has none of them.
    Raises: WeightsError: absent, torn, altered, or larger than `most_bytes`; it names the file.
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
