"""The cache of contents by key: bounded, checked, and never an error."""

import os
import time
from pathlib import Path

import pytest

from ppdist.common import keyed_cache
from ppdist.common.keyed_cache import KeyedCache

BLOCK = 4096


@pytest.fixture(autouse=True)
def large_disk(monkeypatch) -> None:
    monkeypatch.setattr(keyed_cache, "_free_bytes", lambda folder: 1 << 40)


def entries(cache: KeyedCache) -> list[Path]:
    return [path for path in cache.folder.glob("??/*") if path.is_file()]


def test_what_was_put_is_found_again_also_by_another(tmp_path):
    cache = KeyedCache(tmp_path, 1 << 20)
    assert cache.get("a") is None
    cache.put("a", b"content")
    cache.put("b", b"")
    assert cache.get("a") == b"content" and KeyedCache(tmp_path, 1 << 20).get("a") == b"content"
    assert cache.get("b") == b""


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_damaged_entry_is_absent_and_deleted(damage, tmp_path):
    cache = KeyedCache(tmp_path, 1 << 20)
    cache.put("a", b"content")
    (file,) = entries(cache)
    file.write_bytes(file.read_bytes()[:-1] + b"T" if damage is None else damage)
    assert cache.get("a") is None and not file.exists()
    cache.put("a", b"content")
    assert cache.get("a") == b"content"


def test_least_recently_used_entries_go_first(tmp_path):
    cache = KeyedCache(tmp_path, 20 * 2 * BLOCK)
    for number in range(20):
        cache.put(f"{number}", bytes(BLOCK))  # two blocks with its head
        past = time.time() - 1000 + number
        os.utime(cache.place(f"{number}"), (past, past))
    assert len(entries(cache)) == 20
    assert cache.get("0") is not None  # and so it is the youngest
    cache.put("20", bytes(BLOCK))
    kept = {n for n in range(21) if cache.place(f"{n}").exists()}
    assert kept == {0, *range(4, 21)} and len(entries(cache)) == 18
    assert (cache.folder / "bytes").stat().st_size == 36


def test_entry_too_large_for_the_cache_is_not_kept(tmp_path):
    cache = KeyedCache(tmp_path, 8 * BLOCK)
    cache.put("a", bytes(BLOCK + 1))
    assert cache.get("a") is None


def test_full_disk_is_said_once_and_costs_nothing(tmp_path, monkeypatch):
    said: list[str] = []
    cache = KeyedCache(tmp_path, 1 << 20, said.append)
    assert cache.put("a", b"content")
    monkeypatch.setattr(keyed_cache, "_free_bytes", lambda folder: 0)
    assert not cache.put("b", b"content") and not cache.put("c", b"content")
    (line,) = said
    assert "nothing more is kept" in line and "disk are free" in line
    assert cache.get("b") is None and not list(cache.folder.rglob("*.*"))


def test_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("a file")
    said: list[str] = []
    cache = KeyedCache(tmp_path / "file", 1 << 20, said.append)
    assert not cache.put("a", b"content") and cache.get("a") is None and len(said) == 1


def test_parts_are_one_content_also_mapped(tmp_path):
    cache = KeyedCache(tmp_path, 1 << 20)
    cache.put("a", b"con", b"", memoryview(b"tent"))
    assert cache.get("a") == b"content" and cache.map("a") == b"content"
    cache.place("a").write_bytes(b"")
    assert cache.map("a") is None


def test_links_are_not_followed(tmp_path):
    cache = KeyedCache(tmp_path / "cache", 1 << 20)
    cache.put("a", b"content")
    cache.place("a").rename(tmp_path / "elsewhere")
    cache.place("a").symlink_to(tmp_path / "elsewhere")
    assert cache.get("a") is None
