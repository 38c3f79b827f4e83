"""Content identity: what tells that a file was replaced, and what does not."""

import os

import pytest

from ppdist.storage.identity import Identity, mark_in, of_stat


def test_replaced_file_of_equal_size_and_time_is_another(tmp_path):
    file, other = tmp_path / "a.bmp", tmp_path / "b.bmp"
    file.write_bytes(b"old")
    other.write_bytes(b"new")
    before = of_stat(file.stat())
    for each in (file, other):
        os.utime(each, ns=(1, 1))
    mtimes = of_stat(file.stat())
    os.replace(other, file)
    after = of_stat(file.stat())
    assert len({before, mtimes, after}) == 3 and before.bytes == after.bytes == 3
    assert after == of_stat(file.stat()) and mtimes.number != after.number


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
    assert (mark_in(told), mark_in(told, strong=True)) == (weak, strong)


def test_identity_tells_marks_apart():
    assert Identity(1, "a").number != Identity(1, "b").number != Identity(2, "b").number
