"""Downloads from a server on loopback that cuts, stalls, refuses and lies."""

import errno
import hashlib
import multiprocessing
import os
import time

import pytest

from ppdist.common import retry
from ppdist.common.errors import UserError
from ppdist.common.files import FileLock
from ppdist.storage import download as module
from ppdist.storage.download import download
from tests.errors import raises
from tests.file_server import serving

CONTENT = bytes(range(256)) * 2048  # 512 KiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(retry, "_START_SECONDS", 0.1)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as found:
        found.files["/a.pt"] = CONTENT
        yield found


def code_of(server, file, path="/a.pt", **options):
    with pytest.raises(UserError) as error:
        download(server.url + path, file, fix="ask somebody", **options)
    return error.value.code


def cut_off(server, file):
    """The first part of a file, whose server is then away."""
    server.faults = ["cut 300000", *[503] * 99]
    assert code_of(server, file) == "download_failed"
    server.faults = []


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_whole_file_arrives_and_stays(server, tmp_path):
    file = tmp_path / "cache" / "a.pt"
    for _ in range(2):
        download(f"{server.url}/a.pt", file, sha256=SHA256)
    assert file.read_bytes() == CONTENT and left(file.parent) == ["a.pt"]
    assert server.asked == [("/a.pt", None)]


def test_redirects_keep_the_range(server, tmp_path):
    server.faults = ["", "cut 1000"]
    download(f"{server.url}/moved/a.pt", tmp_path / "a.pt", sha256=SHA256)
    assert server.asked[2:] == [("/moved/a.pt", "bytes=1000-"), ("/a.pt", "bytes=1000-")]


def test_a_cut_file_goes_on_where_it_stopped(server, tmp_path):
    server.faults = ["cut 300000", "cut 100000"]
    said = []
    download(f"{server.url}/a.pt", tmp_path / "a.pt", sha256=SHA256, say=said.append)
    assert [asked for _, asked in server.asked] == [None, "bytes=300000-", "bytes=400000-"]
    assert (tmp_path / "a.pt").read_bytes() == CONTENT
    assert "after 300000 of 524288" in said[0]


@pytest.mark.parametrize("part", [CONTENT, b"?" * 300000], ids=["whole", "wrong"])
def test_a_part_that_is_whole_or_wrong_leads_to_the_file(server, tmp_path, part):
    cut_off(server, tmp_path / "a.pt")
    (tmp_path / "a.pt.part").write_bytes(part)
    download(f"{server.url}/a.pt", tmp_path / "a.pt", sha256=SHA256)
    assert (tmp_path / "a.pt").read_bytes() == CONTENT


@pytest.mark.parametrize("change", ["another version", "shorter", "no ranges", "another address"])
def test_halves_of_two_files_are_never_joined(server, tmp_path, change):
    cut_off(server, tmp_path / "a.pt")
    url, wanted = f"{server.url}/a.pt", CONTENT[::-1]
    if change == "another address":
        url = f"{server.url}/b.pt"
    elif change == "another version":
        server.version = '"2"'
    elif change == "shorter":
        wanted = wanted[:1000]
    else:
        server.faults = ["no ranges"]
    server.files = {"/a.pt": wanted, "/b.pt": wanted}
    download(url, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == wanted


def test_a_wrong_checksum_is_refused_and_deleted(server, tmp_path):
    server.files["/a.pt"] = CONTENT[:-1] + b"!"
    assert code_of(server, tmp_path / "a.pt", sha256=SHA256) == "download_damaged"
    assert left(tmp_path) == []


def test_what_is_final_is_asked_once(server, tmp_path):
    assert code_of(server, tmp_path / "b.pt", "/b.pt") == "server_refused"
    server.faults = [403]
    assert code_of(server, tmp_path / "a.pt") == "server_refused"
    for fault in ("page", "no length", "odd"):
        server.faults = [fault]
        assert code_of(server, tmp_path / "a.pt") == "server_refused"
    assert len(server.asked) == 5 and left(tmp_path) == []
    with raises("server_refused", "404 Not Found; ask"):
        download(f"{server.url}/b.pt", tmp_path / "b.pt", fix="ask somebody")
    with raises("server_refused"):
        download("file:///etc/passwd", tmp_path / "b.pt")


def test_a_busy_or_silent_server_is_asked_again(server, tmp_path):
    server.faults = [503, 429, "stall 1000"]
    download(f"{server.url}/a.pt", tmp_path / "a.pt", sha256=SHA256, timeout=0.2)
    assert [asked for _, asked in server.asked] == [None] * 3 + ["bytes=1000-"]


def test_an_unreachable_server_is_one_message(server, tmp_path):
    server.server_close()
    with raises("download_failed", "Connection refused"):
        download(f"{server.url}/a.pt", tmp_path / "a.pt", fix="ask somebody")


def test_a_full_disk_is_said_before_and_while(server, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_disk", lambda _: 1000)
        assert code_of(server, tmp_path / "a.pt") == "disk_full"

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    assert code_of(server, tmp_path / "a.pt") == "disk_full"


def test_a_folder_that_cannot_be_written_is_said(server, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("ppdist.common.files.os.access", lambda *_: False)
        assert code_of(server, tmp_path / "a.pt") == "folder_unwritable"
    (tmp_path / "file").touch()
    assert code_of(server, tmp_path / "file" / "a.pt") == "folder_expected"
    assert not server.asked


def fetch(url, file):
    download(url, file, sha256=SHA256)


def test_two_processes_at_once_download_one_file(server, tmp_path):
    server.delay = 0.3
    context = multiprocessing.get_context("fork")
    arguments = f"{server.url}/a.pt", tmp_path / "a.pt"
    both = [context.Process(target=fetch, args=arguments) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(20)
    assert [process.exitcode for process in both] == [0, 0]
    assert server.asked == [("/a.pt", None)]


def test_a_killed_download_goes_on_and_holds_no_lock(server, tmp_path):
    server.faults = ["stall 300000"]
    file = tmp_path / "a.pt"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=fetch, args=(f"{server.url}/a.pt", file))
    process.start()
    part = tmp_path / "a.pt.part"
    while process.is_alive() and not (part.exists() and part.stat().st_size == 300000):
        time.sleep(0.01)
    process.kill()
    process.join()
    fetch(f"{server.url}/a.pt", file)
    assert file.read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == [None, "bytes=300000-"]


def test_without_locks_each_writes_for_itself(server, tmp_path, monkeypatch):
    def no_locks(_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(FileLock, "try_acquire", no_locks)
    (tmp_path / "a.pt.part").write_bytes(b"of another process")
    download(f"{server.url}/a.pt", tmp_path / "a.pt", sha256=SHA256)
    assert (tmp_path / "a.pt").read_bytes() == CONTENT
    assert (tmp_path / "a.pt.part").read_bytes() == b"of another process"


def test_the_proxy_of_the_environment_is_used(server, tmp_path, monkeypatch):
    """Also where fleetrun has renamed it for its ranks."""
    server.files["http://weights.invalid/a.pt"] = CONTENT  # as a proxy is asked
    for name in ("http_proxy", "http_proxy_original"):
        with monkeypatch.context() as patch:
            patch.setenv(name, server.url)
            download("http://weights.invalid/a.pt", tmp_path / name, sha256=SHA256)
    assert [path for path, _ in server.asked] == ["http://weights.invalid/a.pt"] * 2
