"""The configuration of a tiny detector on a generated set."""

from pathlib import Path

import yaml

TINY_PPYOLOE = {"name": "ppyoloe", "depth_multiple": 0.33, "width_multiple": 0.125}
TINY_YOLOV5 = {"name": "yolov5", "size": "n", "width_multiple": 0.0625}


def write_config(
    folder: Path,
    text: str = "",
    model: dict = TINY_YOLOV5,
    root: Path | None = None,
    val: str = "val",
    name: str = "cfg.yml",
) -> Path:
    """folder/cfg.yml, for what `make_shapes` writes: three classes, 64 pixels, no workers.

    Args:
        text: YAML whose keys come first, merged into each section.
        root: of the set; None: folder/data.
        val: the split that validates; "train": what is learned by heart.
    """
    splits = {"train": "train", "val": val}
    config: dict = {
        "data": {
            "root": str(root or folder / "data"),
            **{
                key: {"annotations": f"annotations/instances_{x}.json"} for key, x in splits.items()
            },
            "workers": 0,
        },
        "model": {**model, "num_classes": 3, "image_size": [64, 64]},
    }
    for key, value in (yaml.safe_load(text) or {}).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    file = folder / name
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file
