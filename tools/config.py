"""Shows a resolved configuration, or regenerates what is generated from the config classes.

python tools/config.py show -c configs/x.yml [-o key=value ...]    the resolved file, on stdout
python tools/config.py docs [--out FILE]                           writes docs/config.md
python tools/config.py schema [--out FILE]                         writes configs/schema.json
"""

import argparse
import json
from pathlib import Path

from ppdist.config import ExperimentConfig, load_config
from ppdist.config.base import dump_yaml
from ppdist.config.schema import json_schema, markdown
from ppdist.errors import run
from ppdist.files import make_parent, writing

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="check a file and print it with every key resolved")
    show.add_argument("-c", "--config", required=True, help="YAML file")
    show.add_argument("-o", "--override", nargs="+", action="extend", default=[], help="a.b=value")
    for name, target in (("docs", "docs/config.md"), ("schema", "configs/schema.json")):
        command = commands.add_parser(name, help=f"regenerate {target}")
        command.add_argument("--out", type=Path, default=REPOSITORY / target)
    args = parser.parse_args()
    if args.command == "show":
        print(dump_yaml(load_config(args.config, args.override)), end="")
        return
    if args.command == "docs":
        text = markdown(ExperimentConfig)
    else:
        text = json.dumps(json_schema(ExperimentConfig), indent=2, ensure_ascii=False) + "\n"
    make_parent(args.out)
    with writing(args.out):
        args.out.write_text(text, encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run(main)
