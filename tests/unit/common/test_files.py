"""Results go where the user said, whole; a place that cannot be written to is one message."""

import json
import os
from pathlib import Path

import pytest

from ppdist.common import files
from ppdist.common.errors import UserError
from ppdist.common.files import digest_of_file, make_parent, read_file, write_json


def test_file_is_written_atomically_with_its_folders(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "found.json"
    for content in ([1, 2], {"name": "狗"}):
        write_json(file, content)
        assert json.loads(file.read_text(encoding="utf-8")) == content
        assert list(file.parent.iterdir()) == [file]


def test_a_synced_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(Path, "replace", lambda *to: (done.append("name"), replace(*to)))
    files.replace_file(tmp_path / "a", b"1", sync=True)
    files.replace_file(tmp_path / "a", b"2")
    assert done == ["sync", "name", "name"]


def test_non_utf8_name_comes_back_as_same_file(tmp_path: Path) -> None:
    name = os.fsdecode("图.jpg".encode("gbk"))
    write_json(tmp_path / "names.json", [name])
    assert json.loads((tmp_path / "names.json").read_text(encoding="utf-8")) == [name]


def test_a_read_file_is_a_file_of_bounded_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 9)
    assert read_file(tmp_path / "a", 9) == b"x" * 9
    assert read_file("/proc/self/stat", 1 << 20).startswith(b"%d " % os.getpid())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, most, says in (
        ("a", 8, "too large: 9 bytes, expected at most 8"),
        ("pipe", 9, "not a file"),
        ("zero", 9, "not a file"),
        ("", 9, "Is a directory"),
    ):
        with pytest.raises(OSError, match=says):
            read_file(tmp_path / name, most)
    assert digest_of_file(tmp_path / "pipe").startswith("cannot be read")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/null/x.json", "/dev/null: cannot be written to: it is a file; expected a folder"),
        ("/dev/null/deep/x.json", "/dev/null/deep: cannot be written: Not a directory"),
        (".", ".: cannot be written: it is a folder; expected a file name"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_named(path: str, message: str) -> None:
    for attempt in (make_parent, lambda path: write_json(path, 1)):
        with pytest.raises(UserError) as error:
            attempt(Path(path))
        assert str(error.value) == message
