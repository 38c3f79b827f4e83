"""A run in an object store: what is uploaded when, who owns it, and what a new disk gets."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ppdist.common import files, retry
from ppdist.common.addresses import work_folder
from ppdist.common.errors import CheckpointError, StorageError
from ppdist.common.manifest import follow_pointer
from ppdist.engine import mirror as module
from ppdist.engine.checkpoint import newest_valid, path_of, point, prune, save_checkpoint
from ppdist.engine.mirror import Mirror, description_of, upload_rest
from ppdist.models.weights import checkpoint_of
from ppdist.storage import stores
from tests.errors import raises

fsspec = pytest.importorskip("fsspec")


class Store:
    """fsspec's store in memory; `down`: it answers nothing.  `log`: what was written, in order."""

    def __init__(self) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self.inner = MemoryFileSystem(skip_instance_cache=True)
        self.inner.store, self.inner.pseudo_dirs = {}, [""]
        self.async_impl, self.down, self.log = False, False, list[str]()

    def __getattr__(self, name: str):
        def call(*values, **arguments):
            if self.down:
                raise ConnectionError("away")
            arguments.pop("max_concurrency", None)
            if name in ("pipe_file", "put_file", "rm_file"):
                url = values[1] if name == "put_file" else values[0]
                self.log.append(f"{name} {url.partition('run/')[2]}")
            return getattr(self.inner, name)(*values, **arguments)

        return call

    def names(self) -> set[str]:
        return {*stores.list_below("memory://bucket/run")}

    def text(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return self.inner.cat_file(f"memory://bucket/run/{name}").decode()
        return ""


@pytest.fixture
def store(monkeypatch) -> Iterator[Store]:
    monkeypatch.setattr(retry, "_START_SECONDS", 0.0)
    for name, seconds in (("_LOOK", 0.02), ("_RECORDS", 0.0), ("_RENEW", 0.02), ("_SILENT", 0.3)):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    for name in ("_FINISH_SECONDS", "_STOP_SECONDS"):
        monkeypatch.setattr(module, name, 0.5)
    store = Store()
    monkeypatch.setattr(stores, "_open_once", lambda url: store)
    yield store
    for thread in threading.enumerate():  # or one would write to the store of the next test
        if thread.name == "mirror":
            thread.join(30)


def mirror_at(folder: Path, *, resumes: bool = False) -> Mirror:
    mirror = Mirror("memory://bucket/run", folder)
    mirror.begin(resumes)
    return mirror


def save(folder: Path, step: int, run: str = "a") -> None:
    groups = {"model": {"w": np.full(3, step, np.float32)}}
    state = {"step": step, "best_step": step, "run": {"id": run}}
    save_checkpoint(folder / "checkpoints", step, groups, state, "seed: 0\n")
    (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die(mirror: Mirror) -> None:
    """Ends a mirror as SIGKILL does: its owner object stays."""
    mirror._ending = True
    mirror._ended.set()
    for thread in mirror._threads:
        thread.join()
    files._held.pop(mirror.folder.absolute()).lock.close()


def test_a_manifest_goes_last_and_old_checkpoints_go(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    for step in (2, 4):
        save(mirror.folder, step)
        wait_for(lambda: f"step-{step:08d}" in store.text("checkpoints/last"))  # noqa: B023
    point(mirror.folder / "checkpoints/best", path_of(mirror.folder, 4))
    prune(mirror.folder / "checkpoints", keep=1)
    assert mirror.finish() == ""
    step = "checkpoints/step-00000004"
    files_of_step = ("config.yml", "manifest.json", "model.safetensors", "state.json")
    assert store.names() == {
        "metrics.jsonl", "checkpoints/last", "checkpoints/best",
        *(f"{step}/{name}" for name in files_of_step),
    }  # fmt: skip
    order = store.log
    last = order.index(f"pipe_file {step}/manifest.json")
    assert all(order.index(f"put_file {step}/{n}") < last for n in files_of_step if n[0] != "m")
    assert "pipe_file metrics.jsonl" in order[:last]
    gone = [line.rpartition("/")[2] for line in order if line.startswith("rm_file checkpoints")]
    assert gone[0] == "manifest.json"


def test_a_new_disk_gets_the_run_and_only_whole_checkpoints(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    for step in (2, 4):
        save(mirror.folder, step)
    mirror.finish()
    store.inner.rm_file("memory://bucket/run/checkpoints/step-00000004/manifest.json")
    store.inner.pipe_file("memory://bucket/run/vdl/x", b"1")
    store.inner.pipe_file("memory://bucket/run/mine/y", b"1")
    folder = tmp_path / "b"
    again = mirror_at(folder, resumes=True)
    newest, skipped = newest_valid(folder / "checkpoints")
    assert newest is not None and newest.state["step"] == 2 and not skipped
    assert (folder / "vdl/x").exists() and not (folder / "mine").exists()
    assert again.finish() == ""
    assert "checkpoints/step-00000004/model.safetensors" not in store.names()  # half of one
    assert {"mine/y", "vdl/x"} <= store.names()


def test_the_further_one_of_disk_and_store_goes_on(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    save(mirror.folder, 2)
    mirror.finish()
    save(mirror.folder, 4)  # not uploaded
    mirror = mirror_at(tmp_path / "a", resumes=True)
    assert mirror.finish() == "" and "step-00000004" in store.text("checkpoints/last")
    save(tmp_path / "b", 6, run="another")  # under the same name
    mirror = mirror_at(tmp_path / "b", resumes=True)
    newest, _ = newest_valid(tmp_path / "b/checkpoints")
    assert newest is not None and newest.state["step"] == 4
    assert (tmp_path / "b/old-1/checkpoints/step-00000006").is_dir()
    assert mirror.finish() == "" and not any("old-1" in name for name in store.names())


def test_a_second_run_is_refused_while_the_first_lives(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    with raises("output_dir_in_use"):
        mirror_at(tmp_path / "b", resumes=True)
    save(mirror.folder, 2)
    mirror.finish()
    with raises("output_dir_used"):
        mirror_at(tmp_path / "b")


@pytest.mark.parametrize("place", ["a", "b"])
def test_a_dead_owner_is_replaced(place, tmp_path, store, monkeypatch):
    mirror = mirror_at(tmp_path / "a")
    save(mirror.folder, 2)
    die(mirror)
    if place == "a":  # the same disk, where nobody waits
        monkeypatch.setattr(module, "_SILENT_SECONDS", 1e6)
    assert mirror_at(tmp_path / place, resumes=True).finish() == ""
    assert "owner.json" not in store.names()


def test_who_loses_the_folder_stops_and_uploads_nothing(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    store.inner.pipe_file("memory://bucket/run/owner.json", json.dumps({"id": "x"}).encode())
    wait_for(lambda: files.is_lost(mirror.folder))
    (mirror.folder / "train.log").write_text("more")
    with raises("output_dir_lost"):
        mirror.finish()
    with raises("output_dir_lost"):
        files.require_held(mirror.folder)
    assert store.names() == {"owner.json"}


def test_an_outage_delays_and_what_is_missing_at_the_end_is_named(tmp_path, store, caplog):
    caplog.set_level(logging.INFO, logger="ppdist")
    mirror = mirror_at(tmp_path / "a")
    store.down = True
    save(mirror.folder, 2)
    wait_for(lambda: "not uploaded" in caplog.text)
    store.down = False
    wait_for(lambda: "can be written again" in caplog.text)
    store.down = True
    save(mirror.folder, 4)
    with raises("upload_incomplete") as error:
        upload_rest(mirror, 0)
    assert "step-00000004" in str(error.value) and str(mirror.folder) in str(error.value)


def test_a_hung_upload_does_not_hang_the_end(tmp_path, store, monkeypatch):
    mirror = mirror_at(tmp_path / "a")
    held = threading.Event()
    monkeypatch.setattr(stores, "upload", lambda file, url: held.wait(30))
    save(mirror.folder, 2)
    began = time.monotonic()
    assert "checkpoints/step-00000002" in mirror.finish(briefly=True)
    assert time.monotonic() - began < 30
    held.set()


def test_a_store_that_refuses_says_so_before_the_run(tmp_path, store, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no")

    monkeypatch.setattr(store.inner, "find", refuse)
    with raises("store_refused"):
        mirror_at(tmp_path / "a")
    store.down = True
    with pytest.raises(StorageError):
        mirror_at(tmp_path / "a")


def test_a_run_is_described_without_its_weights(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    save(mirror.folder, 2)
    mirror.finish()
    with description_of(mirror.url) as folder:
        assert (folder / "checkpoints/last/config.yml").read_text() == "seed: 0\n"
        assert not (folder / "checkpoints/last/model.safetensors").exists()
    with pytest.raises(CheckpointError), description_of("memory://bucket/other"):
        pass


def test_a_copied_folder_has_text_in_place_of_links(tmp_path, store):
    mirror = mirror_at(tmp_path / "a")
    for step in (2, 4):
        save(mirror.folder, step)
    point(mirror.folder / "checkpoints/best", path_of(mirror.folder, 2))
    mirror.finish()
    for name in store.names():
        file = tmp_path / "copy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(store.text(name)) if "tensors" not in name else file.touch()
    folder = tmp_path / "copy/checkpoints"
    assert checkpoint_of(tmp_path / "copy") == path_of(folder, 2)
    assert follow_pointer(folder / "last") == path_of(folder, 4)
    (folder / "last").write_text("../../elsewhere")
    assert follow_pointer(folder / "last") == folder / "last"


@pytest.mark.parametrize(
    "address", ["s3://bucket", "s3://bucket/../x", "http://h/x/y", "s3://key:hidden@bucket/x"]
)
def test_addresses_to_which_no_run_can_write(address):
    with raises("output_dir_unwritable") as error:
        stores.place_of_run(address)
    assert "hidden" not in str(error.value)


def test_the_work_folder_of_an_address():
    assert stores.place_of_run(Path("s3://bucket/run/a/")) == "s3://bucket/run/a"
    assert work_folder("s3://bucket/run/a") == Path("output/s3/bucket/run/a")
    assert work_folder("runs/a") == Path("runs/a")
