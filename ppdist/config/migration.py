"""Keys and options of other trainers, and their replacements.

a key of a file or of -o      TrainReader.batch_size=8          -> train.batch_size_per_card=8
a word of a command           train --img 640, train imgsz=640  -> --image-size 640
                              predict --conf-thres 0.4          -> --threshold 0.4
a name or argument in Python  train(imgsz=640), found.boxes     -> image_size=640, found.boxes_xyxy
a whole file behind -c        data.yaml, a PaddleDetection config, a model's YAML
"""

import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any, NamedTuple, ParamSpec, TypeVar

import yaml

from ppdist.common.errors import ConfigError
from ppdist.config.shipped import find_config
from ppdist.config.yaml import BASE_KEY, Node

PADDLE, ULTRA, OTHERS = "PaddleDetection", "ultralytics", "other trainers"
_OPTION_OF_FILES = "--source"  # takes files, and would mistake `conf=0.4` for one


class Equivalent(NamedTuple):
    """The equivalent of a key or an option of another trainer.

    key: ours; "": there is none.  note: what to know, or what to do where there is no key.
    option: of `ppdist train DATA`, with {} for the value; "": the key behind -o.
    values: theirs and ours, where they differ.  texts: whole answers, by value.
    instead: the answer to all other values; "": the key stands for these, too.
    """

    owner: str
    key: str = ""
    note: str = ""
    option: str = ""
    values: Mapping[str, str] = {}
    texts: Mapping[str, str] = {}
    instead: str = ""

    def in_config(self, value: str, sign: str) -> str:
        """Returns what to write in a file (`: `) or after -o (`=`)."""
        translated = _as_list(self._translate(value))
        return self._answer(f"{self.key}{sign}{translated}" if translated else self.key, value)

    def on_command_line(self, command: str, value: str, *, with_config: bool = False) -> str:
        """Returns what to write after `ppdist COMMAND`.

        Args: with_config: -c is there, beside which the options of DATA are keys.
        """
        translated = self._translate(value)
        if command == "train" and self.option and not (with_config and self.key):
            return self._answer(self.option.replace("{}", _as_words(translated)).rstrip(), value)
        says_what_to_type = not self.key and "`" in self.note
        if command != "train" and (self.key.startswith(_OF_TRAINING) or says_what_to_type):
            return "leave it out: it only applies to training"
        if command in _WITHOUT_DATA and self.key.startswith(("data.", "evaluate.")):
            return "leave it out: it only applies to data sets"
        if self.key and command in _WITH_KEYS:
            item = f"{self.key}={_as_list(translated) or '...'}"
            return self._answer(f"-o {shlex.quote(item)}", value)
        if self.note and not self.key and not self.option:
            return self._answer("", value)
        return f"leave it out; `ppdist {command} --help` lists the options"

    def _translate(self, value: str) -> str:
        """Returns our value for the other trainer's value."""
        return self.values.get(value.lower(), value)

    def _answer(self, written: str, value: str) -> str:
        """Returns the answer: a text written for the value, a note, or "write `...`"."""
        if text := self.texts.get(value.lower()):
            return text
        is_translated = value.lower() in self.values
        answer = self.instead if written and not is_translated else ""
        if answer or not written:
            return (answer or self.note).replace("{}", value or "...")
        return f"write `{written}`" + (f" ({self.note})" if self.note and not is_translated else "")


_SEVERAL = re.compile(r"[\[(]? *(\d+(?: *[,x] *\d+)+) *[\])]?")  # 640,480  [640, 480]  640x480


def _numbers(value: str) -> list[str]:
    """Splits several numbers, as in `640,480`; returns an empty list for other values."""
    several = _SEVERAL.fullmatch(value)
    return re.split(r" *[,x] *", several[1]) if several else []


def _as_words(value: str) -> str:
    """Writes several numbers as an option takes them, `640 480`; returns other values as is."""
    return " ".join(_numbers(value)) or value


def _as_list(value: str) -> str:
    """Writes several numbers as a key takes them, `[640,480]`; returns other values as is."""
    return f"[{','.join(_numbers(value))}]" if _numbers(value) else value


_OF_TRAINING = (
    "train.", "optimizer.", "schedule.", "loss.", "checkpoint.", "early_stopping.", "data.augment",
    "model.pretrained",
)  # fmt: skip
_WITH_KEYS = ("train", "eval", "predict", "export", "convert", "data")  # commands with -o
_WITHOUT_DATA = ("predict", "export", "convert")


class Table(NamedTuple):
    """Content of migration.yml, keyed by what users type."""

    keys: Mapping[str, Equivalent]
    words: Mapping[str, Equivalent]
    commands: Mapping[str, Mapping[str, Mapping[str, str]]]  # command -> owner -> word -> text
    python: Mapping[str, Any]  # place -> name -> text; arguments: command -> name -> text


@cache
def table() -> Table:
    """Reads migration.yml, once a user has typed a foreign option."""
    file = Path(__file__).with_suffix(".yml")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    keys = {
        name: Equivalent(owner, **({"key": row} if isinstance(row, str) else row))
        for owner, rows in content["keys"].items()
        for name, row in rows.items()
    }
    words = {name: key for name, key in keys.items() if key.owner in (ULTRA, OTHERS)}
    for owner, rows in content["words"].items():
        for name, row in rows.items():
            fields = {"key": row} if isinstance(row, str) else row
            words[name] = keys[fields["same"]] if "same" in fields else Equivalent(owner, **fields)
    return Table(keys, words, content["commands"], content["python"])


# Names, without .yaml, of the data files in the ultralytics package.
SETS_BY_NAME = (
    *("coco", "coco8", "coco128", "voc", "objects365", "lvis", "visdrone", "xview", "sku-110k"),
    *("argoverse", "globalwheat2020", "open-images-v7"),
)
_NOT_RESUMED = (".pt", ".pth", ".pdparams", ".onnx")


def answer_key(path: Sequence[str | int], node: Node) -> str:
    """Says what to write instead of a foreign key; "" if no trainer has it.

    Args: node: its value.
    """
    key, value = ".".join(map(str, path)), node
    # An item of -o is a chain of mappings with one key each: TrainReader.batch_size=8.
    while isinstance(value.value, dict) and len(value.value) == 1:
        (name, below), *_ = value.value.items()
        key, value = f"{key}.{name}", below
    keys_of_others = table().keys
    # A key below a foreign key is foreign, too: TrainReader.batch_transforms.0.size.
    while key not in keys_of_others:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return ""
    equivalent = keys_of_others[key]
    plain = "" if isinstance(value.value, dict | list) else value.text
    advice = equivalent.in_config(plain, ": " if node.place.line else "=")
    return f"{key} is a key of {equivalent.owner}; {advice}"


def our_key(name: str) -> str:
    """Returns our key for a key or an option of another trainer; "": there is none."""
    equivalent = table().keys.get(name) or table().words.get(name)
    return "" if equivalent is None else equivalent.key


def our_value(key: str, value: str) -> str:
    """Returns our name for another trainer's value of one of our keys; "": there is none."""
    rows = (*table().keys.values(), *table().words.values())
    names = (row.values.get(value.lower(), "") for row in rows if row.key == key)
    return next(filter(None, names), "")


class _Word(NamedTuple):
    """A word of a command line, with its value; is_item: it follows -o."""

    typed: str
    name: str
    value: str
    is_item: bool


def refuse_options(
    command: str, words: Sequence[str], unknown: Container[str], typed_command: str = ""
) -> None:
    """Refuses words of other trainers on our command line, with what to write for each.

    The answer to several words is the whole command, where each of them has an equivalent.

    Args:
        words: the command line after the command.
        unknown: options, with their dashes, that the command does not have.
        typed_command: what was typed in place of `command`, such as `yolo detect val`.
    Raises: ConfigError: there are such words.
    """
    parts = _join_folder([*_split(command, words, unknown)])
    with_config = not {"-c", "--config"}.isdisjoint(words)
    answers = {
        part: _answer(command, part.name, part.value, item=part.is_item, with_config=with_config)
        for part in parts
        if isinstance(part, _Word)
    }
    lines = [f"{part.typed}: {answer}" for part, answer in answers.items() if answer]
    items = [part.typed for part in answers if part.is_item]
    translated = [item for item in items if _our_item(item) != item]
    if (lines and len(lines) + len(translated) > 1) or typed_command:
        written, remarks = _translate_line(command, parts, answers)
        if written:
            what = "a command of another trainer" if typed_command else "options of other trainers"
            raise ConfigError(
                "\n  ".join([what, *remarks, f"write `{written}`"]),
                code="foreign_option",
                where=typed_command,
            )
    if lines:
        raise ConfigError("\n  ".join(lines), code="foreign_option")


def _split(command: str, words: Sequence[str], unknown: Container[str]) -> Iterator["_Word | str"]:
    """Splits a command line into our words and, with their values, those that may be foreign."""
    after_override = False
    # Until one of our options comes that takes name=value; also after the one that takes files.
    may_be_foreign = True
    values: list[str] = []  # of a foreign option, still to come
    for at, word in enumerate(words):
        if values:
            values.pop()
            continue
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            may_be_foreign, after_override = name == _OPTION_OF_FILES, word in ("-o", "--override")
            following = [] if equals else _option_values(words[at + 1 :])
            value = value if equals else ",".join(following)
            foreign = name in unknown or is_weights_as_model(command, name[2:], value)
            values = following if foreign else []
        else:
            has_equals = bool(equals) or word == "resume"  # `yolo train resume model=last.pt`
            foreign = has_equals and not after_override and (may_be_foreign or word in unknown)
            foreign = foreign and not os.path.exists(word)
        name = name.lstrip("-").replace("-", "_")
        item = after_override and bool(equals)
        if foreign or item:
            yield _Word(word if equals else f"{word} {value}".strip(), name, value, item)
        elif not after_override or word not in ("-o", "--override"):
            yield word


def _join_folder(words: list["_Word | str"]) -> list["_Word | str"]:
    """Joins `project` and `name` of ultralytics, which are two parts of one folder."""
    parts = {word.name: word for word in words if isinstance(word, _Word) and not word.is_item}
    if not {"project", "name"} <= {*parts}:
        return words
    project, name = parts["project"], parts["name"]
    folder = f"{project.value}/{name.value}"
    joined = _Word(f"{project.typed} {name.typed}", "project", folder, False)
    return [joined, *(word for word in words if word not in (project, name))]


def _option_values(words: Sequence[str]) -> list[str]:
    """Returns the words that are an option's value: the next one, or the next numbers."""
    numbers = [*takewhile(str.isdecimal, words)]
    if numbers or not words:
        return numbers
    return [] if re.match(r"-(?![\d.])", words[0]) else [words[0]]


def _answer(command: str, name: str, value: str, *, item: bool, with_config: bool = False) -> str:
    """Says what to write instead of a word; "" if no trainer has it.

    Args:
        item: the word follows -o, where only words that are no configuration keys are answered.
        with_config: -c is on the command line.
    """
    for owner, texts in table().commands.get(command, {}).items():
        if name in texts and (not item or owner == PADDLE):
            return f"an option of {owner}; {texts[name].replace('{}', value or '...')}"
    equivalent = table().words.get(name)
    if item or equivalent is None:
        return ""
    advice = _explain_model(value) if command == "train" and name == "model" else ""
    advice = advice or equivalent.on_command_line(command, value, with_config=with_config)
    return f"an option of {equivalent.owner}; {advice}"


_PLAIN = ("imgsz", "img", "img_size", "project", "weights")  # which need no remark on a whole line
_SIZED = re.compile(r"yolo(?:v?\d+)?-?([nsmlx])u?", re.I)  # a YOLO of any version, and its size
# Of each group, one option is on a whole command line.
_NEEDED = {
    "train": (),
    "eval": (("-w", "--weights"),),
    "predict": (("-w", "--weights", "--model"), ("--source",)),
    "export": (("-w", "--weights"),),
}  # fmt: skip


def _translate_line(
    command: str, parts: Iterable["_Word | str"], answers: Mapping["_Word", str]
) -> tuple[str, list[str]]:
    """Writes a whole command line in our words; "" where a word has no equivalent.

    Returns: the line; remarks on its words.
    """
    launcher: list[str] = []
    data: list[str] = []
    options: list[str] = []
    items: list[str] = []
    remarks: list[str] = []
    for part in parts:
        if isinstance(part, str):
            options.append(part)
            continue
        answer = answers[part]
        if not answer:
            (items if part.is_item else options).append(_our_item(part.typed))
            continue
        if part.name == "data" and command in ("train", "eval"):
            folder = _folder_of_set(part.value)
            data.append(folder)
            if folder == "FOLDER":
                remarks.append(f"{part.typed}: ppdist fetches no data; FOLDER has the images")
            continue
        if part.name in ("model", "cfg") and command == "train":
            written, remark = _translate_model(part.value)
        else:
            written, remark = _words_of(answer)
        if written is None:
            return "", []
        if remark and part.name not in _PLAIN:
            remarks.append(f"{part.typed}: {remark}")
        if written[:1] == ["fleetrun"]:
            launcher = written
        elif written[:1] == ["-o"]:
            items += written[1:]
        else:
            options += [*written[:1], *map(_published, written[1:])]
    return _join_line(command, launcher, data, options, items), remarks


def _join_line(
    command: str, launcher: list[str], data: list[str], options: list[str], items: list[str]
) -> str:
    """Joins the parts of a command line; "" if the command needs more than they are."""
    needed = _NEEDED.get(command)
    if needed is None or any({*group}.isdisjoint(options) for group in needed):
        return ""
    if command == "train" and {"-c", "--config", "--resume"}.isdisjoint(options):
        if not data and (not options or options[0].startswith("-")):
            return ""
        at = options.index("--weights") + 1 if "--weights" in options[:-1] else 0
        if "--model" not in options:
            options += ["--model", model_of_weights(options[at] if at else "")]
        if at:
            options[at] = _published(options[at])
    override = ["-o", *items] if items else []
    return shlex.join([*launcher, "ppdist", command, *data, *options, *override])


def _words_of(answer: str) -> tuple[list[str] | None, str]:
    """Reads the words that an answer tells to write, and its remark; None: it names none."""
    _, _, advice = answer.partition("; ")
    if advice.startswith("leave it out"):
        return [], advice
    written = re.match(r"write `(?:DATA )?((?:-|fleetrun )[^`]*)`(?: \((.*)\))?", advice)
    if not written:
        return None, ""
    launcher, is_launched, _ = written[1].partition(" ppdist ")
    words = shlex.split(launcher if is_launched else written[1])
    is_open = any(re.fullmatch(r"[A-Z]+|.*\.\.\.", word) for word in words)
    return (None if is_open else words), written[2] or ""


def _translate_model(value: str) -> tuple[list[str] | None, str]:
    """Translates `model=yolov8n.pt`: our words and, for a model that is not here, a remark."""
    words, remark = _words_of(f"; {_explain_model(value)}")
    path = PurePath(value)
    if words is None and (sized := _SIZED.fullmatch(path.stem)):
        name = f"yolov5{sized[1].lower()}"
        start = ["--weights", f"{name}_coco"] if path.suffix == ".pt" else []
        remark = f"{path.stem} is not here, {name} is (others: `ppdist config list`)"
        return ["--model", name, *start], remark
    if words and len(words) == 4 and Path(value).is_file():
        words[3] = value
    return words, remark


def model_of_weights(weights: str) -> str:
    """Returns the recipe that the name of weights names; else one to begin with."""
    words, _ = _translate_model(re.sub("_(coco|imagenet)$", "", weights))
    return words[1] if words else "yolov5n"


def _our_item(item: str) -> str:
    """Translates an item of -o; returns one that no trainer has unchanged."""
    key, _, value = item.partition("=")
    equivalent = table().keys.get(key)
    written = re.match("write `([^`]+)`", equivalent.in_config(value, "=")) if equivalent else None
    return written[1] if written else item


def _published(value: str) -> str:
    """Returns the name of published weights for a file such as yolov5n.pt that is not there."""
    name = value.removesuffix(".pt")
    is_missing = value.endswith(".pt") and not os.path.exists(value)
    return f"{name}_coco" if is_missing and find_config(name) != name else value


def _folder_of_set(data: str) -> str:
    """Finds the folder of a set that ultralytics fetches by name; "FOLDER" if it is not there."""
    stem = PurePath(data).stem
    if os.path.exists(data) or stem.lower() not in SETS_BY_NAME:
        return data
    places = (f"datasets/{stem}", f"../datasets/{stem}", stem)
    return next(filter(os.path.isdir, places), "FOLDER")


class ForeignName(ConfigError, AttributeError):
    """Error about an attribute that objects of other trainers have."""


class ForeignArgument(ConfigError, TypeError):
    """Error about an argument or an index that other trainers take."""


def refuse_name(owner: str, name: str, *, imports: bool = False) -> None:
    """Refuses a name that another trainer's class or package has, and names ours.

    Args:
        owner: ppdist, Detector or Detections: a part of `python` in migration.yml.
        name: an attribute, or `[0]` for an index.
        imports: by `from owner import name`, where Python hides the text of an AttributeError.
    Raises: ConfigError `foreign_option`; unless imported it is also an AttributeError.
    """
    text = table().python[owner].get(name)
    if text is None:
        return
    where = f"{owner}[0]" if name == "[0]" else f"{owner}.{name}"
    kind: type[ConfigError] = ConfigError if imports else ForeignName
    owner_of_name = "" if text.startswith("of earlier") else "of another trainer; "
    raise kind(f"a name {owner_of_name}{text}", code="foreign_option", where=where)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_IN_PYTHON = {  # keys that have arguments of their own
    "train.epochs": "epochs",
    "train.batch_size_per_card": "batch",
    "model.pretrained": "weights",
    "model.image_size": "image_size",
    "output_dir": "output_dir",
    "train.steps": "steps",
    "data.single_class": "single_class",
    "data.fraction": "fraction",
}


def answering(
    command: str, also: Iterable[str] = ()
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a function so that it explains other trainers' arguments, as commands do options.

    Args:
        command: the command of `ppdist` that does the same.
        also: names of arguments that the function takes as **options.
    Raises: ConfigError `foreign_option`, from calls, which is also a TypeError.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        parameters = {*inspect.signature(function).parameters, *also}
        call = function.__name__.replace("__call__", "detector")

        @wraps(function)
        def answered(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            lines = []
            given: dict[str, object] = {**options}
            if {"project", "name"} <= {*given} - parameters:
                given["project"] = f"{given['project']}/{given.pop('name')}"
            for name, value in given.items():
                foreign = name not in parameters or is_weights_as_model(command, name, value)
                answer = _argument(command, name, value, parameters) if foreign else ""
                if answer:
                    lines.append(f"{call}({name}={value!r}): {answer}")
            if lines:
                raise ForeignArgument("\n  ".join(lines), code="foreign_option")
            return function(*args, **options)

        return answered

    return decorate


def _argument(command: str, name: str, value: object, parameters: Container[str]) -> str:
    """Says what to write in Python instead of an argument; "" if no trainer has it."""
    values = value if isinstance(value, list | tuple) else (value,)
    text = ",".join(map(str, values))
    answer = table().python["arguments"].get(command, {}).get(name)
    if answer is not None:
        owner = "" if answer.startswith("of earlier") else "of ultralytics; "
        return f"an argument {owner}{answer.replace('{}', text)}"
    answer = _answer(command, name, text, item=False)
    equivalent = table().words.get(name)
    key = equivalent.key if equivalent is not None and command == "train" else ""
    if equivalent is not None and key and _IN_PYTHON.get(key) not in parameters:
        override = equivalent._replace(option="").on_command_line(command, text)
        answer = f"an option of {equivalent.owner}; {override}"

    def in_python(match: re.Match[str]) -> str:
        if match[1]:  # `DATA --model NAME --weights NAME`
            pairs = [*re.findall(r"--(\w+) (\S+)", match[2])]
            written = ", ".join(f"{option}={_literal([value])}" for option, value in pairs)
            are_arguments = all(option in parameters for option, _ in pairs)
            return f"`{written}`" if are_arguments else match[0]
        option, *words = shlex.split(match[2])
        key, _, item = words[0].partition("=") if option == "-o" else ("", "", "")
        argument = _IN_PYTHON.get(key, option[2:].replace("-", "_") if not key else "")
        if argument in parameters:
            return f"`{argument}={_literal([item] if key else words)}`"
        if key and "overrides" in parameters:
            return f"`overrides=[{json.dumps(f'{key}={item}')}]`"
        if key and command == "predict":
            load = f"load_config(CONFIG, [{json.dumps(f'{key}={item}')}])"
            return f"`Detector(weights, config={load})`"
        return f"`ppdist {command} ... {match[2]}`"

    return re.sub(r"`(DATA )?(--?[a-z][^`]*)`", in_python, answer)


def _literal(words: Sequence[str]) -> str:
    """Writes words of a command line as Python literals."""
    plain = [
        word if re.fullmatch(r"-?[\d.]+(e-?\d+)?|\[.*\]", word) else json.dumps(word)
        for word in words
    ]
    return plain[0] if len(plain) == 1 else f"({', '.join(plain)})"


def refuse_weights(value: str) -> None:
    """Refuses a weight file where `train --resume` takes a run or a checkpoint.

    Raises: ConfigError: it is a weight file.
    """
    if value.endswith(_NOT_RESUMED):
        raise ConfigError(
            "--resume takes a run or a checkpoint, not a weight file",
            code="foreign_option",
            where=f"--resume {value}",
            fix=f"to start from these weights, use `--weights {value}`",
        )


def is_weights_as_model(command: str, name: str, value: object) -> bool:
    """Returns True for ultralytics' `yolov5n.pt`, model and weights in one, where a recipe goes."""
    return (command, name) == ("train", "model") and f"{value}".endswith(".pt")


def _explain_model(value: str) -> str:
    """Explains what corresponds to `model=yolov5n.pt` in `ppdist train`."""
    path = PurePath(value)
    name = path.stem if path.suffix in (".pt", ".yaml", ".yml") else value
    name = name.replace("-", "_")  # rtdetr-l
    if find_config(f"{name}_imagenet") != f"{name}_imagenet":
        start = f" --weights {name}_imagenet" if path.suffix == ".pt" else ""
        return f"write `DATA --model {name}{start}`; DATA: a folder of images for each class"
    if find_config(name) == name:  # no shipped config has this name
        examples = "`--model yolov5n`, `--model dfine_s`, ... (ppdist config list)"
        return f"ppdist trains YOLOv5, PP-YOLOE, RT-DETR and D-FINE: {examples}"
    start = f" --weights {name}_coco" if path.suffix == ".pt" else ""
    return f"write `DATA --model {name}{start}`"


def is_data_yaml(tree: Node) -> bool:
    """Returns True if the file is a data.yaml of ultralytics or Roboflow."""
    keys = tree.value if isinstance(tree.value, dict) else {}
    named = "names" in keys or ("nc" in keys and "backbone" not in keys)
    return named and any(key in keys for key in ("train", "val", "valid", "path"))


def refuse_file(tree: Node, path: str) -> None:
    """Refuses files of other trainers after -c, with what to do instead.

    Args: tree: of the file without its `_BASE_`, as `Reader.read_alone` reads it.
    Raises: ConfigError: it is one; it says what to do with it.
    """
    keys = tree.value if isinstance(tree.value, dict) else {}
    if is_data_yaml(tree):
        raise ConfigError(
            "is a data file of ultralytics or Roboflow, not a configuration",
            code="data_yaml_as_config",
            where=path,
            fix=f"leave out -c: `ppdist train {path} --model ppyoloe_plus_s` writes a "
            f"configuration; also `ppdist data check {path}`, `ppdist eval {path} -w RUN`",
        )
    if "backbone" in keys and "head" in keys and isinstance(keys["backbone"].value, list):
        raise ConfigError(
            "describes a model of ultralytics, layer by layer; ppdist builds YOLOv5 by its size",
            code="model_yaml_as_config",
            where=path,
            fix="write `model: {name: yolov5, size: s}`, or start from `-c yolov5s`",
        )
    if "data" in keys or "model" in keys:
        return
    bases = keys.get(BASE_KEY)
    listed = bases.value if bases is not None and isinstance(bases.value, list) else []
    keys_of_others = table().keys
    paddle_keys = [
        name for name in keys if name in keys_of_others and keys_of_others[name].owner == PADDLE
    ]
    # A single such key may be a typing error; all recipes of PaddleDetection have runtime.yml as a
    # base file.
    if len(paddle_keys) < 2 and not any("runtime.yml" in str(base.value) for base in listed):
        return
    lines = [answer_key((name,), keys[name]) for name in paddle_keys]
    raise ConfigError(
        "is a configuration of PaddleDetection, which ppdist does not read:\n  "
        + "\n  ".join([*lines, "its PP-YOLOE and RT-DETR recipes ship: `ppdist config list`"]),
        code="paddledetection_config",
        where=path,
        fix="copy configs/examples/my_data.yml, or `ppdist train DATA --model ppyoloe_plus_s`",
    )
