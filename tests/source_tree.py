"""The Python files of ppdist and tools, parsed once for the tests that read them."""

import ast
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@cache
def sources() -> dict[str, Path]:
    """Every module of ppdist and tools by its dotted name."""
    found = {}
    for path in sorted(
        [*(REPOSITORY / "ppdist").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")]
    ):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """What ast.walk gives of its tree: half a million nodes of all files, walked through once."""
    return tuple(ast.walk(tree_of(path)))


def name_of(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; of what is not a name, such as a call, `?`."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))
