"""Content identity: what tells that a file was replaced, and what does not; openers travel."""

import os
import pickle
import time

from ppdist.common.opener import DISK, of_stat
from ppdist.storage.files import STORAGE


def test_replaced_file_of_equal_size_and_time_is_another(tmp_path):
    file, other = tmp_path / "a.bmp", tmp_path / "b.bmp"
    for each, content in ((file, b"old"), (other, b"new")):
        each.write_bytes(content)
        os.utime(each, ns=(1, 1))
    before = of_stat(file.stat())
    time.sleep(0.02)  # kernels count ctime in steps of 4 ms
    os.replace(other, file)
    after = of_stat(file.stat())
    assert before != after and before.bytes == after.bytes == 3
    assert after == of_stat(file.stat())


def test_same_file_with_another_inode_stays_the_same(tmp_path):
    """FUSE mounts number files anew."""
    fields = [0o100644, 7, 1, 1, 0, 0, 3, 1, 1, 1]
    times = {"st_mtime_ns": 10**9, "st_ctime_ns": 10**9}
    one, other = (os.stat_result([fields[0], inode, *fields[2:]], times) for inode in (7, 8))
    assert one.st_ino != other.st_ino and of_stat(one) == of_stat(other)


def test_openers_reach_other_processes_as_they_are():
    for opener in (DISK, STORAGE):
        assert pickle.loads(pickle.dumps(opener)) == opener
    assert DISK != STORAGE
