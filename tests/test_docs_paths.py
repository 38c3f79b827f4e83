"""Every path, module and link that our texts name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "mkdocs.yml",
        "Makefile",
        "setup.py",
        "docs/*.md",
        "docs/dev/*.md",
        "configs/**/*.yml",
        "deploy/**/*.md",
        "deploy/**/*.yml",
        "deploy/**/Dockerfile*",
        "deploy/**/*.sbatch",
    )
    for path in ROOT.glob(pattern)
)
# A name that goes on with { * < $ is a pattern; a name `x` is the reader's.
PATH = re.compile(
    r"(?<![\w./-])((?:ppdist|tools|configs|docs|tests|deploy|benchmarks)/[\w./-]*\w)(?![\w{*<$/-])"
)
MODULE = re.compile(r"(?<![\w./-])ppdist(?:\.[a-z_]\w*)+")
LINK = re.compile(r"\]\(([^)#\s]+)")
PAGE = r"\b(README\.md|docs/[\w/]+\.md)"
SECTION = re.compile(PAGE + r", (?=([A-Z].*))")  # a message: "README.md, On a GPU, ..."
ANCHOR = re.compile(PAGE + r"#([\w-]+)")


def _is_the_readers(path: str) -> bool:
    return any(re.fullmatch(r"(test_)?x(_s)?(\.\w+)?", part) for part in path.split("/"))


def _is_importable(dotted: str) -> bool:
    """Whether `ppdist.a.b` is a module, or a name that the module `ppdist.a` mentions."""
    if dotted.endswith(".x"):  # the reader's
        return True
    target = ROOT.joinpath(*dotted.split("."))
    if target.is_dir() or target.with_suffix(".py").is_file():
        return True
    module = target.parent.with_suffix(".py")
    if not module.is_file():
        module = target.parent / "__init__.py"
    return module.is_file() and bool(re.search(rf"\b{target.name}\b", module.read_text("utf-8")))


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_text_names_exists(text: str) -> None:
    missing = []
    for number, line in enumerate((ROOT / text).read_text("utf-8").splitlines(), 1):
        names = [p for p in PATH.findall(line) if not _is_the_readers(p)]
        missing += [f"{text}:{number}: {p}" for p in names if not (ROOT / p).exists()]
        missing += [f"{text}:{number}: {m}" for m in MODULE.findall(line) if not _is_importable(m)]
        if text.endswith(".md"):
            links = [link for link in LINK.findall(line) if "://" not in link]
            here = (ROOT / text).parent
            missing += [f"{text}:{number}: {link}" for link in links if not (here / link).exists()]
    assert not missing, "\n".join(missing)


def _messages(source: str) -> list[str]:
    """Returns the texts of a module that are no docstrings; an f-string gives its parts."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def _titles(page: str) -> list[str]:
    """Returns the headings of a page, and what its paragraphs begin with in bold."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(r"^(?:#+ |(?:- )?\*\*)([^*\n]+?)\.?(?:\*\*|$)", text, re.MULTILINE)


def _missing_sections(text: str) -> list[str]:
    """Returns the references of a text to sections that no page has."""
    text = " ".join(text.split())
    missing = [
        f"{page}, {words[:40]}"
        for page, words in SECTION.findall(text)
        if not any(words.startswith(title) for title in _titles(page))
    ]
    return missing + [
        f"{page}#{anchor}"
        for page, anchor in ANCHOR.findall(text)
        if anchor not in {re.sub(r"[^\w-]", "", t.lower().replace(" ", "-")) for t in _titles(page)}
    ]


def test_sections_that_messages_name_exist() -> None:
    missing = []
    for path in sorted((ROOT / "ppdist").rglob("*.py")):
        source = path.read_text("utf-8")
        for text in _messages(source) if "README" in source or ".md" in source else []:
            missing += [f"{path.name}: {reference}" for reference in _missing_sections(text)]
            if "README" in text and not SECTION.search(text) and " " in text:
                missing.append(f"{path.name}: which section? {text}")
    missing += _missing_sections((ROOT / "ppdist/config/migration.yml").read_text("utf-8"))
    assert not missing, "\n".join(missing)


def test_the_check_notices_what_is_gone() -> None:
    assert _missing_sections("see README.md, No such heading") and not _missing_sections(
        "docs/start.md, Install; docs/distributed.md#slow-links"
    )
    assert PATH.findall("see `ppdist/no_such.py` and configs/a_{s,m}.yml") == ["ppdist/no_such.py"]
    assert not _is_importable("ppdist.no_such")
    assert not _is_importable("ppdist.engine.trainer.no_such_name")
    assert _is_importable("ppdist.engine.trainer")
