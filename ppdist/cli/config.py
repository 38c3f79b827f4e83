"""Lists, shows and copies configurations.

ppdist config list                                     the configs that ship, each with a line
ppdist config show -c x.yml|NAME [-o key=value ...]    every key resolved, on stdout
ppdist config copy NAME [FILE]                         a shipped one, to be edited
"""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import ppdist
from ppdist.cli import add_config, make_parser
from ppdist.common.errors import ConfigError
from ppdist.common.files import write_text
from ppdist.config.experiment import load_config
from ppdist.config.parse import dump_yaml
from ppdist.config.shipped import find_config, folder, near, recipes, short_names

_EXPERIMENT = re.compile(r"^config: *(\S+\.yml)$", re.MULTILINE)
_TRAIN_COMMAND = re.compile(r"tools/train\.py -c configs/\S+")  # in the header of a shipped config
_BASES = re.compile(r"^_BASE_:(.*)$", re.MULTILINE)  # one line in every shipped config


def main() -> None:
    parser = make_parser("config", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the configs that ship, by name")
    show = commands.add_parser("show", help="check a file and print it with every key resolved")
    add_config(show, required=True)
    copy = commands.add_parser("copy", help="write a shipped config where it can be edited")
    copy.add_argument("name", help="as `ppdist config list` has it")
    copy.add_argument(
        "file", nargs="?", type=Path, help="default: in this folder, called as the shipped file"
    )
    args = parser.parse_args()
    if args.command == "list":
        print(format_listing(), end="")
    elif args.command == "show":
        print(dump_yaml(load_config(args.config, args.override)), end="")
    else:
        file = copy_config(args.name, args.file)
        print(f"wrote {file}; edit it, then: {_usage(file)}")


_MODELS = Path(ppdist.__file__).parent / "models"  # found without importing Paddle
_LISTING = """\
Recipes: `ppdist train DATA --model NAME`, or `-c NAME`.  AP: published figure
of the matching `--weights` on COCO val2017.  We measured the rest: params in
millions; ms, the CPU time of an image in ONNX Runtime on one thread; GB, the
memory of a training step of two images on a CPU.  `-`: not measured.

{table}
Other sets and examples: `-c NAME`; to edit one, `ppdist config copy NAME`.

{others}"""


@dataclass(frozen=True)
class ModelRow:
    """A recipe with its figures, formatted; a dash where there is none."""

    name: str
    pixels: str
    parameters: str  # millions
    gflops: str
    ap: str  # published
    ms: str
    memory: str  # GB
    weights: str


def list_models() -> list[ModelRow]:
    """Lists the recipes by family and size, with their figures: `config list` and the pages."""
    figures, published_weights = read_figures()["models"], read_published_weights()
    rows: list[tuple[tuple[str, str, int, float], ModelRow]] = []
    for short_name, name in short_names().items():
        model = load_config(name).model
        height, width = model.image_size
        weights, ap = published_weights.get(name, ("-", None))
        row = figures.get(short_name, {})
        memory = row.get("step_MB")
        cells = (
            _format_figure(row.get("parameters_M"), ".1f"),
            _format_figure(row.get("gflops"), ".1f"),
            _format_figure(ap, ".1f"),
            _format_figure(row.get("ms"), "d"),
            _format_figure(memory and memory / 1000, ".1f"),
        )
        pixels = f"{height}" if height == width else f"{height}x{width}"
        size = row.get("parameters_M", float("inf"))  # unknown sizes last
        key = (model.name, getattr(model, "variant", ""), height, size)
        rows.append((key, ModelRow(short_name, pixels, *cells, weights)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _format_figure(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def format_listing() -> str:
    """Lists the shipped configs in 80 columns: recipes with their figures, then the others."""
    head = ModelRow("name", "pixels", "params", "GFLOPs", "AP", "ms", "GB", "weights")
    table = "".join(
        f"{row.name:22} {row.pixels:>6} {row.parameters:>6} {row.gflops:>6} {row.ap:>4} "
        f"{row.ms:>4} {row.memory:>4}  {row.weights}\n"
        for row in (head, *list_models())
    )
    recipes_of_models = {*short_names().values()}
    descriptions = "".join(
        _describe_config(name, path)
        for name, path in recipes().items()
        if name not in recipes_of_models
    )
    return _LISTING.format(table=table, others=descriptions)


def _describe_config(name: str, path: Path) -> str:
    """Returns the lines for a config that is not a model recipe: its name and description."""
    lines = textwrap.wrap(
        first_sentence(path), 49, max_lines=2, placeholder=" ...", break_on_hyphens=False
    )
    words = (name, *[""] * (len(lines) - 1))
    return "".join(f"{word:31}{line}\n" for word, line in zip(words, lines))


def read_published_weights() -> dict[str, tuple[str, float]]:
    """Reads the name and AP of the published weights of every COCO recipe."""
    entries = yaml.safe_load((_MODELS / "zoo.yml").read_text(encoding="utf-8"))["weights"]
    weights_by_config: dict[str, tuple[str, float]] = {}
    for name, entry in entries.items():
        if entry.get("metric") == "mAP" and not entry.get("overrides"):
            weights_by_config.setdefault(entry["config"], (name, entry["published"]))
    return weights_by_config


def read_figures() -> dict[str, Any]:
    """Reads the figures that `python -m benchmarks models` measured."""
    figures: dict[str, Any] = yaml.safe_load((_MODELS / "figures.yml").read_text(encoding="utf-8"))
    return figures


def first_sentence(path: Path) -> str:
    """Returns the first sentence of the comment at the top of a config."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    words = " ".join(line.lstrip("# ") for line in head if "$schema" not in line)
    return re.split(r"[.;](?: |$)", words, maxsplit=1)[0]


def copy_config(name: str, file: Path | None) -> Path:
    """Copies a shipped config or study to a new file for editing.

    References to other shipped files (`_BASE_`) are rewritten so that they still resolve.

    Raises: ConfigError: there is no such config, or the file already exists.
    """
    source = Path(find_config(name))
    if not source.is_relative_to(folder()):
        raise ConfigError(
            f"no shipped config is called {name}",
            code="config_missing",
            fix=f"did you mean {' or '.join(near(name)) or 'one of `ppdist config list`'}?",
        )
    target = file or Path(source.name)
    if target.exists():
        raise ConfigError(
            "the file already exists",
            code="file_exists",
            where=str(target),
            fix="give another name",
        )
    text = source.read_text(encoding="utf-8")
    bases = _BASES.search(text)
    experiment = _EXPERIMENT.search(text)  # in a study
    parts = re.findall(r"[\w./]+\.yml", bases[1] if bases else "")
    for part in [*parts, *([experiment[1]] if experiment else [])]:
        shipped = (source.parent / part).resolve().relative_to(folder().resolve())
        # Paths relative to the shipped folder resolve from anywhere; paths relative to the copy
        # would not.
        text = text.replace(part, shipped.as_posix())
    text = _TRAIN_COMMAND.sub(f"ppdist train -c {shlex.quote(str(target))}", text)
    text = text.replace("$schema=../schema.json", f"$schema={folder() / 'schema.json'}")
    write_text(target, text)
    return target


def _usage(file: Path) -> str:
    """Returns the command that a copied config or study is for."""
    if _EXPERIMENT.search(file.read_text(encoding="utf-8")):
        return shlex.join(
            ["ppdist", "tune", "run", "-c", str(file), "--out", f"output/{file.stem}"]
        )
    return shlex.join(["ppdist", "train", "-c", str(file), "--eval"])
