"""Which of our YOLOv5 modules is which row of the original, and so where its state-dict keys are.

The original numbers its layers `model.0`, `model.1`, ...; a row without parameters (up-sampling,
concatenation) is None here.
"""

P5_ROWS = (
    "backbone.stem",
    "backbone.down2", "backbone.stage2",
    "backbone.down3", "backbone.stage3",
    "backbone.down4", "backbone.stage4",
    "backbone.down5", "backbone.stage5",
    "backbone.sppf",
    "neck.reduce5", None, None, "neck.topdown4",
    "neck.reduce4", None, None, "neck.topdown3",
    "neck.down4", None, "neck.bottomup4",
    "neck.down5", None, "neck.bottomup5",
    "head",
)  # fmt: skip
P6_ROWS = (
    *P5_ROWS[:9],
    "backbone.down6", "backbone.stage6",
    "backbone.sppf",
    "neck.reduce6", None, None, "neck.topdown5",
    *P5_ROWS[10:-1],
    "neck.down6", None, "neck.bottomup6",
    "head",
)  # fmt: skip
CLASSIFIER_ROWS = (*P5_ROWS[:9], "head")

_PARTS = {
    "conv1": "cv1",
    "conv2": "cv2",
    "conv3": "cv3",
    "blocks": "m",
    "_mean": "running_mean",
    "_variance": "running_var",
    **{f"predict{level}": f"m.{level - 3}" for level in (3, 4, 5, 6)},
}


def original_keys(keys: list[str], rows: tuple[str | None, ...]) -> dict[str, str]:
    """Our state-dict keys -> those of the original, given the module of each of its rows."""
    row_of = {module: row for row, module in enumerate(rows) if module is not None}
    result = {}
    for key in keys:
        module = key.split(".")[0] if key.startswith("head.") else ".".join(key.split(".")[:2])
        inside = key[len(module) + 1 :].split(".")
        names = [_PARTS.get(part, part) for part in inside]
        result[key] = ".".join(["model", str(row_of[module]), *names])
    return result
