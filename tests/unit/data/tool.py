"""tools/data.py in this process: what a subprocess would cost is mostly importing."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

import pytest

from ppdist.cli import data
from ppdist.common import process


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["data.py", *map(str, arguments)]),
        pytest.raises(SystemExit) as ended,
    ):
        process.run(data.main)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())
