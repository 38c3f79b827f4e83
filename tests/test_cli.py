"""What the commands share."""

import pytest

from ppdist import cli
from ppdist.common.errors import ConfigError


def test_a_command_that_needs_a_clone_says_so_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_CLONE", tmp_path)
    with pytest.raises(ConfigError, match="tests/reference of the source repo") as error:
        cli.use_clone("tests/reference")
    assert error.value.code == "needs_clone" and str(tmp_path) in error.value.where
