"""Checkpoints: one directory each, written atomically, readable without this package.

    checkpoints/step-00001200/
        model.safetensors      weights and statistics of the model
        ema.safetensors        their average (absent when EMA is off)
        optimizer.safetensors  `<parameter key>/<accumulator>`
        averaging.safetensors  what ranks have kept of compressed gradients (absent without)
        state.json             step, epoch, best metric, scaler, ...
        config.yml             the resolved configuration
        manifest.json          size and SHA-256 of every file above
    checkpoints/last, best     links to one of them

A directory appears under its name only when everything in it is on disk (written beside, fsync,
rename), so a kill at any moment leaves the previous checkpoint in place.  Nothing here is pickled.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from safetensors.numpy import load_file, save

from ppdist.config import Section
from ppdist.errors import CheckpointError

_NAME = re.compile(r"^step-(\d+)$")
_MANIFEST = "manifest.json"


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    every_epochs: float = Field(
        default=1.0, ge=0, description="Write one every so many epochs; 0: only at the end."
    )
    every_steps: int | None = Field(
        default=None, gt=0, description="Write one every so many optimizer steps instead."
    )
    keep: int = Field(
        default=3, gt=0, description="How many of the newest stay; best and last always do."
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums were verified."""

    path: Path
    state: dict[str, Any]
    digest: str  # SHA-256 of its manifest: the same for two that hold the same, and no others

    def arrays(self, group: str) -> dict[str, np.ndarray] | None:
        """Arrays of one group (`model`, `ema`, `optimizer`, ...); None when it was not saved."""
        file = self.path / f"{group}.safetensors"
        return load_file(file) if file.exists() else None


def save_checkpoint(
    folder: Path,
    step: int,
    groups: dict[str, dict[str, np.ndarray]],
    state: dict[str, Any],
    config_yaml: str,
) -> Path:
    """Writes `folder/step-N` atomically and points `last` at it; rank 0 alone calls it.

    Args:
        groups: name -> arrays; one .safetensors file each.
        state: what JSON can hold.
        step: has no checkpoint in `folder` yet; see `set_aside`.
    Raises: CheckpointError: the disk refused (full, read-only); older checkpoints are untouched.
    """
    final = path_of(folder, step)
    draft = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        files = {f"{name}.safetensors": save(_packed(arrays)) for name, arrays in groups.items()}
        files["state.json"] = json.dumps(state, indent=1).encode()
        files["config.yml"] = config_yaml.encode()
        manifest = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }
        files[_MANIFEST] = json.dumps({"step": step, "files": manifest}, indent=1).encode()
        for name, data in files.items():
            _write_durably(draft / name, data)
        _sync_folder(draft)
        draft.rename(final)
        _sync_folder(folder)
        point(folder / "last", final)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{final}: cannot write the checkpoint: {error}; older checkpoints are untouched"
        ) from error
    return final


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:08d}"


def point(link: Path, target: Path) -> None:
    """Makes `link` a relative link to a checkpoint beside it, in one atomic step."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target.name)
    draft.replace(link)


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints and whatever `best` and `last` point at; and
    drafts that a killed process left."""
    for draft in folder.glob(".step-*"):
        shutil.rmtree(draft, ignore_errors=True)
    named = {link.resolve() for link in (folder / "best", folder / "last") if link.is_symlink()}
    for path in _steps(folder)[keep:]:
        if path.resolve() not in named:
            shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, step: int) -> Path | None:
    """Moves checkpoints beyond a step out of the way of a run that starts there; rank 0 alone.

    They belong to another run (a step of 0: all of them do), or are damaged.  Left in place they
    would pass for the newest ones of this run: `prune` would keep them and delete its own, and
    `newest_valid` would resume from them.

    Returns: where they are now, a new directory beside `folder`; None: there were none.
    Raises: CheckpointError: the disk refused.
    """
    found = [path for path in _steps(folder) if int(path.name.removeprefix("step-")) > step]
    if not found:
        return None
    names = (folder.with_name(f"{folder.name}-old-{n}") for n in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    try:
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
        for link in (folder / "best", folder / "last"):
            if link.is_symlink() and not link.exists():
                target = aside / link.readlink().name
                link.unlink()
                if target.exists():
                    point(aside / link.name, target)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot move older checkpoints: {error}") from error
    return aside


def read_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint directory after checking every file against its manifest.

    Raises: CheckpointError: absent, torn, or altered; the message names the file.
    """
    manifest_file = path / _MANIFEST
    if not manifest_file.is_file():
        raise CheckpointError(f"{path}: not a checkpoint (it has no {_MANIFEST})")
    try:
        listed = manifest_file.read_bytes()
        manifest = json.loads(listed)["files"]
        for name, expected in manifest.items():
            data = (path / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != expected["sha256"]:
                raise CheckpointError(
                    f"{path / name}: damaged (its SHA-256 is not the one in {_MANIFEST}); "
                    f"use an older checkpoint"
                )
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: unreadable checkpoint: {error}") from error
    return Checkpoint(path=path, state=state, digest=hashlib.sha256(listed).hexdigest())


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that passes its checks, and why newer ones were passed over."""
    reasons: list[str] = []
    for path in _steps(folder):
        try:
            return read_checkpoint(path), reasons
        except CheckpointError as error:
            reasons.append(str(error))
    return None, reasons


def _steps(folder: Path) -> list[Path]:
    """Checkpoint directories, newest step first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NAME.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _packed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: np.ascontiguousarray(array) for key, array in arrays.items()}


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
