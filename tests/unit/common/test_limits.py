"""Limits of a shell are said in one line, not in a library's traceback."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.common import limits
from ppdist.common.errors import DataError, UserError
from ppdist.common.limits import convert_limit_error, require_limits
from tests.errors import raises

ROOT = Path(__file__).resolve().parents[3]
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def limited(monkeypatch: pytest.MonkeyPatch, addresses: int | None, files: int = 1024) -> None:
    found = {
        resource.RLIMIT_AS: NO_LIMIT if addresses is None else (addresses, addresses),
        resource.RLIMIT_NOFILE: (files, files),
    }
    monkeypatch.setattr(limits.resource, "getrlimit", found.get)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MANY, "open_files_limit"),
        (RuntimeError(f"gloo: socket: {MANY.strerror}"), "open_files_limit"),
        (MemoryError(), "memory_limit"),
        (RuntimeError("can't start new thread"), "memory_limit"),
        (ImportError("libphi_core.so: failed to map segment from shared object"), "memory_limit"),
    ],
)
def test_what_a_low_limit_explains_is_said_so(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: str
) -> None:
    limited(monkeypatch, 2 << 30)
    found = convert_limit_error(error)
    assert isinstance(found, UserError) and found.code == code
    limited(monkeypatch, None)
    assert (convert_limit_error(error) is error) == (code == "memory_limit")


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 2 << 30)
    for error in (ValueError("x"), DataError(f"{MANY.strerror}", code="any")):
        assert convert_limit_error(error) is error


def test_too_low_limits_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, None, 16)
    require_limits()
    with raises("open_files_limit", "16"):
        require_limits(files=32)
    limited(monkeypatch, 500 << 20)
    with raises("memory_limit", "500"):
        require_limits()


@pytest.mark.parametrize(
    ("limit", "command", "says"),
    [
        ("-v 40000", "tools/launch.py t.py", "ulimit -v unlimited"),
        ("-n 24", "tools/launch.py t.py", "ulimit -n 4096"),
        ("-v 300000", "tools/train.py -c none.yml", "ulimit -v unlimited"),
    ],
)
def test_a_command_under_a_low_limit_says_one_line(limit: str, command: str, says: str) -> None:
    shell = f"ulimit {limit} && exec {sys.executable} {command}"
    ended = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("ppdist: error: ") and says in ended.stderr
