"""Measures images a second from plain files, tar shards and an S3 server on loopback.

python -m benchmarks.storage -c CFG [-o KEY=VALUE ...] [--rounds 5] [--batches 8]

The loader prepares batches in this process (data.workers: 0), from each storage in turn; the server
(moto) is a separate process, whose CPU seconds are not counted.  A cold round has an empty cache; a
warm one finds everything in it.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.experiment import load_config
from ppdist.config.train import MicroBatches
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.loading.loader import TrainLoader
from ppdist.data.loading.sampler import TrainSampler

_BATCH_SIZE = 16


class Rate(NamedTuple):
    """The images per second of the clock, and of this process's CPU."""

    clock: float
    cpu: float


def measure_storage(
    config: DataConfig, size: tuple[int, int], *, rounds: int, batches: int
) -> dict[str, Any]:
    """Measures the rates of each storage as ratios to plain files of the same round: median and
    spread.
    """
    with tempfile.TemporaryDirectory() as scratch, _server():
        raw = read_raw(config, "train", ignore_issue)
        for name, shard_bytes in (("files", None), ("shards", 2_000_000)):
            out = Path(scratch, name)
            convert(raw, "coco", out, images="copy", split="train", shard_bytes=shard_bytes)
            _upload(out, f"bucket/{name}")
        part = SplitConfig(images="images/train", annotations="annotations/instances_train.json")
        split = {"format": "coco", "train": part, "val": part, "workers": 0}
        plain = config.model_copy(update=split)
        roots = {"files": f"{scratch}/files", "shards": f"{scratch}/shards",
                  "s3 files": "s3://bucket/files", "s3 shards": "s3://bucket/shards"}  # fmt: skip
        rates_by_storage: dict[str, list[Rate]] = {}
        # The first round, which does not count, fills caches of the system and of imports.
        for number in range(rounds + 1):
            for name, root in roots.items():
                # A cache for each round: its first visit is cold.
                os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache-{number}"
                storage_config = plain.model_copy(update={"root": root})
                for heat in ("",) if not root.startswith("s3:") else (" cold", " warm"):
                    rate = _rate(storage_config, size, batches)
                    if number:
                        rates_by_storage.setdefault(name + heat, []).append(rate)
    return {
        name: {
            kind: _ratios([getattr(a, kind) for a in rates], [getattr(b, kind) for b in first])
            for kind in Rate._fields
        }
        | {"images_per_cpu_second": round(median(rate.cpu for rate in rates), 1)}
        for first in (rates_by_storage["files"],)
        for name, rates in rates_by_storage.items()
    }


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Returns [lowest, median, highest] of the ratios of neighbours."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    return [round(ratio, 3) for ratio in (ratios[0], median(ratios), ratios[-1])]


def _rate(config: DataConfig, size: tuple[int, int], batches: int) -> Rate:
    dataset = read_split(config, "train")
    sampler = TrainSampler(
        dataset_size=len(dataset.records),
        batches=MicroBatches(_BATCH_SIZE, _BATCH_SIZE, spread=False),
        rank=0, world=1, seed=0, start_step=0, end_step=batches, sizes=[size],
    )  # fmt: skip
    loader = TrainLoader(dataset, config, sampler, seed=0, epochs=1000)
    began, cpu_began = time.perf_counter(), time.process_time()
    images = sum(int(batch.images_B3HW.shape[0]) for batch in loader)
    clock, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    loader.close()
    return Rate(images / clock, images / cpu)


@contextmanager
def _server() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def _upload(folder: Path, address: str) -> None:
    import fsspec

    store = fsspec.filesystem("s3", skip_instance_cache=True)
    store.makedirs(address.partition("/")[0], exist_ok=True)
    for file in folder.rglob("*"):
        if file.is_file():
            store.pipe_file(f"{address}/{file.relative_to(folder)}", file.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("-o", "--override", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.override)
    report = measure_storage(
        config.data, config.model.image_size, rounds=arguments.rounds, batches=arguments.batches
    )
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
