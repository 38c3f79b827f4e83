"""Commands, options, keys and figures that our pages name are those of the package."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from ppdist.config.migration import table
from ppdist.models.zoo import zoo

ROOT = Path(__file__).resolve().parents[1]
# These have commands of their own: docs/commands.md lists them without their options.
NOT_LISTED = ("ensemble",)
GENERATED = ("commands.md", "python.md")
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README*.md", "docs/*.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name not in GENERATED
)
SECTION = re.compile(r"^##+ ppdist ([a-z ]+)$\n(.*?)(?=^###? |\Z)", re.M | re.S)
CODE = re.compile(r"```.*?```|`[^`]+`", re.S)
COMMAND = re.compile(r"(?<![\w/.-])(?<!from )ppdist ([a-z][^`\n|#&;]*)")
OPTION = re.compile(r"\[?(--?[a-zA-Z][\w-]*)")
ROW = re.compile(r"^\| `([^`]+)` \| `([^`:]+)` \|", re.M)


@functools.cache
def _commands() -> dict[str, set[str]]:
    """The options of each command."""
    text = (ROOT / "docs/commands.md").read_text("utf-8")
    return {name: {*re.findall(OPTION, body)} for name, body in SECTION.findall(text)}


def _unknown(text: str, commands: dict[str, set[str]]) -> list[str]:
    """What a text types and no command knows."""
    code = "\n".join(CODE.findall(text.replace("\\\n", " ")))
    found = []
    for line in COMMAND.findall(code):
        first, *words = line.split()
        name = f"{first} {words[0]}" if words and f"{first} {words[0]}" in commands else first
        if name not in commands:
            found.append(f"ppdist {name}")
        elif name not in NOT_LISTED:
            options = {m[1] for m in map(OPTION.match, words) if m}
            found += [f"ppdist {name} {each}" for each in sorted(options - commands[name])]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_commands_that_a_text_types_exist(text: str) -> None:
    assert not _unknown((ROOT / text).read_text("utf-8"), _commands())


def test_the_check_notices_what_is_gone() -> None:
    text = "`ppdist trian -c x` and `ppdist data check D --quick`, ```\nppdist eval \\\n  --no```"
    assert _unknown(text, _commands()) == [
        "ppdist trian",
        "ppdist data check --quick",
        "ppdist eval --no",
    ]


@pytest.mark.parametrize("page", ["from_ultralytics", "from_paddledetection"])
def test_keys_of_other_trainers_are_those_that_messages_name(page: str) -> None:
    rows = ROW.findall((ROOT / f"docs/{page}.md").read_text("utf-8"))
    ours = {name: each.key for name, each in {**table().keys, **table().words}.items() if each.key}
    named = {theirs: key for theirs, key in rows if theirs in ours}
    assert len(named) > 5
    assert named == {theirs: ours[theirs] for theirs in named}


def test_figures_of_models_are_those_of_the_zoo() -> None:
    text = (ROOT / "docs/which_model.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", text, re.M)
    assert len(rows) > 5
    published = {name.removesuffix("_coco"): each for name, each in zoo().items()}
    for name, parameters, mean in rows:
        entry = published[name.removesuffix("_auxhead")]
        assert float(parameters) == entry.parameters
        assert float(mean) == entry.published
