"""Shows a resolved configuration, or regenerates docs and schema.

python tools/config.py show -c configs/x.yml [-o key=value ...]    the resolved file, on stdout
python tools/config.py docs [--out FILE]                           writes docs/config.md
python tools/config.py schema [--out FILE]                         writes configs/schema.json
python tools/config.py errors [--out FILE]                         writes docs/errors.md
"""

import json
from pathlib import Path

from ppdist.cli import CLONE
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
    targets = {
        "docs": "docs/config.md",
        "schema": "configs/schema.json",
        "errors": "docs/errors.md",
    }
    for name, target in targets.items():
        command = commands.add_parser(name, help=f"regenerate {target}")
        command.add_argument("--out", type=Path, default=CLONE / target)
    args = parser.parse_args()
    if args.command == "show":
        print(dump_yaml(load_config(args.config, args.override)), end="")
        return
    text = error_table(CLONE) if args.command == "errors" else _of_config(args.command)
    make_parent(args.out)
    with writing(args.out):
        args.out.write_text(text, encoding="utf-8")
    print(f"wrote {args.out}")


def _of_config(command: str) -> str:
    if command == "docs":
        return markdown(ExperimentConfig)
    return json.dumps(json_schema(ExperimentConfig), indent=2, ensure_ascii=False) + "\n"
