"""The configs that ship with ppdist, found by name from any folder.

    ppyoloe_plus_s_80e_coco                         the name of a file
    ppyoloe_plus_s                                  short for it: the recipe on COCO
    yolov5s_cls                                     likewise, on ImageNet
    configs/ppyoloe/ppyoloe_plus_s_80e_coco.yml     its place in a clone
    _base_/coco.yml                                 a part, as `_BASE_` of a copy names it

A file of the user's comes first.
"""

import difflib
import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_SHORT = re.compile(r"^(.+?)_(?:\d+e_coco|imagenet)$")
_CLONE_FOLDER = "configs"


def folder() -> Path:
    """Returns the folder of the shipped configs, in the package or the clone."""
    installed = _PACKAGE / _CLONE_FOLDER
    return installed if installed.is_dir() else _PACKAGE.parent / _CLONE_FOLDER


def recipes() -> dict[str, Path]:
    """Lists the shipped experiments by name, excluding parts (`_base_`) and studies."""
    files = sorted(folder().rglob("*.yml"))
    kinds = {path: path.parent.name for path in files}
    return {path.stem: path for path in files if kinds[path] not in ("_base_", "studies")}


def short_names() -> dict[str, str]:
    """Maps short names of COCO and ImageNet recipes, which omit the data set, to full names."""
    matches = {name: _SHORT.match(name) for name in recipes()}
    return {match[1]: name for name, match in matches.items() if match}


def find_config(path: str) -> str:
    """Finds the file of a path or shipped config name; returns other paths unchanged.

    Args: path: path or name of a config, as typed.
    """
    if os.path.exists(path) and not os.path.isdir(path):
        return path
    name = path.removesuffix(".yml").removeprefix(f"{_CLONE_FOLDER}/")
    if "/" in name:
        shipped = folder() / f"{name}.yml"
        is_shipped = ".." not in shipped.parts and shipped.is_file()
        return str(shipped) if is_shipped else path
    studies = {file.stem: file for file in (folder() / "studies").glob("*.yml")}
    return str((studies | recipes()).get(short_names().get(name, name), path))


def near(path: str) -> list[str]:
    """Lists names of shipped configs similar to this one, best first, three at most."""
    word = Path(path).name.removesuffix(".yml")
    names = [*short_names(), *recipes()]
    renamed = word.replace("_crn", "")  # PaddleDetection's ppyoloe_plus_crn_s_80e_coco
    if renamed in names:
        return [renamed]
    extended = [name for name in names if name.startswith(f"{word}_")]
    return [*dict.fromkeys([*extended, *difflib.get_close_matches(word, names, n=3)])][:3]
