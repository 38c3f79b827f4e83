"""The commands: one table, thin doors in tools/, and no Paddle before it is needed."""

import ast
import subprocess
import sys

import pytest

from ppdist import cli
from ppdist.cli import config
from ppdist.common.errors import ConfigError
from tests.forked import ROOT

DOORS = {"infer": "predict"}  # tools/NAME.py -> command, where they differ
TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


def test_command_without_its_clone_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "CLONE", tmp_path)
    with pytest.raises(ConfigError, match="tests/reference of the source repo") as error:
        cli.use_clone("tests/reference")
    assert error.value.code == "needs_clone" and str(tmp_path) in error.value.where


@pytest.mark.parametrize("what", ["docs", "schema", pytest.param("errors", marks=pytest.mark.slow)])
def test_generated_files_stay_out_of_site_packages(what, monkeypatch, tmp_path):
    for folder in ("docs", "configs", "ppdist"):
        (tmp_path / folder).mkdir()  # of other packages: there is no setup.py beside them
    monkeypatch.setattr(cli, "CLONE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["ppdist config", what])
    with pytest.raises(ConfigError) as error:
        config.main()
    assert error.value.code == "needs_clone"
    monkeypatch.setattr(sys, "argv", ["ppdist config", what, "--out", str(tmp_path / "here")])
    config.main()
    assert (tmp_path / "here").is_file() and not list((tmp_path / "docs").iterdir())


@pytest.mark.parametrize("tool", [name for name in TOOLS if name not in ("launch", "faults")])
def test_tool_is_a_door_of_its_command(tool):
    body = ast.parse((ROOT / "tools" / f"{tool}.py").read_text(encoding="utf-8")).body
    docstring, imported, guarded = body
    assert ast.unparse(imported) == "from ppdist import cli"
    assert ast.unparse(guarded.body) == f"cli.run({DOORS.get(tool, tool)!r})"
    assert DOORS.get(tool, tool) in cli.COMMANDS and isinstance(docstring, ast.Expr)


@pytest.mark.parametrize("command", ["launch", "train", "doctor", "verify", "benchmark"])
def test_ranks_run_the_door_of_a_clone(command, monkeypatch, tmp_path):
    assert cli.script_of(command) == [str(ROOT / "tools" / f"{command}.py")]
    monkeypatch.setattr(cli, "CLONE", tmp_path)  # an installed package has no tools/
    assert cli.script_of(command) == [str(ROOT / "ppdist" / "__main__.py"), command]


def test_recorded_command_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(cli, "run", lambda command: None)
    monkeypatch.setattr(sys, "argv", ["/x/ppdist/__main__.py", "train", "-c", "a b.yml"])
    cli.main()
    assert sys.argv[0] == "ppdist train"  # in --help and messages
    assert cli.command_line() == ["python", "-m", "ppdist", "train", "-c", "a b.yml"]
    monkeypatch.setattr(sys, "argv", ["tools/train.py", "-c", "a.yml"])
    assert cli.command_line() == ["tools/train.py", "-c", "a.yml"]


HELP = """
import sys
sys.argv = [sys.argv[1], "--help"]
from ppdist import cli
try:
    cli.run(sys.argv[0])
finally:
    assert not {"paddle", "matplotlib", "cv2"} & set(sys.modules)
"""


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_needs_no_paddle(command):
    words = [sys.executable, "-c", HELP, command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("usage: ")


def test_unknown_command_is_answered_with_all(tmp_path):
    words = [sys.executable, str(ROOT / "ppdist" / "__main__.py")]
    done = subprocess.run(
        [*words, "trian"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 2 and done.stderr.startswith("ppdist: error: 'trian': expected one")
    listed = subprocess.run(
        [*words, "--help"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert listed.returncode == 0 and all(f"  {name} " in listed.stdout for name in cli.COMMANDS)
