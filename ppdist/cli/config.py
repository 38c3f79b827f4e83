"""Shows a resolved configuration, or regenerates docs and schema.

python tools/config.py show -c configs/x.yml [-o key=value ...]    the resolved file, on stdout
python tools/config.py docs [--out FILE]                           writes docs/config.md
python tools/config.py schema [--out FILE]                         writes configs/schema.json
python tools/config.py errors [--out FILE]                         writes docs/errors.md
"""

import json
from collections.abc import Callable
from pathlib import Path

from ppdist.cli import CLONE, require_clone
from ppdist.common.arguments import add_config, described
from ppdist.common.error_table import markdown as error_table
from ppdist.common.files import make_parent, writing
from ppdist.config import ExperimentConfig, load_config
from ppdist.config.base import dump_yaml
from ppdist.config.schema import json_schema, markdown


def main() -> None:
    parser = described(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="check a file and print it with every key resolved")
    add_config(show, required=True)
    for name, (target, _) in GENERATED.items():
        command = commands.add_parser(name, help=f"regenerate {target}")
        command.add_argument("--out", type=Path, help="write there instead")
    args = parser.parse_args()
    if args.command == "show":
        print(dump_yaml(load_config(args.config, args.override)), end="")
        return
    target, text_of = GENERATED[args.command]
    out = args.out or require_clone(str(target.parent)) / target.name
    text = text_of()
    make_parent(out)
    with writing(out):
        out.write_text(text, encoding="utf-8")
    print(f"wrote {out}")


def schema_text() -> str:
    """configs/schema.json."""
    return json.dumps(json_schema(ExperimentConfig), indent=2, ensure_ascii=False) + "\n"


GENERATED: dict[str, tuple[Path, Callable[[], str]]] = {
    "docs": (Path("docs/config.md"), lambda: markdown(ExperimentConfig)),
    "schema": (Path("configs/schema.json"), schema_text),
    "errors": (Path("docs/errors.md"), lambda: error_table(CLONE)),
}
