"""What our texts tell a reader to type: commands, options and keys, and whether they work.

Texts are pages, heads of configurations, messages in the source, and the
answers to other trainers' words.  A command runs to the point where work would begin: with the
real parser, the real schema, the names of recipes and of published weights.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ppdist import cli
from ppdist.common.errors import CodedError, ConfigError
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.migration import answer_key, refuse_options, table
from ppdist.config.parse import parse_tree
from ppdist.config.removed import REMOVED
from ppdist.config.schema import all_keys
from ppdist.config.shipped import find_config, short_names
from ppdist.config.study import load_study
from ppdist.config.yaml import Node, Reader, merge
from ppdist.launch import options as launch
from ppdist.models.zoo import zoo
from tests.source_tree import REPOSITORY, nodes_of, sources

# Recipes of all kinds: a key is one if the configuration of any of them has it.
BASES = (
    *("yolov5n", "ppyoloe_plus_s", "rtdetr_r18", "dfine_n", "yolov5s_cls_imagenet"),
    *("bccd_ppyoloe", "rtdetrv2_r18"),
)
GENERATED = ("docs/commands.md", "docs/python.md", "docs/errors.md", "docs/config.md")
PAGES = ("README*.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "deploy/**/*.md")
# tools/infer.py is ppdist predict
DOORS = {"infer": "predict", "export_model": "export"}
OWN_TOOLS = ("docs", "faults")  # not commands of ppdist
_CODE = re.compile(r"```.*?```|`[^`]+`", re.S)
_START = re.compile(
    r"(?:^|(?<=[\s(|;&\"]))(?<!from )(?:python3? )?"
    r"(?:fleetrun|ppdist|(?:\./)?tools/\w+\.py)(?=\s|$)"
)
_END = re.compile(r"\)?[|;&\"](?=\s|$)|\s\(|\s>|,$|\)$")
_OPTIONAL = re.compile(r"(?<=\s)\[([^\[\]]*)\]")
_PLACEHOLDERS = {
    **dict.fromkeys(("N", "K", "G"), "1"),
    **{"+N": "+1", "P": "6070", "PIXELS": "640", "MIN": "5", "VALUE": "0.5", "SECONDS": "5"},
    **{"LIST": "coco", "WHAT": "train"},
}
_ITEMS = ("k=v", "a.b=c", "key=value", "KEY=VALUE", "key.path=value", "1", "KEY=x")
_SECTIONS = "|".join(ExperimentConfig.model_fields)
_KEY = re.compile(rf"((?:{_SECTIONS})(?:\.[a-z_0-9]+)*)(?:(=|: )(.+))?", re.S)
_DOTTED = re.compile(rf"(?<![\w./`-])((?:{_SECTIONS})(?:\.[a-z][a-z_0-9]*)+)(?![\w(/]|\.\w)")
_FILES = (
    *("log", "txt", "yaml", "yml", "json", "zip", "onnx", "pdmodel", "tar", "py", "html", "hpp"),
    *("safetensors", "pdparams", "pdiparams", "pt"),
)
_OPTION = re.compile(r"(?<![\w/-])--[a-zA-Z][\w-]*")
# Options of programs that are not ours, as pages name them alone: docker, sbatch, podman.
_FOREIGN_OPTIONS = {
    *("--stop-timeout", "--shm-size", "--memory", "--network", "--ulimit", "--user", "--cap-add"),
    *("--gpus-per-node", "--gres", "--signal", "--device"),
}
# What a key needs beside it.
_COMPANIONS = {
    "evaluate.rectangular_pad": "evaluate.rectangular=true",
    "train.epochs_compensation": "optimizer.noise_scale=450",
}
# Commands of other programs that messages name, with their options, to the end of the phrase.
_OTHERS = re.compile(
    r"(?:docker|pip|visualdl|tensorboard|trtexec|MNNConvert|nvidia-smi|wandb|python -m)\b[^;`]*"
)


class Refused(Exception):
    """A text types what does not work."""


class Typed(NamedTuple):
    """A command line, or a part of one, and the text that shows it."""

    place: str
    words: str


# --- what texts type ---


def spans_of(place: str, text: str) -> Iterator[Typed]:
    """The code of a page; of a block line by line."""
    for span in _CODE.findall(text.replace("\\\n", " ")):
        lines = span.splitlines() if span.startswith("```") else [re.sub(r"\s+", " ", span)]
        for line in lines:
            yield Typed(place, re.sub(r"(?:^|\s)#( |$).*", "", line.strip("`")).strip())


def pages() -> Iterator[Typed]:
    """Our pages; what begins with `python` in those on other trainers is theirs."""
    for path in sorted(path for pattern in PAGES for path in REPOSITORY.glob(pattern)):
        name = path.relative_to(REPOSITORY).as_posix()
        if name not in GENERATED:
            theirs = "python " if "/from_" in name else "\0"
            spans = spans_of(name, path.read_text(encoding="utf-8"))
            yield from (span for span in spans if not span.words.startswith(theirs))


def heads() -> Iterator[Typed]:
    """Comments of configurations and examples."""
    files = [*(REPOSITORY / "configs").rglob("*.yml"), *(REPOSITORY / "examples").glob("*.*")]
    for path in sorted(files):
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = "\n".join(line.lstrip("# ") for line in lines if line.startswith("#"))
        for line in comments.replace("\\\n", " ").splitlines():
            if _START.match(line) and " -" in line:
                yield Typed(path.relative_to(REPOSITORY).as_posix(), _without_remark(line))


def _without_remark(line: str) -> str:
    return re.sub(r"(\s{2,}\w.*|,? or .*)", "", line)


def texts_of_source() -> Iterator[tuple[str, str]]:
    """Place and text of every literal in ppdist that is no docstring; {x} is x where it is made."""
    for path in sources().values():
        if path.is_relative_to(REPOSITORY / "tools"):
            continue
        nodes = nodes_of(path)
        left_out = {id(part) for node in nodes if isinstance(node, ast.JoinedStr)
                    for part in ast.walk(node) if part is not node}  # fmt: skip
        left_out |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = _literal(node)
            if text and id(node) not in left_out:
                yield f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}", text


def _literal(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) or "{}" for part in node.values)
    return ""


def messages() -> Iterator[Typed]:
    """Code in backquotes, and what stands without them behind `-o` or as an option or a key."""
    for place, text in texts_of_source():
        for span in re.findall(r"`([^`]+)`", text):
            yield Typed(place, span)
        plain = _OTHERS.sub("", re.sub(r"`[^`]+`", "", text))
        plain = plain if "/models/" not in place else ""  # state-dict keys look like ours
        for option in _OPTION.findall(plain):
            yield Typed(place, option)
        for key in _DOTTED.findall(plain):
            if key not in REMOVED or not place.startswith("ppdist/config/removed.py:"):
                yield Typed(place, key)
        for command in re.findall(r"ppdist [a-z]+(?= |\)|;|$|,)", plain):
            if command.split()[1] in cli.COMMANDS or "(ppdist" in plain:
                yield Typed(place, command)
        for item in re.findall(r"(?<=-o )[a-z_.]+=[^ ;,]+", plain):
            yield Typed(place, f"-o {item}")


# --- whether it works ---


def check(typed: Typed, command: str = "") -> int:
    """Runs what a text types; returns how many commands, options and keys that were.

    Args: command: the one whose command line the words continue; "": any.
    Raises: Refused: it does not work.
    """
    words = typed.words
    starts = [match.start() for match in _START.finditer(words)]
    if starts:
        ends = [*starts[1:], len(words)]
        lines = [words[start:end] for start, end in zip(starts, ends)]
        for line in _joined(lines):
            run(_END.split(line)[0])
        return len(_joined(lines))
    if re.match(r"(?:DATA|CONFIG) -", words):
        run(f"ppdist train {words}")
        return 1
    if re.match(r"-o \S", words):
        items = [item.rstrip(",") for item in shlex.split(_plain(words)) if item != "-o"]
        require_keys(items)
        return len(items)
    if re.match(r"--?[a-zA-Z]", words):
        require_option(shlex.split(_plain(words)), command)
        return 1
    if re.fullmatch(r"[^\s(]+=[^\s(]+ [^\s(]+=[^\s(]+", words):
        return check(Typed(typed.place, f"-o {words}"))
    key = None if "(" in words else _KEY.fullmatch(words)
    if key and "." in key[1] and key[1].rpartition(".")[2] not in _FILES:
        companion = _COMPANIONS.get(key[1], "")
        item = f"{key[1]}={key[3]}" if key[2] else key[1]
        require_keys([item, companion] if companion and key[2] else [item])
        return 1
    return 0


def _joined(lines: Sequence[str]) -> list[str]:
    """`fleetrun ... ppdist train ...` is one command."""
    joined: list[str] = []
    for line in lines:
        before = joined[-1] if joined else ""
        launches = re.match(r"(python3? )?fleetrun|ppdist launch|\S*tools/launch", before)
        if launches and not re.search(r"[|;&]", before):
            joined[-1] += line
        else:
            joined.append(line)
    return joined


def _plain(words: str) -> str:
    """A line with all that is optional, and something where the reader's own stands."""
    words = words.replace("…", "...").replace("=...", "=x")
    words = _OPTIONAL.sub(r"\1", _OPTIONAL.sub(r"\1", words))
    words = re.sub(r"\$\([^)]*\)|\$\{?\w+\}?|\{\}", "1", words)
    return re.sub(r"(?<=\s)\.\.\.", "", words)


def run(line: str) -> None:
    """Runs a command line to the point where work would begin.

    Raises: Refused: it does not get there.
    """
    open_end = "..." in line.replace("=...", "") or "…" in line or "{}" in line
    words = [_PLACEHOLDERS.get(word, word).split("|")[0] for word in shlex.split(_plain(line))]
    words = words[words[0].startswith("python") :]
    if "COMMAND" in words or re.search(r"ppdist 1+( |$)", " ".join(words)):
        return
    try:
        _run(words, open_end)
    except CodedError as error:
        raise Refused(f"{line}: {error} [{error.code}]") from error


def _run(words: Sequence[str], open_end: bool) -> None:
    door = re.fullmatch(r"(?:\./)?tools/(\w+)\.py", words[0])
    if door and door[1] in OWN_TOOLS:
        return
    if door:
        words = ["ppdist", DOORS.get(door[1], door[1]), *words[1:]]
    if words[0] == "fleetrun":
        words = ["ppdist", "launch", *words[1:]]
    if len(words) == 1:
        return
    command, *rest = words[1:]
    if command == "launch":
        return _launch(rest, open_end)
    if command not in cli.COMMANDS and not command.startswith("-"):
        raise Refused(f"ppdist {command}: no such command")
    below = parsers_of(command)
    named = f"{command} {rest[0]}" if rest and f"{command} {rest[0]}" in below else command
    options = rest[len(named.split()) - 1 :]
    if command.startswith("-") or not options or "--help" in options:
        return
    if len(options) == 1 and options[0] in _choices(below[named]):  # `ppdist benchmark train`
        return
    is_name = all(word.startswith("-") for word in options) or options == ["DATA"]
    arguments = _parse(command, rest, lenient=open_end or is_name)
    if arguments is not None:
        _check_arguments(command, arguments)


def _launch(words: Sequence[str], open_end: bool) -> None:
    if not words or words == ["--help"] or (len(words) == 1 and words[0] in launch.help_text()):
        return
    script = next((at for at, word in enumerate(words)
                   if word == "ppdist" or word.endswith(".py")), None)  # fmt: skip
    if script is None:
        words, script = [*words, "ppdist"], len(words)
    launch.parse_options(words, {})
    if not words[script].endswith("x.py") and Path(words[script]).parts[0] in ("ppdist", "tools"):
        _run(words[script:], open_end)


def _choices(parser: argparse.ArgumentParser) -> Sequence[str]:
    """What the first positional argument may be, if it is one of a few."""
    return next((tuple(each.choices) for each in parser._actions if each.choices
                 and not each.option_strings), ())  # fmt: skip


class _Parsed(Exception):
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


def _parse(command: str, words: Sequence[str], *, lenient: bool) -> argparse.Namespace | None:
    """What the command makes of its words; None: they end too early, as they may.

    Args: lenient: what is required may be missing.
    """

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise Refused(f"{self.prog}: {message}")

    module = importlib.import_module(f"ppdist.cli.{command}")
    original = cli.Parser.parse_args

    def parse_args(self: cli.Parser, *given: Any, **options: Any) -> argparse.Namespace:
        arguments: argparse.Namespace = original(self, *given, **options)
        if not hasattr(module, "parse"):
            raise _Parsed(arguments)
        return arguments

    with (
        mock.patch.object(sys, "argv", [f"ppdist {command}", *words]),
        mock.patch.object(cli.Parser, "error", refuse),
        mock.patch.object(cli.Parser, "parse_args", parse_args),
    ):
        try:
            found: argparse.Namespace = getattr(module, "parse", module.main)()
        except _Parsed as end:
            return end.arguments
        except (Refused, CodedError) as error:
            is_short = re.search(
                r"are required|expected (at least )?one argument|unrecognized arguments: [1 ]+$",
                f"{error}",
            )
            if lenient and (is_short or getattr(error, "code", "") == "option_missing"):
                return None
            if isinstance(error, Refused):
                raise Refused(f"ppdist {command} {' '.join(words)}: {error}") from error
            raise
    return found


def _check_arguments(command: str, arguments: argparse.Namespace) -> None:
    """The names of recipes and of weights, and the keys that a command line holds."""
    given = vars(arguments)
    config, items = given.get("config"), given.get("override") or []
    if command == "tune" and config:
        if Path(find_config(config)).is_file():
            load_study(Path(find_config(config)), tuple(items))
        return
    model = str(given.get("model") or "")
    is_shown = re.fullmatch("(NAME|RECIPE|1+)?", model)
    is_recipe = model in short_names() or Path(find_config(model)).is_file()
    if command in ("train", "data") and not (is_shown or is_recipe):
        raise Refused(f"--model {model}: no such recipe")
    weights = given.get("weights") or []
    for name in map(str, [weights] if isinstance(weights, str | Path) else weights):
        is_name = re.fullmatch(r"[a-z0-9_]+_(coco|imagenet|objects365)", name)
        if is_name and name not in zoo():
            raise Refused(f"{name}: no such published weights")
    bases = [config] if config and Path(find_config(config)).is_file() else []
    if config in short_names() and not bases:
        raise Refused(f"-c {config}: no such configuration")
    require_keys([item for item in items if item not in _ITEMS], bases)


def require_keys(items: Sequence[str], bases: Sequence[str] = ()) -> None:
    """Raises: Refused: no configuration takes the items; one without `=` is a key or a section."""
    items = [item for item in items if item not in _ITEMS]
    missing = {item.partition("=")[0] for item in items} - known_keys() - {*table().keys}
    missing -= {"model.backbone"}  # of plug-ins
    if missing:
        raise Refused(f"{', '.join(missing)}: no such key")
    values = [item for item in items if "=" in item and not _is_placeholder(item)]
    values = [item for item in values if item.partition("=")[0] not in table().keys]
    if values:
        _require_values(tuple(values), tuple(bases))


@functools.cache
def known_keys() -> set[str]:
    """Keys and sections of the configuration."""
    keys = all_keys(ExperimentConfig)
    return {".".join(key[:end]) for key in keys for end in range(1, len(key) + 1)}


def _is_placeholder(item: str) -> bool:
    value = item.partition("=")[2]
    theirs = r"\b[A-Z]+\b|\.\.\.|\{(from|choices): |: x\b|^\[h, s, v\]$"
    return bool(re.search(theirs, value)) or value in ("", "x", "k", "1")


@functools.cache
def _tree(base: str) -> Node:
    return Reader().read_file(find_config(base))


@functools.cache
def _require_values(items: tuple[str, ...], bases: tuple[str, ...]) -> None:
    problems = []
    for base in bases or BASES:
        reader = Reader()
        nodes = filter(None, map(reader.read_override, items))
        try:
            parse_tree(functools.reduce(merge, nodes, _tree(base)), ExperimentConfig,
                       reader.problems)  # fmt: skip
            return
        except CodedError as error:
            problems.append(f"{error}")
    raise Refused(min(problems, key=len))


# --- options alone ---


@functools.cache
def parsers_of(command: str) -> dict[str, argparse.ArgumentParser]:
    """The parser of a command, and those of its subcommands, by their names."""

    class Stop(Exception):
        pass

    held: list[cli.Parser] = []

    def parse_args(self: cli.Parser, *_: Any, **__: Any) -> None:
        held.append(self)
        raise Stop

    if command == "launch" or command not in cli.COMMANDS:
        return {}
    module = importlib.import_module(f"ppdist.cli.{command}")
    begin: Callable[[], Any] = getattr(module, "parse", module.main)
    with mock.patch.object(cli.Parser, "parse_args", parse_args), contextlib.suppress(Stop):
        begin()
    found: dict[str, argparse.ArgumentParser] = {command: held[0]}
    for action in held[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"{command} {name}": parser for name, parser in action.choices.items()}
    return found


@functools.cache
def options() -> dict[str, list[tuple[argparse.ArgumentParser, argparse.Action]]]:
    """Every option of every command."""
    found: dict[str, list[tuple[argparse.ArgumentParser, argparse.Action]]] = {}
    for command in cli.COMMANDS:
        for parser in parsers_of(command).values():
            for option, action in parser._option_string_actions.items():
                found.setdefault(option, []).append((parser, action))
    return found


@functools.cache
def fleetrun_options() -> set[str]:
    return {*_OPTION.findall(launch.help_text()), *launch._REFUSED}


@functools.cache
def deploy_options() -> set[str]:
    """Those of the programs that deploy/ and this repository add to the package."""
    files = [*(REPOSITORY / "deploy").rglob("*.py"), *(REPOSITORY / "ppdist/runtime").glob("*.py")]
    files += (REPOSITORY / "tools").glob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    limits = re.findall(r"^        \"([a-z-]+)\": \"", text, re.M)  # of deploy/serving
    return {*re.findall(r"\"(--[\w-]+)\"", text), *(f"--{name}" for name in limits)}


def require_option(words: Sequence[str], command: str) -> None:
    """Raises: Refused: no command has the option, or none takes the values behind it."""
    if command:
        return run(f"ppdist {command} ... {shlex.join(words)}")
    name, equals, value = words[0].rstrip(":,").partition("=")
    if name in fleetrun_options() | deploy_options() | _FOREIGN_OPTIONS | {"--version"}:
        return
    if name.lstrip("-").replace("-", "_") in table().words:  # a page says what ours is
        return
    if name not in options():
        raise Refused(f"{name}: an option of no command")
    values = [_PLACEHOLDERS.get(word, word) for word in ([value] if equals else words[1:])]
    problems = []
    for parser, action in options()[name]:
        at = next((at for at, word in enumerate(values) if word.startswith("-")), len(values))
        mine, rest = values[:at], values[at:]
        if not mine or (mine and action.nargs != 0 and all(map(_is_shown, mine))):
            return require_option(rest, command) if rest and rest[0][:2] == "--" else None
        try:
            if action.nargs == 0:
                raise argparse.ArgumentError(action, f"takes no value, found {mine}")
            for each in mine:
                parser._check_value(action, parser._get_value(action, each))
            return require_option(rest, command) if rest and rest[0][:2] == "--" else None
        except argparse.ArgumentError as error:
            problems.append(f"{error}")
    raise Refused(f"{' '.join(words)}: {problems[0]}")


def _is_shown(word: str) -> bool:
    """Whether a word stands for the reader's own."""
    return word in ("1", "x") or word.isupper()


# --- answers to other trainers' words ---

# What users of other trainers give, by word; else "1".
SAMPLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("imgsz", "img", "img_size"), ("640", "640,480", "[640, 480]")),
    **dict.fromkeys(("batch", "batch_size"), ("16", "-1", "0.7")),
    **dict.fromkeys(("amp", "half", "rect", "cos_lr", "use_gpu", "use_vdl"), ("", "True", "False")),
    **dict.fromkeys(("use_xpu", "use_npu", "use_ema", "sync_bn", "pretrained"), ("True", "False")),
    **dict.fromkeys(("data", "source"), ("coco.yaml", "photos")),
    **dict.fromkeys(("project", "name", "output_dir", "save_dir", "architecture"), ("runs",)),
    **dict.fromkeys(("weights", "pretrain_weights"), ("yolov5n.pt", "yolov5n_coco")),
    **dict.fromkeys(("lr0", "lr", "learning_rate", "base_lr", "LearningRate.base_lr"), ("0.01",)),
    **dict.fromkeys(("mosaic", "mixup", "fliplr", "flipud", "conf", "iou"), ("0.5",)),
    **dict.fromkeys(("conf_thres", "iou_thres", "lrf", "ema_decay", "label_smoothing"), ("0.1",)),
    **dict.fromkeys(("cache",), ("", "True", "False", "ram", "disk")),
    **dict.fromkeys(("device", "gpus"), ("0,1", "0", "cpu", "")),
    "model": ("yolov5n.pt", "yolov5s6.pt", "yolov5n.yaml", "rtdetr-l.pt", "yolov5s-cls.pt"),
    "optimizer": ("SGD", "AdamW", "Adam", "auto", "RMSProp"),
    "OptimizerBuilder.optimizer.type": ("Momentum", "AdamW"),
    "freeze": ("10", "24"),
    "save_period": ("-1", "5"),
    "patience": ("50",),
    "names": ("[a,b]",),
    "nc": ("3",),
    "norm_type": ("bn", "sync_bn"),
    "split": ("test",),
    "format": ("onnx",),
    "include": ("onnx",),
    "classes": ("0",),
    "degrees": ("10",),
    "momentum": ("0.9",),
    "OptimizerBuilder.clip_grad_by_norm": ("35.0",),
}
_BESIDE = {  # what a command needs beside the answer
    "train": "DATA --model yolov5n",
    "eval": "-w RUN",
    "predict": "-w RUN --source photos",
    "export": "-w RUN",
    "convert": "-w RUN --out FILE",
    "data": "check DATA",
}


def answers() -> Iterator[Typed]:
    """Command lines as the answers complete them; place: what was typed."""
    for command in (*_BESIDE, "report"):
        words = {*table().words}
        for texts in table().commands.get(command, {}).values():
            words |= {*texts}
        for word in sorted(words):
            for value in SAMPLES.get(word, ("1",)):
                typed = f"{word}={value}"
                try:
                    refuse_options(command, [typed], ())
                except ConfigError as error:
                    place = f"ppdist {command} {typed}"
                    for span in re.findall(r"`([^`]+)`", f"{error}"):
                        yield Typed(place, _completed(command, span))


def key_answers() -> Iterator[Typed]:
    """The items of -o that the answers to other trainers' keys name."""
    for name in table().keys:
        for value in SAMPLES.get(name, ("1",)):
            node = Reader().read_override(f"{name}={value}")
            if node is None:
                continue
            key, *_ = node.value
            answer = answer_key((key,), node.value[key])
            for span in re.findall(r"`([^`]+)`", answer):
                yield Typed(f"-o {name}={value}", span)


def _completed(command: str, span: str) -> str:
    """A part of a command line with what else the command needs."""
    if _START.match(span):
        return span
    if span.startswith("DATA "):
        return f"ppdist train {span}"
    beside = _BESIDE.get(command, "")
    if span.startswith("-w "):
        beside = beside.removeprefix("-w RUN")
    if span.startswith("--source "):
        beside = beside.removesuffix(" --source photos")
    if span.startswith("--resume"):
        beside = ""
    if span.startswith("--out") and command == "convert":
        beside = "-w RUN"
    if span.startswith("--model ") and command == "predict":
        beside = "--source photos"
    return f"ppdist {command} {beside} {span}"
