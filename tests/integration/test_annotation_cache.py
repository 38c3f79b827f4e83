"""Annotations of a host read once and kept: records, samples and losses as without, bit for bit.

This file is also what the ranks run under fleetrun: `test_annotation_cache.py FOLDER WAY`.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ppdist.config.data import DataConfig
from ppdist.data.checks.before_training import Checked
from ppdist.data.datasets import annotation_cache, build
from ppdist.data.datasets.annotation_cache import Read
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.data.types import Batch, Complain, DetectionSet, RawColumns, Records, Split
from ppdist.distributed import comm
from ppdist.engine import build as engine_build
from ppdist.engine import data
from tests.forked import ROOT

# How a start gets its annotations: each rank by itself, as objects; the same in columns; one rank
# for all, which keeps them; and from what was kept.
WAYS = ("each", "shared", "first", "second")
OVERRIDES = (
    "train.max_steps=5", "train.batch_size_per_card=2", "log.every_steps=1", "data.workers=1",
    "data.augment.mosaic=0.5", "evaluate.every_epochs=1",
)  # fmt: skip


def start(way: str, folder: Path) -> dict[str, Any]:
    """Reads the data, trains and evaluates; what this rank saw of it."""
    from tests.unit.engine.runs import run_to_end

    sets, were_kept, samples = [], [], hashlib.blake2b()
    kept_or_read, read_sets, steps = build.kept_or_read, data.read_sets, data.BatchSource.steps

    def counted(*words: Any, **options: Any) -> tuple[Read, bool]:
        found, kept = kept_or_read(*words, **options)
        were_kept.append(kept)
        return found, kept

    def taken(*words: Any) -> Checked:
        checked = read_sets(*words)
        sets.extend(each for each in checked[:2] if each is not None)
        return checked

    def watched(self: data.BatchSource, *words: Any) -> Iterator[list[Batch]]:
        for batches in map(list, steps(self, *words)):
            for batch in batches:
                for tensor in (batch.image_index_B, batch.images_B3HW, batch.boxes_BM4):
                    samples.update(tensor.numpy().tobytes())
            yield batches

    with ExitStack() as changed:

        def put(place: object, name: str, value: object) -> None:
            changed.enter_context(patch.object(place, name, value))

        put(build, "kept_or_read", counted)
        put(engine_build, "read_sets", taken)
        put(data.BatchSource, "steps", watched)
        put(annotation_cache, "_SETTLED_SECONDS", -60.0)
        put(annotation_cache, "_SHORT_SECONDS", 0.0 if way in ("first", "second") else 60.0)
        if way == "each":
            put(data, "read_on_host", lambda read, root: read())
            put(build, "_columns", as_objects)
        run_to_end(folder / "data", folder / way, *OVERRIDES, evaluate=True)
    return {
        "kept": were_kept,
        "records": [digest(each) for each in sets],
        "samples": samples.hexdigest(),
        "losses": losses(folder / way),
    }


def as_objects(config: DataConfig, split: Split, complain: Complain, masks: bool) -> RawColumns:
    """A split with an object in Python for each box."""
    raw = build.read_raw(config, split, complain)
    return RawColumns.of(raw, masks=masks)


def digest(dataset: DetectionSet) -> str:
    content = hashlib.blake2b(repr(asdict(replace(dataset, records=()))).encode())
    for name, array in sorted(Records.of(dataset.records).arrays.items()):
        content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return content.hexdigest()


def losses(run: Path) -> list[tuple[int, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines) if "loss" in each]


def main(folder: Path, way: str) -> None:
    found = start(way, folder)
    (folder / f"{way}-{comm.rank()}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_annotations_read_once_a_host_train_the_same(ranks: int, tmp_path: Path) -> None:
    make_shapes(tmp_path / "data", train=20, val=6, size=64, seed=0)
    launch = [sys.executable, "-m", "ppdist", "launch", "--nproc_per_node", str(ranks)]
    launch += ["--log_dir", str(tmp_path / "log"), __file__, str(tmp_path)]
    variables = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    samples = set()
    for way in WAYS:
        done = subprocess.run([*launch, way], env=os.environ | variables, timeout=300, check=False)
        logs = sorted((tmp_path / "log").glob("workerlog.*"))
        assert done.returncode == 0, "\n".join(log.read_text()[-4000:] for log in logs)
        for rank in range(ranks):
            expected, found = (
                json.loads((tmp_path / f"{each}-{rank}.json").read_text()) for each in ("each", way)
            )
            is_kept = way == "second" or (way == "first" and rank > 0)
            assert found["kept"] == [is_kept] * 2, (rank, way)  # train and val
            for what in ("records", "samples", "losses"):
                assert found[what] == expected[what], (rank, way, what)
            assert len(found["losses"]) == 5
            samples.add(found["samples"])
    assert len(samples) == ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
