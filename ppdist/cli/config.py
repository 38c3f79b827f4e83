"""Lists, shows and copies configurations; regenerates docs and schema.

ppdist config list                                     the configs that ship, each with a line
ppdist config show -c x.yml|NAME [-o key=value ...]    every key resolved, on stdout
ppdist config copy NAME [FILE]                         a shipped one, to be edited
ppdist config docs|schema|errors|commands|python|zoo [--out FILE]   regenerates a file of a clone
"""

import ast
import inspect
import io
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import ppdist
from ppdist.cli import CLONE, COMMANDS, add_config, main_of, parser_of, require_clone
from ppdist.common.errors import ConfigError
from ppdist.common.files import make_parent, writing
from ppdist.config import ExperimentConfig, load_config
from ppdist.config.base import dump_yaml
from ppdist.config.schema import json_schema, markdown
from ppdist.config.shipped import find_config, folder, near, recipes, short_names

_SUBCOMMANDS = re.compile(r"\{([\w,-]+)\} \.\.\.")  # at the end of a usage
_EXPERIMENT = re.compile(r"^config: *(\S+\.yml)$", re.MULTILINE)
_OWN_COMMAND = re.compile(r"tools/train\.py -c configs/\S+")  # in the head of a shipped one
_BASES = re.compile(r"^_BASE_:(.*)$", re.MULTILINE)  # on one line in all that ship


def main() -> None:
    parser = parser_of("config", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the configs that ship, by name")
    show = commands.add_parser("show", help="check a file and print it with every key resolved")
    add_config(show, required=True)
    copy = commands.add_parser("copy", help="write a shipped config where it can be edited")
    copy.add_argument("name", help="as `ppdist config list` has it")
    copy.add_argument(
        "file", nargs="?", type=Path, help="default: in this folder, called as the shipped file"
    )
    for name, (target, _) in GENERATED.items():
        command = commands.add_parser(name, help=f"regenerate {target}")
        command.add_argument("--out", type=Path, help="write there instead")
    args = parser.parse_args()
    if args.command == "list":
        print(listing(), end="")
    elif args.command == "show":
        print(dump_yaml(load_config(args.config, args.override)), end="")
    elif args.command == "copy":
        file = copied(args.name, args.file)
        print(f"wrote {file}; edit it, then: {_use_of(file)}")
    else:
        target, text_of = GENERATED[args.command]
        out = args.out or require_clone(str(target.parent)) / target.name
        text = text_of()
        make_parent(out)
        with writing(out):
            out.write_text(text, encoding="utf-8")
        print(f"wrote {out}")


_MODELS = Path(ppdist.__file__).parent / "models"  # read without Paddle
_LISTING = """\
Recipes: `ppdist train DATA --model NAME`, or `-c NAME`.  AP: published figure
of the matching `--weights` on COCO val2017.  ms: our measurement per image of
640 pixels on {cores} CPU cores in ONNX Runtime.

{table}
Other sets and examples: `-c NAME`; to edit one, `ppdist config copy NAME`.

{others}"""


def listing() -> str:
    """The configs that ship, in 80 columns: recipes with their figures, then all others."""
    measured, known = _measured(), _published()
    head = ("name", "pixels", "params M", "AP", "ms", "weights")
    rows: list[tuple[str, ...]] = []
    others = []
    short = {name: each for each, name in short_names().items()}
    for name, path in recipes().items():
        if name not in short:
            first, *rest = textwrap.wrap(
                _about(path), 49, max_lines=2, placeholder=" ...", break_on_hyphens=False
            )
            others.append(
                "".join(
                    f"{word:31}{line}\n"
                    for word, line in zip((name, *[""] * len(rest)), (first, *rest))
                )
            )
            continue
        height, width = load_config(path).model.image_size
        found = measured["result"].get(name)
        ms = found["threads 2"]["predictors"]["ONNX Runtime"]["median_ms"] if found else None
        weights = known.get(name, ("-", None, None))
        figures = [
            "-" if value is None else f"{value:{form}}"
            for value, form in zip((*weights[1:], ms), ("g", ".1f", ".0f"))
        ]
        rows.append((short[name], f"{height} x {width}", *figures, weights[0]))
    table = "".join(
        f"{name:22}  {pixels:11}  {params:>8}  {ap:>4}  {ms:>4}  {weights}\n"
        for name, pixels, params, ap, ms, weights in [head, *sorted(rows, key=_by_size)]
    )
    return _LISTING.format(cores=measured["machine"]["cores"], table=table, others="".join(others))


def _by_size(row: tuple[str, ...]) -> tuple[str, int, float]:
    """Family, pixels, and millions of parameters, the unknown last."""
    name, pixels, params, *_ = row
    family = re.match(r"yolov5|ppyoloe_[a-z]+", name)
    size = float("inf") if params == "-" else float(params)
    return family[0] if family else name, int(pixels.split()[0]), size


def _published() -> dict[str, tuple[str, float, float]]:
    """Name, parameters (millions) and AP of the weights of each recipe on COCO."""
    entries = yaml.safe_load((_MODELS / "zoo.yml").read_text(encoding="utf-8"))["weights"]
    found: dict[str, tuple[str, float, float]] = {}
    for name, each in entries.items():
        if each.get("metric") == "mAP" and not each.get("overrides"):
            found.setdefault(each["config"], (name, each["parameters"], each["published"]))
    return found


def _measured() -> dict[str, Any]:
    """What `ppdist benchmark runtimes --json` wrote."""
    found: dict[str, Any] = json.loads((_MODELS / "runtimes.json").read_text(encoding="utf-8"))
    return found


def _about(path: Path) -> str:
    """The first sentence of a config's head."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words = " ".join(line.lstrip("# ") for line in head if "$schema" not in line)
    return re.split(r"[.;](?: |$)", words, maxsplit=1)[0]


def copied(name: str, file: Path | None) -> Path:
    """Writes a shipped config to a new file; its `_BASE_` names the shipped parts.

    Raises: ConfigError: no such config, or the file is there already.
    """
    source = Path(find_config(name))
    if not source.is_relative_to(folder()):
        raise ConfigError(
            f"{name} is the name of no shipped config",
            code="config_missing",
            fix=f"did you mean {' or '.join(near(name)) or 'one of `ppdist config list`'}?",
        )
    target = file or Path(source.name)
    if target.exists():
        raise ConfigError(
            "is there already", code="file_exists", where=str(target), fix="name another file"
        )
    text = source.read_text(encoding="utf-8")
    bases = _BASES.search(text)
    experiment = _EXPERIMENT.search(text)  # of a study
    parts = re.findall(r"[\w./]+\.yml", bases[1] if bases else "")
    for part in [*parts, *([experiment[1]] if experiment else [])]:
        shipped = (source.parent / part).resolve().relative_to(folder().resolve())
        text = text.replace(part, shipped.as_posix())
    text = _OWN_COMMAND.sub(f"ppdist train -c {shlex.quote(str(target))}", text)
    text = text.replace("$schema=../schema.json", f"$schema={folder() / 'schema.json'}")
    make_parent(target)
    with writing(target):
        target.write_text(text, encoding="utf-8")
    return target


def _use_of(file: Path) -> str:
    """The command that a copied config or study is for."""
    if _EXPERIMENT.search(file.read_text(encoding="utf-8")):
        return shlex.join(
            ["ppdist", "tune", "run", "-c", str(file), "--out", f"output/{file.stem}"]
        )
    return shlex.join(["ppdist", "train", "-c", str(file), "--eval"])


def schema_text() -> str:
    """configs/schema.json."""
    return json.dumps(json_schema(ExperimentConfig), indent=2, ensure_ascii=False) + "\n"


# --- docs/errors.md, read from the source ---------------------------------------------------------

_BASE = "CodedError"
_HEAD = """# Errors and their codes

Generated by `ppdist config errors` from the source; do not edit.

An error that you can put right is one message: where, what happened, what to do. It has a code,
which stays when the words of the message change; programs compare codes. A rank that fails under
`fleetrun` leaves `rank-N.json` with `exit_code`, `kind`, `code`, `message` and `from_rank`: the
rank that really failed, where this one only heard of it (else null).

Every other exception has the kind `crash` and the code `crash`, or `out_of_memory`. What gloo and
NCCL say when another rank is gone has the code `lost_rank`; a rank that ends because another one
crashed has `rank_failed`. `…` stands for what differs from case to case.

| code | kind | what happened | what to do | raised in |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Site:
    """A place in the source that makes an error with a code."""

    path: str  # relative to the repository
    line: int
    kind: str
    codes: tuple[str, ...]  # () where they are not written out there
    what: str
    fix: str


def error_table(found: Sequence[Site]) -> str:
    """docs/errors.md.  Args: found: what `sites` has."""
    of_code: dict[str, list[Site]] = {}
    for site in found:
        for code in site.codes:
            of_code.setdefault(code, []).append(site)
    return _HEAD + "".join(_row(code, of_code[code]) for code in sorted(of_code))


def _row(code: str, found: list[Site]) -> str:
    told = max(found, key=lambda site: bool(site.what.strip("… :")))  # the first that says it
    kinds = ", ".join(sorted({site.kind for site in found}))
    files = ", ".join(sorted({f"`{site.path}`" for site in found}))
    cells = (f"`{code}`", kinds, *(_cell(text) for text in (told.what, told.fix)), files)
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def sites(repository: Path) -> list[Site]:
    """All of `ppdist` and `tools`, by path and line."""
    trees = {
        str(path.relative_to(repository)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("ppdist", "tools")
        for path in sorted((repository / folder).rglob("*.py"))
    }
    kinds = _kinds(trees)
    return [
        site
        for path, tree in trees.items()
        for site in sorted(_of_file(path, tree, kinds), key=lambda site: site.line)
    ]


def _kinds(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """Of each class of errors with codes."""
    nodes = [node for tree in trees.values() for node in tree.body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    kinds = {_BASE: ""}
    before = 0
    while len(kinds) > before:
        before = len(kinds)
        for node in classes:
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in kinds and node.name not in kinds:
                    kinds[node.name] = _own_kind(node) or kinds[base.id]
    return kinds


def _own_kind(node: ast.ClassDef) -> str:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "kind":
            return str(ast.literal_eval(line.value))
    return ""


def _of_file(path: str, tree: ast.Module, kinds: Mapping[str, str]) -> Iterator[Site]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name not in kinds:
            continue
        given = {each.arg: each.value for each in node.keywords}
        what = _text(node.args[0]) if node.args else ""
        where = _text(given["where"]) if "where" in given else ""
        what = f"{where}: {what}" if where.strip("… :") else what
        fix = _text(given["fix"]) if "fix" in given else ""
        yield Site(path, node.lineno, kinds[name], _codes(given.get("code")), what, fix)


def _codes(value: ast.expr | None) -> tuple[str, ...]:
    """A literal, or one of two."""
    if isinstance(value, ast.IfExp):
        return _codes(value.body) + _codes(value.orelse)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return (value.value,)
    return ()


def _text(value: ast.expr) -> str:
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) for part in value.values)
    if isinstance(value, ast.Constant):
        return str(value.value)
    return "…"


# --- docs/commands.md, what --help says -----------------------------------------------------------

_COMMANDS_HEAD = """# Commands

Generated by `ppdist config commands` from what `--help` says; do not edit.

`ppdist COMMAND` in an installed package, a script of the same name in a clone (`tools/train.py`;
`tools/infer.py` is `ppdist predict`), `fleetrun ... ppdist COMMAND` on many cards and machines.
Exit codes: 0 done; 2 your input is wrong; 75 stopped by a signal after a checkpoint; 1 anything
else.
"""


def commands_text() -> str:
    """docs/commands.md."""
    parts = [_COMMANDS_HEAD]
    for command, what in COMMANDS.items():
        text = _help_of(command)
        parts.append(f"## ppdist {command}\n\n{what[0].upper()}{what[1:]}.\n\n{_block(text)}")
        found = _SUBCOMMANDS.search(text)
        parts += [
            f"### ppdist {command} {name}\n\n{_block(_help_of(command, name))}"
            for name in (found[1].split(",") if found else ())
        ]
    return "\n".join(parts)


def _help_of(command: str, *words: str) -> str:
    shown, argv, columns = io.StringIO(), sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [f"ppdist {command}", *words, "--help"], "100"
    try:
        with redirect_stdout(shown), suppress(SystemExit):
            main_of(command)()
    finally:
        sys.argv = argv
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return shown.getvalue()


def _block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


# --- docs/python.md, what docstrings say ----------------------------------------------------------

_PYTHON_HEAD = """# ppdist in Python

[中文](python_zh.md)

Generated by `ppdist config python` from docstrings; do not edit.

```python
from ppdist import Detector, evaluate, train

run = train("pets/data.yaml", model="yolov5n", weights="yolov5n_coco", epochs=50)
run.history()                                     # [{"epoch": 1, "loss": ..., "mAP": ...}, ...]
evaluate(run)                                     # {"mAP": ..., "mAP50": ..., ...}
train(resume=run, epochs="+20")                   # extend a finished run
train("my.yml", {"optimizer.lr": 0.001})          # a configuration with overrides

detector = Detector(run)                          # a run, weights, a published name or an export
found = detector("bus.jpg", classes=["person", "bus"], threshold=0.4, iou=0.6)
print(found)                                      # 4 person, 1 bus
found.save("bus_boxes.jpg"), found.to_json()
found.show()                                      # a notebook shows `found` by itself
for found in detector("photos/"):                 # folders, patterns, videos, cameras: an iterator
    print(found.source, found.boxes_xyxy, found.scores, found.class_ids)

better = detector.train(data="more/data.yaml", epochs=20)   # a new detector, with the best weights
better.export("exported", formats=["paddle", "onnx"])
```

**Stable interface**: the names below, their arguments and documented behaviour, and the keys of
configurations ([config.md](config.md)). They change only with a new major version, after a warning
in the version before; new arguments are keyword-only. Everything else in `ppdist.` may change at
any time. The package is typed (`py.typed`).

Images are RGB. OpenCV reads BGR, so pass `image[:, :, ::-1]`. Boxes are
`left, top, right, bottom` in pixels of the image. Errors that you can fix are `ValueError`s
with a `code` ([errors.md](errors.md)). Training and evaluation use one process; for several cards,
use `fleetrun` to start a program that calls `train` ([distributed.md](distributed.md)). A
dictionary `data={...}` is the `data` section of a configuration. Several threads may call one
`Detector`; each gets its own boxes.
"""


def python_text() -> str:
    """docs/python.md."""
    parts = [_PYTHON_HEAD]
    for name in sorted(set(ppdist.__all__) - {"__version__"}, key=str.lower):
        found = getattr(ppdist, name)
        if inspect.ismodule(found):  # `export` is the folder of that name, too
            found = getattr(sys.modules[ppdist.train.__module__], name)
        parts.append(_entry(f"## {name}", name, found))
        if inspect.isclass(found):
            parts += [
                _entry(f"### {name}.{each}", each, value)
                for each, value in vars(found).items()
                if inspect.isfunction(value) and (each == "__call__" or not each.startswith("_"))
            ]
    return "\n".join(parts)


def _entry(head: str, name: str, found: Any) -> str:
    shown = "" if inspect.isclass(found) else _signature(name, found)
    return f"{head}\n\n{shown}{_block(inspect.getdoc(found) or 'See its class.')}"


def _signature(name: str, found: Any) -> str:
    shown = f"{name}{inspect.signature(found)}"
    shown = re.sub(r"\bself(, )?|(?:pathlib|collections\.abc|typing|numpy)\.", "", shown)
    return _block(shown.replace("'", ""), "python") + "\n"


def zoo_text() -> str:
    """docs/model_zoo.md."""
    from ppdist.verify.zoo import page

    return page(_measured())


GENERATED: dict[str, tuple[Path, Callable[[], str]]] = {
    "docs": (Path("docs/config.md"), lambda: markdown(ExperimentConfig)),
    "schema": (Path("configs/schema.json"), schema_text),
    "commands": (Path("docs/commands.md"), commands_text),
    "python": (Path("docs/python.md"), python_text),
    "errors": (Path("docs/errors.md"), lambda: error_table(sites(CLONE))),
    "zoo": (Path("docs/model_zoo.md"), zoo_text),
}
