"""Folders of stored reference values, some of them exchanged."""

from pathlib import Path

import numpy as np


def with_one(stored: Path, folder: Path, name: str, **changes: np.ndarray | None) -> Path:
    """A folder with one of the stored references, some arrays exchanged (None: left out)."""
    (folder / "parity_weights.py").write_bytes((stored / "parity_weights.py").read_bytes())
    with np.load(stored / f"{name}.npz") as archive:
        values = {**archive, **changes}
    np.savez(folder / f"{name}.npz", **{k: v for k, v in values.items() if v is not None})
    return folder
