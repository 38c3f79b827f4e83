"""Names of weights in files of RT-DETR and D-FINE, by who writes them."""

import itertools
import re
from pathlib import Path

import yaml

NAMES = yaml.safe_load(Path(__file__).with_name("rtdetr_names.yml").read_text(encoding="utf-8"))
# Of transformers 5 to those of 4, which published files have: its conversion_mapping.py, reversed.
TO_VERSION_4 = (
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc", ".fc"),
    (r"\.mlp\.layers\.0", ".fc1"),
    (r"\.mlp\.layers\.1", ".fc2"),
    (r"\.aifi\.", ".encoder."),
)


def names_of(implementation: str) -> list[str]:
    """All names that a file of the implementation has."""
    return [*types_of(implementation)]


def types_of(implementation: str) -> dict[str, str]:
    """The type of numbers of each name that a file of the implementation has."""
    found = dict[str, str]()
    for entry in NAMES[implementation]:
        line, _, kind = entry.partition(" ")
        for macro, text in sorted(NAMES["macros"].items(), key=lambda each: -len(each[0])):
            line = line.replace(macro, text)
        parts = re.split(r"\{([^}]*)\}", line)
        choices = [[part] if i % 2 == 0 else part.split(",") for i, part in enumerate(parts)]
        names = ("".join(each) for each in itertools.product(*choices))
        found |= dict.fromkeys(names, kind or "float32")
    return found


def version_4(name: str) -> str:
    for pattern, new in TO_VERSION_4:
        name = re.sub(pattern, new, name)
    return name
