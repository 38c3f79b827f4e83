"""The commands: one table, thin doors in tools/, and no Paddle before it is needed."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist import cli
from ppdist.cli import config
from ppdist.config.experiment import load_config
from ppdist.config.shipped import recipes, short_names
from ppdist.config.study import load_study
from tests.errors import raises
from tests.forked import ROOT
from tests.unit.data.datasets.small import yolo_set
from tools import docs

# tools/NAME.py -> command, where they differ
DOORS = {"infer": "predict", "export_model": "export"}
TOOLS = {path.stem for path in (ROOT / "tools").glob("*.py")}


@pytest.mark.parametrize("tool", sorted(TOOLS - {"launch", "faults", "docs"}))
def test_tool_is_a_door_of_its_command(tool):
    body = ast.parse((ROOT / "tools" / f"{tool}.py").read_text(encoding="utf-8")).body
    docstring, *imported, guarded = body
    lines = [ast.unparse(each) for each in (*imported, *guarded.body)]
    expected = ["from ppdist import cli", f"cli.run({DOORS.get(tool, tool)!r})"]
    if tool == "train":  # before all that is imported for it
        expected = ["from ppdist.common.signals import hold_signals", "hold_signals()", *expected]
    assert lines == expected
    assert DOORS.get(tool, tool) in cli.COMMANDS and isinstance(docstring, ast.Expr)


@pytest.mark.parametrize("command", ["launch", "train", "doctor", "verify", "benchmark"])
def test_ranks_run_the_door_of_a_clone(command, monkeypatch, tmp_path):
    assert cli.script_words(command) == [str(ROOT / "tools" / f"{command}.py")]
    monkeypatch.setattr(cli, "CLONE", tmp_path)  # an installed package has no tools/
    assert cli.script_words(command) == [str(ROOT / "ppdist" / "__main__.py"), command]


def test_recorded_command_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(cli, "run", lambda command: None)
    monkeypatch.setattr(sys, "argv", ["/x/ppdist/__main__.py", "train", "-c", "a b.yml"])
    cli.main()
    assert sys.argv[0] == "ppdist train"  # in --help and messages
    assert cli.command_line() == ["ppdist", "train", "-c", "a b.yml"]
    monkeypatch.setattr(sys, "argv", ["tools/train.py", "-c", "a.yml"])
    assert cli.command_line() == ["tools/train.py", "-c", "a.yml"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes options otherwise")
def test_page_of_commands_is_up_to_date():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert page == docs.commands_text(), "run `make docs`"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures are shown otherwise")
def test_pages_of_python_are_up_to_date():
    for name, text in (("python", docs.python_text), ("python_zh", docs.python_zh_text)):
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert page == text(), "run `make docs`"


def test_page_of_the_architecture_has_the_step_as_it_is():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page == docs.architecture_text(), "run `make docs`"


def test_page_of_published_weights_is_up_to_date():
    page = (ROOT / "docs" / "model_zoo.md").read_text(encoding="utf-8")
    assert page == docs.zoo_text(), "run `make docs`"


def test_every_config_that_ships_says_what_it_is():
    listed = config.format_listing()
    assert max(map(len, listed.splitlines())) <= 80
    for name in [*short_names(), *({*recipes()} - {*short_names().values()})]:
        assert re.search(rf"^{name} +\S.+", listed, re.MULTILINE), name
    row = next(line for line in listed.splitlines() if line.startswith("yolov5s "))
    _, pixels, parameters, gflops, ap, milliseconds, gigabytes, weights = row.split()
    assert (pixels, ap, weights) == ("640", "37.4", "yolov5s_coco")
    assert all(float(figure) > 0 for figure in (parameters, gflops, milliseconds, gigabytes))


def test_copy_of_a_shipped_study_means_the_same(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    copy = config.copy_config("proof", None)
    assert copy == Path("proof.yml")
    found, shipped = load_study(copy), load_study("proof")
    assert load_config(found.config) == load_config(shipped.config)


@pytest.mark.parametrize("name", ["yolov5n", "bccd_best"])
def test_copy_of_a_shipped_config_means_the_same(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    copy = config.copy_config(name, Path("sub/mine.yml"))
    same = {"output_dir": "x"}
    found, shipped = (load_config(path).model_copy(update=same) for path in (copy, name))
    assert found == shipped
    assert "-c configs/" not in copy.read_text()  # its head names itself
    with raises("file_exists"):
        config.copy_config(name, copy)
    with raises("config_missing"):
        config.copy_config(name + "n", None)


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("infer", 2, "did you mean ppdist predict?"),
        ("trian", 2, "did you mean ppdist train?"),
        ("detect train data=x", 2, "write `ppdist train x --model yolov5n`"),
        ("yolo train data=x", 2, "write `ppdist train x --model yolov5n`"),
        ("yolo detect train data=x", 2, "write `ppdist train x --model yolov5n`"),
        ("--version", 0, r"^ppdist [\d.]+, .*Python [\d.]+$"),
        ("--help", 0, r"(?s)\n  " + r" .*\n  ".join(cli.COMMANDS) + " "),
    ],
)
def test_a_word_that_is_no_command_is_answered(typed, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppdist", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert re.search(said, "".join(capsys.readouterr()).strip())


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("data stats {}/data.yaml", "`ppdist data check {}/data.yaml --fix DIR`"),
        ("train {}/data.yaml -c yolov5n", "`ppdist train {}/data.yaml --model yolov5n`"),
    ],
)
def test_what_a_message_tells_to_type_has_the_data_in_it(
    typed, remedy, monkeypatch, tmp_path, capsys
):
    yolo_set(tmp_path, "7 0.5 0.5 0.1 0.1", names=None)
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [cat, dog]\n")
    monkeypatch.setattr(sys, "argv", ["ppdist", *typed.format(tmp_path).split()])
    with pytest.raises(SystemExit):
        cli.main()
    assert remedy.format(tmp_path) in capsys.readouterr().err


HELP = """
import sys
from ppdist import cli
for command in cli.COMMANDS:
    sys.argv = [command, "--help"]
    try:
        cli.run(command)
    except SystemExit as ended:
        print("exit code", ended.code)
    assert not {"paddle", "matplotlib", "cv2"} & set(sys.modules), command
"""


def test_help_needs_no_paddle():
    words = [sys.executable, "-c", HELP]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr
    *shown, nothing = done.stdout.split("exit code 0\n")
    assert len(shown) == len(cli.COMMANDS) and not nothing
    assert all(text.startswith("usage: ") for text in shown)


@pytest.mark.parametrize("command", ["predict", "export", "data", "train"])
def test_what_is_one_process_refuses_several_ranks(command, monkeypatch):
    for name in [*os.environ]:  # that Paddle set in this process, in an earlier test
        if name.startswith(("PADDLE_", "FLAGS_")):
            monkeypatch.delenv(name)
    cli.require_one_process(command)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    if command == "train":
        cli.require_one_process(command)
        return
    with raises("environment_of_other_launch", "unset PADDLE_TRAINERS_NUM"):  # left over
        cli.require_one_process(command)
    monkeypatch.setenv("PADDLE_RANK_IN_NODE", "0")  # as every launcher of Paddle sets it
    with raises("one_process_only"):
        cli.require_one_process(command)
