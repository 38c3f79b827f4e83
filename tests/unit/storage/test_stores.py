"""Object stores: addresses, failures in our words, and no secret in any of them."""

import importlib
import sys
from pathlib import Path

import pytest

from ppdist.common import addresses, retry
from ppdist.common.errors import StorageError
from ppdist.storage import download, stores
from ppdist.storage.download import local_copy
from tests.errors import raises
from tests.file_server import serving

SECRET = "a-secret-that-no-log-may-show"


class Foreign(Exception):
    """An error as libraries raise them."""

    def __init__(self, **attributes) -> None:
        super().__init__(f"https://user:{SECRET}@host")
        self.__dict__.update(attributes)


class Store:
    """A file system whose requests fail as they are told, then give content."""

    async_impl = False

    def __init__(self, *failures: Exception, content: bytes = b"content") -> None:
        self.failures, self.content, self.asked = [*failures], content, 0

    def cat_file(self, url, start=None, end=None):
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.content[start:end]

    def info(self, url):
        return {"name": url, "size": len(self.cat_file(url)), "type": "file", "ETag": '"1"'}


@pytest.fixture
def use(monkeypatch, tmp_path, as_at_start):
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(retry, "_START_SECONDS", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stores.configure(0, 5.0)

    def using(store: Store) -> Store:
        monkeypatch.setattr(stores, "_open_once", lambda url: store)
        return store

    return using


def test_addresses_survive_path_and_local_ones_stay_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert addresses.absolute("s3:/bucket/a.jpg") == addresses.absolute("s3://bucket/a.jpg")
    assert addresses.absolute("s3:/bucket/a.jpg") == "s3://bucket/a.jpg"
    assert addresses.absolute("file:///data/a.jpg") == "/data/a.jpg"
    assert addresses.absolute("a.jpg") == f"{tmp_path}/a.jpg"
    assert addresses.is_remote("memory://a") and addresses.is_remote("https:/host/a")
    for local in ("/data/s3:/a", "data/a", "file:///data", "c:/data", "s3:", "s3://"):
        assert not addresses.is_remote(local), local


def test_addresses_with_credentials_are_known():
    for address in (
        "https://user:pw@host/a",
        "https://host/a?X-Amz-Signature=1",
        "https://host/a?sv=1&sig=2",
    ):
        assert addresses.holds_credentials(address), address
    assert not addresses.holds_credentials("s3://bucket/a@2x.jpg")
    assert not addresses.holds_credentials("/data/user@host")


def test_every_failed_head_is_what_it_was(use):
    """fsspec says FileNotFoundError of whatever kept it from looking."""
    failure = FileNotFoundError("http://host/a")
    failure.__cause__ = ConnectionResetError()
    use(Store(*[failure] * 9))
    with pytest.raises(StorageError):
        stores.identity_of("http://host/a")
    failure.__cause__ = Foreign(status=404)
    use(Store(failure))
    with pytest.raises(FileNotFoundError):
        stores.identity_of("http://host/a")


S3 = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    "failure, kind, words",
    [
        (FileNotFoundError(SECRET), FileNotFoundError, "does not exist"),
        (Foreign(status=404), FileNotFoundError, "does not exist"),
        (PermissionError(SECRET), PermissionError, "refuses access"),
        (Foreign(status=403), PermissionError, "HTTP 403"),
        (type("NoCredentialsError", (Foreign,), {})(), PermissionError, "no credentials"),
        (Foreign(status=400), OSError, "HTTP 400"),
        (TypeError(SECRET), OSError, "library failed (TypeError)"),
    ],
)
def test_final_answers_are_errors_at_once(failure, kind, words, use):
    store = use(Store(failure))
    with pytest.raises(kind) as caught:
        stores.fetch("s3://bucket/a.jpg")
    assert store.asked == 1 and words in caught.value.strerror
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert caught.value.filename == "s3://bucket/a.jpg"


@pytest.mark.parametrize(
    "failure, words",
    [
        (Foreign(response=S3), "HTTP 503 SlowDown"),
        (Foreign(status=429), "HTTP 429"),
        (TimeoutError(SECRET), "no answer within 5 s"),
        (type("ClientPayloadError", (Foreign,), {})(code=400), "connection failed"),
        (ConnectionResetError(SECRET), "connection failed (ConnectionResetError)"),
    ],
)
def test_passing_failures_are_tried_again_then_said(failure, words, use):
    store = use(Store(failure, failure))
    assert stores.fetch("s3://bucket/a.jpg") == b"content" and store.asked == 3
    use(Store(*[failure] * 99))
    with pytest.raises(StorageError) as caught:
        stores.fetch("s3://bucket/a.jpg")
    assert words in caught.value.what and SECRET not in repr(caught.value)
    assert caught.value.code == "storage_unreachable"


def test_bytes_of_a_range_are_as_many_as_asked_for(use):
    use(Store(content=b"0123456789"))
    assert stores.fetch("s3://bucket/a", 2, 3) == b"234"
    with pytest.raises(OSError, match="replaced since the start"):
        stores.fetch("s3://bucket/a", 8, 3)


def test_server_without_ranges_is_cut_to_the_range():
    pytest.importorskip("aiohttp")
    with serving() as server:
        server.files["/a"], server.faults = b"0123456789", ["no ranges"]
        assert stores.fetch(f"{server.url}/a", 2, 3) == b"234"


@pytest.mark.parametrize("marks", [("1", "1", "2"), (None, None, None)])
def test_cache_answers_for_the_same_identity_alone(marks, use, monkeypatch):
    """Runs that ask one after another; without a mark each has what it fetched itself."""
    store, contents = use(Store()), []
    stores.configure(1 << 20, 5.0)
    for run, mark in enumerate(marks):
        monkeypatch.setattr(stores, "_RUN", f"{run}")
        monkeypatch.setattr(store, "info", lambda url, mark=mark: {"size": 7, "ETag": mark})
        stores.forget_listings([])
        store.content = b"%d" % run
        contents += [stores.fetch("s3://bucket/a") for _ in range(2)]
    assert b"".join(contents) == (b"000022" if marks[0] else b"001122")


@pytest.mark.parametrize("whole", [True, False])
def test_http_is_asked_once_for_content_and_identity(whole, tmp_path, as_at_start, monkeypatch):
    """And once, for the identity alone, for what is kept."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stores.configure(1 << 20, 5.0)
    span = () if whole else (2, 3)

    def start() -> bytes:
        stores.forget_listings([])
        return b"".join(stores.fetch(f"{server.url}/a", *span) for _ in range(2))

    with serving() as server:
        server.files["/a"] = b"0123456789"
        get = ("/a", None if whole else "bytes=2-4")
        first = start()
        assert server.asked == [get] and start() == first
        assert server.asked == [get, ("HEAD /a", None)]
        server.files["/a"], server.version = b"abcdefghij", '"2"'
        assert start() == (b"abcdefghij" if whole else b"cde") * 2
        assert server.asked[2:] == [("HEAD /a", None), get]


def test_copy_is_fetched_once_and_anew_when_it_changed(use):
    store = use(Store(ConnectionResetError()))
    file = local_copy(Path("s3://bucket/x/set.json"))
    assert file.name == "set.json" and file.read_bytes() == b"content"
    asked = store.asked
    assert local_copy(Path("s3:/bucket/x/set.json")) == file and store.asked == asked + 1
    store.content = b"of another length"
    assert local_copy(Path("s3://bucket/x/set.json")).read_bytes() == b"of another length"


def test_copy_goes_on_where_the_store_went_away(use, monkeypatch):
    monkeypatch.setattr(download, "_PART_BYTES", 3)
    store, spans, away = use(Store()), [], [True]

    def cat_file(url, start=None, end=None):
        if start and away[0]:
            raise ConnectionResetError
        spans.append((start, end))
        return b"content"[start:end]

    monkeypatch.setattr(store, "cat_file", cat_file)
    monkeypatch.setattr(store, "info", lambda url: {"size": 7, "type": "file", "ETag": "1"})
    with raises("storage_unreachable"):
        local_copy(Path("s3://bucket/set.json"))
    away[0] = False
    assert local_copy(Path("s3://bucket/set.json")).read_bytes() == b"content"
    assert spans == [(0, 3), (3, 6), (6, 7)]


def test_copy_that_cannot_be_had_says_what_to_do(use):
    use(Store(PermissionError(), PermissionError()))
    with raises("store_file_unreadable") as caught:
        local_copy(Path("s3://bucket/set.json"))
    assert "AWS_PROFILE" in caught.value.fix


def test_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with raises("store_library_missing"):
        stores.fetch("s3://bucket/a")


def test_unknown_store_is_named():
    pytest.importorskip("fsspec")
    assert importlib.import_module("fsspec")
    with raises("store_unknown", "nosuch://"):
        stores.fetch("nosuch://bucket/a")


@pytest.mark.parametrize(
    ("told", "weak", "strong"),
    [
        ({"ETag": '"1"', "Last-Modified": "today"}, '"1"', '"1"'),
        ({"ETag": 'W/"1"', "Last-Modified": "today"}, 'W/"1"', "today"),
        ({"LastModified": 5, "size": 3}, "5", "5"),
        ({"ETag": 'W/"1"'}, 'W/"1"', ""),
        ({"size": 3}, "", ""),
    ],
)
def test_marks_of_servers(told, weak, strong):
    assert (stores.find_mark(told), stores.find_mark(told, strong=True)) == (weak, strong)
