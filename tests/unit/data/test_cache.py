"""Decoded images are kept once for a host, and are what the decoder gives, whatever happens."""

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from ppdist.common.opener import Identity, Opener
from ppdist.config.distributed import DistributedConfig
from ppdist.data import cache as cache_module
from ppdist.data.cache import image_offsets, open_cache
from ppdist.data.datasets.build import read_split
from ppdist.data.image import read_image
from ppdist.data.transforms.pipeline import ImageCache
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from tests.distributed import run_on_ranks
from tests.unit.data.sets import coco_config, write_coco

FACTORS = np.array([1, 2, 4, 8, 1, 1], np.uint8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where images are kept on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppdist" / "images"


def small_set(root: Path) -> DetectionSet:
    return read_split(write_coco(root, 6), "train")


def decoded(dataset: DetectionSet, index: int) -> np.ndarray:
    record = dataset.records[index]
    return read_image(record.path, (record.height, record.width), int(FACTORS[index]))


def fill(cache: ImageCache, dataset: DetectionSet) -> None:
    for index in range(len(dataset.records)):
        if cache.get(index) is None:
            cache.put(index, decoded(dataset, index))


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_cached_bytes_come_back_equal_and_read_only(tmp_path, kind, monkeypatch):
    dataset = small_set(tmp_path)
    cache = open_cache(kind, dataset, FACTORS)
    assert all(cache.get(index) is None for index in range(6))
    fill(cache, dataset)
    for index in range(6):
        image_HW3 = cache.get(index)
        np.testing.assert_array_equal(image_HW3, decoded(dataset, index))
        assert image_HW3.dtype == np.uint8
        with pytest.raises(ValueError, match="read-only"):
            image_HW3[0, 0, 0] = 1
    cv2.resize(cache.get(0), (8, 8))  # OpenCV takes what cannot be written to
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    again = open_cache(kind, dataset, FACTORS)
    assert again.get(1) is None
    with pytest.raises(ValueError, match="image 1"):
        again.put(1, decoded(dataset, 0))


def test_an_image_outlives_the_cache_it_came_from(tmp_path):
    dataset = small_set(tmp_path)
    cache = open_cache("ram", dataset, FACTORS)
    fill(cache, dataset)
    image_HW3 = cache.get(0)
    open_files = len(os.listdir("/proc/self/fd"))
    del cache
    gc.collect()
    np.testing.assert_array_equal(image_HW3, decoded(dataset, 0))
    del image_HW3
    assert len(os.listdir("/proc/self/fd")) <= open_files - 1


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_forked_worker_fills_what_the_others_see(tmp_path, kind):
    dataset = small_set(tmp_path)
    cache = open_cache(kind, dataset, FACTORS)
    child = os.fork()
    if child == 0:
        fill(cache, replace(dataset, records=dataset.records[:3]))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    np.testing.assert_array_equal(cache.get(2), decoded(dataset, 2))
    assert cache.get(3) is None


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_disk_cache_serves_next_run_until_an_image_changes(tmp_path, folder):
    dataset = small_set(tmp_path)
    fill(open_cache("disk", dataset, FACTORS), dataset)
    again = open_cache("disk", dataset, FACTORS)
    assert all(again.get(index) is not None for index in range(6))
    assert len(files_in(folder)) == 6
    reduced = open_cache("disk", dataset, np.array([1, 2, 4, 8, 1, 2], np.uint8))
    assert [reduced.get(index) is not None for index in range(6)] == [True] * 5 + [False]
    changed = Path(dataset.records[5].path)
    os.utime(changed, ns=(1, 1))
    assert [again.get(index) is not None for index in range(6)] == [True] * 5 + [False]
    changed.unlink()
    assert again.get(5) is None and again.get(4) is not None


def test_links_in_the_place_of_images_are_replaced_not_followed(tmp_path, folder):
    dataset = small_set(tmp_path)
    (tmp_path / "target").write_bytes(b"precious")
    fill(open_cache("disk", dataset, FACTORS), dataset)
    for file in files_in(folder):
        file.unlink()
        file.symlink_to(tmp_path / "target")
    fill(open_cache("disk", dataset, FACTORS), dataset)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert len(files_in(folder)) == 6 and not any(file.is_symlink() for file in files_in(folder))


def test_replaced_image_of_equal_size_and_time_is_decoded_anew(tmp_path, folder):
    """As `tar x`, `rsync -t` and `cp -p` leave it."""
    dataset = small_set(tmp_path)
    file = Path(dataset.records[0].path)
    os.utime(file, ns=(1, 1))
    fill(open_cache("disk", dataset, FACTORS), dataset)
    content = file.read_bytes()
    time.sleep(0.02)  # kernels count ctime in steps of 4 ms
    file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert open_cache("disk", dataset, FACTORS).get(0) is None


def test_image_replaced_while_it_is_read_is_not_kept_as_the_new_one(tmp_path):
    dataset = small_set(tmp_path)
    cache = open_cache("disk", dataset, FACTORS)
    assert cache.get(0) is None
    image_HW3 = decoded(dataset, 0)
    os.utime(dataset.records[0].path, ns=(1, 1))
    cache.put(0, image_HW3)
    assert cache.get(0) is None


class Unmarked(Opener):
    """Of a server that does not say what changes."""

    def identity_of(self, path: str) -> Identity:
        return Identity(0, "")


def test_images_without_an_identity_are_not_kept(tmp_path, folder):
    dataset = replace(small_set(tmp_path), opener=Unmarked())
    cache = open_cache("disk", dataset, FACTORS)
    fill(cache, dataset)
    assert cache.get(5) is None and not files_in(folder)


def test_missing_home_folder_disables_cache(tmp_path, monkeypatch, caplog):
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_module.Path, "home", nowhere)
    assert open_cache("disk", small_set(tmp_path), FACTORS) is None
    assert "XDG_CACHE_HOME" in caplog.messages[-1]


def test_a_cut_file_is_made_anew(tmp_path, folder):
    dataset = small_set(tmp_path)
    cache = open_cache("disk", dataset, FACTORS)
    fill(cache, dataset)
    for length in (0, 1000):
        for file in files_in(folder):
            os.truncate(file, min(length, file.stat().st_size - 1))
        assert all(cache.get(index) is None for index in range(6))
        fill(cache, dataset)
        np.testing.assert_array_equal(cache.get(0), decoded(dataset, 0))


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_killed_writer_leaves_whole_images_or_none(tmp_path, kind):
    dataset = small_set(tmp_path)
    cache = open_cache(kind, dataset, FACTORS)
    expected = [decoded(dataset, index) for index in range(6)]
    for round_number in range(20):
        child = os.fork()
        if child == 0:
            while True:
                for index, image_HW3 in enumerate(expected):
                    cache.get(index)
                    cache.put(index, image_HW3)
        time.sleep(0.001 * round_number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for index, image_HW3 in enumerate(expected):
            found = cache.get(index)
            assert found is None or np.array_equal(found, image_HW3)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    dataset = small_set(tmp_path)
    cache = open_cache("disk", dataset, FACTORS)
    fill(cache, replace(dataset, records=dataset.records[:1]))

    @contextmanager
    def full(_):
        raise OSError(28, "No space left on device")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "replacing", full)
        fill(cache, dataset)
    fill(cache, dataset)
    assert cache.get(0) is not None and cache.get(1) is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "No space left" in warning and "decoded each time" in warning


def test_the_rest_of_the_disk_stays_free_for_all_workers(tmp_path, folder):
    dataset = small_set(tmp_path)
    cache = open_cache("disk", dataset, FACTORS)
    warned = tmp_path / "warned"
    for _ in range(3):
        worker = os.fork()
        if worker == 0:
            with warned.open("a", encoding="utf-8") as file:
                cache_module._warn = lambda text: file.write(f"{text}\n")
                shutil.disk_usage = lambda folder: SimpleNamespace(free=cache_module._SPARE)
                fill(cache, dataset)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(worker, 0)[1] == signal.SIGKILL
    assert len(warned.read_text(encoding="utf-8").splitlines()) == 1
    fill(cache, dataset)
    assert not files_in(folder)  # nobody tries again


def test_as_many_images_are_kept_as_memory_has_room_for(tmp_path, monkeypatch, caplog):
    dataset = small_set(tmp_path)
    image, table, spare = 64 * 48 * 3, 6, cache_module._SPARE
    room = table + image + image // 4 + image // 16 + image // 64  # the first four
    monkeypatch.setattr(cache_module, "_MAX_SHARE", 1.0)
    monkeypatch.setattr(cache_module, "available_memory", lambda: spare + room + image - 1)
    with caplog.at_level(logging.INFO, "ppdist.data"):
        cache = open_cache("ram", dataset, FACTORS)
    assert "4 of 6 images" in caplog.text
    fill(cache, dataset)
    assert [cache.get(index) is not None for index in range(6)] == [True] * 4 + [False] * 2
    monkeypatch.setattr(cache_module, "available_memory", lambda: spare)
    assert open_cache("ram", dataset, FACTORS) is None


def test_without_a_cache_where_memory_is_taken_meanwhile(tmp_path, monkeypatch, caplog):
    answers = iter([2**40, 2**40, 0])
    monkeypatch.setattr(cache_module, "available_memory", lambda: next(answers))
    monkeypatch.setattr(cache_module, "_STEP_BYTES", 64 * 48 * 3 + 6)
    assert open_cache("ram", small_set(tmp_path), FACTORS) is None
    assert "training continues without it" in caplog.text


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_uncreatable_cache_is_line_not_error(tmp_path, caplog, kind, monkeypatch):
    dataset = small_set(tmp_path)
    records = tuple(replace(record, width=0, height=0) for record in dataset.records)
    assert open_cache(kind, replace(dataset, records=records), FACTORS) is None
    assert "no image sizes" in caplog.text
    (tmp_path / "file").touch()
    if kind == "disk":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
        assert open_cache(kind, dataset, FACTORS) is None
        assert f"{tmp_path}/file/below/ppdist/images: Not a directory" in caplog.text


def test_image_of_unknown_size_is_never_cached(tmp_path):
    dataset = small_set(tmp_path)
    records = list(dataset.records)
    records[2] = replace(records[2], width=0, height=0)
    cache = open_cache("ram", replace(dataset, records=records), FACTORS)
    fill(cache, dataset)
    assert [cache.get(index) is not None for index in range(6)] == [True] * 2 + [False] + [True] * 3


def test_places_do_not_overlap():
    assert image_offsets(np.array([[3, 4], [0, 0], [2, 2]])).tolist() == [3, 39, 39, 51]


KILLED = """
import sys
import numpy as np
from pathlib import Path
from tests.unit.data import test_cache as t
from ppdist.data.cache import open_cache
dataset = t.small_set(Path(sys.argv[1]))
cache = open_cache("ram", dataset, t.FACTORS)
t.fill(cache, dataset)
print(cache._descriptor, flush=True)
input()
"""


@pytest.mark.slow
def test_memory_is_free_again_when_the_process_is_killed(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as process:
        place = Path(f"/proc/{process.pid}/fd/{int(process.stdout.readline())}")
        assert os.readlink(place) == "/memfd:ppdist-images (deleted)"  # no name: nothing can stay
        process.kill()
        process.wait()
    assert not place.exists()


def on_one_host(root: str) -> list:
    """Rank 0 keeps images 0 and 1, rank 1 the rest; then both look."""
    comm.init("cpu", DistributedConfig())
    dataset = read_split(coco_config(Path(root)), "train")
    kinds = {}
    for kind in ("ram", "disk"):
        cache = open_cache(kind, dataset, FACTORS)
        for index in range(6):
            if (index < 2) == (comm.rank() == 0) and cache.get(index) is None:
                cache.put(index, decoded(dataset, index))
        comm.barrier()
        kinds[kind] = all(
            np.array_equal(cache.get(index), decoded(dataset, index)) for index in range(6)
        )
        if kind == "ram":
            kinds["inode"] = os.fstat(cache._descriptor).st_ino
        comm.barrier()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cache_module.os, "stat", without_namespaces)
        apart = open_cache("ram", dataset, FACTORS)
    inodes = comm.all_gather_large_object(os.fstat(apart._descriptor).st_ino)
    kinds["hosts unknown"] = len(set(inodes)) == 2
    cache_module.os.open = refused
    kinds["without"] = (open_cache("ram", dataset, FACTORS) is None) == (comm.rank() == 1)
    return kinds


def without_namespaces(path, *, stat=os.stat, **how):
    if path == "/proc/self/ns/pid":
        raise FileNotFoundError(2, "No such file or directory", path)
    return stat(path, **how)


def refused(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


def test_ranks_of_a_host_share_one_memory_and_one_folder(tmp_path):
    small_set(tmp_path)
    one, other = run_on_ranks(2, "tests.unit.data.test_cache:on_one_host", str(tmp_path))
    assert one == other
    assert one["ram"] and one["disk"] and one["hosts unknown"] and one["without"]
