"""Measures reading the annotations of sets as large as COCO and Objects365 on 1, 2, 4, 8 ranks.

    python benchmarks/scale.py make coco DIR          # or objects365; images are empty files
    python benchmarks/scale.py measure DIR [--ranks 1 2 4 8] [--json FILE]

It measures time and memory.  Each start goes through fleetrun: ranks join, read the set as training
does, and end.  The first start with a number of ranks finds no cache.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Report = dict[str, Any]


class Size(NamedTuple):
    """The size of a set.

    points: coordinates of the outline of each object, 0: none.
    """

    images: int
    boxes: int
    classes: int
    points: int


SIZES = {
    "coco": Size(images=118_287, boxes=860_000, classes=80, points=40),
    "objects365": Size(images=1_700_000, boxes=25_000_000, classes=365, points=0),
}
_SIDES = (640, 480)
_IN_A_FOLDER = 10_000  # images
_AT_ONCE = 10_000  # objects written at a time
_SAMPLE_SECONDS = 0.05  # between two samples; one takes 10 ms of a core, more with much memory
_SAMPLING = 0.2  # largest share of a core that sampling may take


def make(size: Size, folder: Path) -> Path:
    """Writes a COCO file and empty images beside it, and returns the file."""
    rng = np.random.default_rng(0)
    file = folder / "train.json"
    names = [f"{index // _IN_A_FOLDER:04d}/{index:012d}.jpg" for index in range(size.images)]
    for index, name in enumerate(names):
        if index % _IN_A_FOLDER == 0:
            (folder / "images" / name).parent.mkdir(parents=True)
        (folder / "images" / name).touch()
    with open(file, "w", encoding="ascii") as output:
        output.write('{"info": {"description": "made by benchmarks/scale.py"}, "images": [')
        width, height = _SIDES
        for index, name in enumerate(names):
            entry = {"id": index + 1, "file_name": name, "width": width, "height": height}
            entry |= {"license": 3, "coco_url": f"http://images.example.org/{name}"}
            output.write(", " * (index > 0) + json.dumps(entry))
        output.write('], "annotations": [')
        owners_O = np.sort(rng.integers(1, size.images + 1, size.boxes))
        for first in range(0, size.boxes, _AT_ONCE):
            output.write(", " * (first > 0) + _annotations(rng, owners_O, first, size))
        entries = [{"id": k + 1, "name": f"class {k + 1}"} for k in range(size.classes)]
        output.write(f'], "categories": {json.dumps(entries)}}}')
    return file


def _annotations(rng: np.random.Generator, owners_O: np.ndarray, first: int, size: Size) -> str:
    """Generates some of the annotations, as text."""
    owners = owners_O[first : first + _AT_ONCE].tolist()
    corners = (rng.random((len(owners), 2)) * (400, 300)).round(2).tolist()
    sides = (rng.random((len(owners), 2)) * (200, 150) + 4).round(2).tolist()
    labels = rng.integers(1, size.classes + 1, len(owners)).tolist()
    points = (rng.random((len(owners), size.points)) * 400).round(2).tolist()
    return ", ".join(
        json.dumps(
            {
                **({"segmentation": [outline]} if outline else {}),
                "area": round(w * h, 4),
                "iscrowd": 0,
                "image_id": owner,
                "bbox": [x, y, w, h],
                "category_id": label,
                "id": first + index + 1,
            }
        )
        for index, (owner, (x, y), (w, h), label, outline) in enumerate(
            zip(owners, corners, sides, labels, points)
        )
    )


def measure(folder: Path, ranks: list[int]) -> Report:
    """Measures the first and the second start on each number of ranks; see `_start`."""
    report: Report = {"megabytes": round((folder / "train.json").stat().st_size / 1e6)}
    for count in ranks:
        cache = folder / "cache"
        # The first start of a number of ranks must find no cache.
        shutil.rmtree(cache, ignore_errors=True)
        starts = {name: _start(folder, count, cache) for name in ("first", "second")}
        report[f"{count} ranks"] = starts
        print(f"{count} ranks: {json.dumps(starts)}", file=sys.stderr, flush=True)
    return report


def _start(folder: Path, count: int, cache: Path) -> Report:
    """Measures one start, summed over the ranks of this host.

    Returns: cpu_seconds, seconds (the slowest rank) of reading; peak_mb, kept_mb: memory above that
        before reading, while it lasts and after; shared pages count once.  The cost of
        sampling the memory is not part of the CPU seconds.
    """
    out = folder / "figures"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    command = [sys.executable, "-m", "ppdist", "launch", "--nproc_per_node", str(count)]
    command += ["--log_dir", str(folder / "log"), __file__, "rank", str(folder)]
    variables = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=variables, check=True, stdout=sys.stderr)
    figures = [json.loads(file.read_bytes()) for file in sorted(out.glob("*.json"))]
    assert len(figures) == count
    report = {
        key: round(sum(rank_figures[key] for rank_figures in figures), 2) for key in figures[0]
    }
    return report | {"seconds": round(max(rank_figures["seconds"] for rank_figures in figures), 2)}


def rank(folder: Path) -> None:
    """Reads the set on one rank, and writes its figures."""
    from ppdist.config.data import DataConfig, SplitConfig
    from ppdist.config.distributed import DistributedConfig
    from ppdist.distributed import comm
    from ppdist.engine.data import read_sets

    comm.init("cpu", DistributedConfig(timeout_seconds=1800))
    split = SplitConfig(images="images", annotations="train.json")
    config = DataConfig(root=str(folder), train=split, val=split, check_images="none")
    classes = len(json.loads(_tail(folder / "train.json")))
    comm.barrier()
    memory = _Memory()
    wall, cpu = time.monotonic(), time.process_time()
    checked = read_sets(config, classes, False)
    seconds, cpu = time.monotonic() - wall, time.process_time() - cpu
    figures = {"seconds": seconds, "cpu_seconds": cpu - memory.cpu_seconds}
    comm.barrier()
    comm.keep_freed_memory()
    figures |= memory.end()
    assert len(checked.train.records) > 0
    comm.barrier()  # else the pages of ranks that have ended would count for the remaining ones
    (folder / "figures" / f"{comm.rank()}.json").write_text(json.dumps(figures))


def _tail(file: Path) -> bytes:
    """Reads the list of classes at the end of a file that `make` has written."""
    with open(file, "rb") as content:
        content.seek(-min(100_000, file.stat().st_size), os.SEEK_END)
        return content.read().rpartition(b'"categories": ')[2].removesuffix(b"}")


class _Memory:
    """The memory of this process above its start, sampled in a thread.

    cpu_seconds: of sampling.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self._before = self._peak = _pss_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        pause = _SAMPLE_SECONDS
        while not self._ended.wait(pause):
            before = self.cpu_seconds
            self._peak = max(self._peak, _pss_mb())
            self.cpu_seconds = time.thread_time()
            pause = max(_SAMPLE_SECONDS, (self.cpu_seconds - before) / _SAMPLING)

    def end(self) -> dict[str, float]:
        self._ended.set()
        self._thread.join()
        return {"peak_mb": self._peak - self._before, "kept_mb": _pss_mb() - self._before}


def _pss_mb() -> float:
    """Returns the memory of this process, with its part of shared pages."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    making = what.add_parser("make")
    making.add_argument("size", choices=[*SIZES])
    making.add_argument("folder", type=Path)
    measuring = what.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    measuring.add_argument("--json", type=Path)
    what.add_parser("rank").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "make":
        print(make(SIZES[arguments.size], arguments.folder.resolve()))
    elif arguments.what == "rank":
        rank(arguments.folder)
    else:
        report = measure(arguments.folder.resolve(), arguments.ranks)
        print(json.dumps(report, indent=1))
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
