"""Evaluations give the same numbers on any ranks, whatever share of the set a rank has."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.config.experiment import load_config
from ppdist.data.datasets.build import read_split
from ppdist.distributed import comm
from ppdist.engine.build import build_evaluator, build_model
from tests.distributed import run_on_ranks
from tests.unit.data.sets import coco_content, write_json
from tests.unit.engine.oracle import (
    Lookup,
    Oracle,
    classification_evaluator,
    damaged_evaluator,
    evaluator,
    five_images,
)
from tests.unit.engine.tiny import init_cpu

SIZES_WH = [(96, 72), (72, 96), (90, 60), (60, 90), (96, 96), (200, 50), (31, 33)]
KEYS = [
    "model.name=yolov5", "model.size=n", "model.width_multiple=0.1", "model.num_classes=3",
    "model.image_size=[96,96]", "data.resize=letterbox", "data.workers=0", "device=cpu",
    "nms.score_threshold=0.0", "nms.iou_threshold=0.6", "nms.keep=20", "evaluate.rectangular=true",
    "evaluate.batch_size_per_card=2", "evaluate.rectangular_pad=0.5",
]  # fmt: skip
EVALUATORS = {
    "boxes": (evaluator, lambda: Oracle(five_images())),
    "a damaged image": (damaged_evaluator, lambda: Oracle(five_images())),
    "classes": (classification_evaluator, Lookup),
    "classes, a rank without any": (classification_evaluator, Lookup),
}


def write_set(folder: Path) -> None:
    """Images of several shapes, and the configuration of their evaluation."""
    names = [f"{index}.png" for index in range(len(SIZES_WH))]
    content = coco_content(names)
    (folder / "images").mkdir()
    for index, (width, height) in enumerate(SIZES_WH):
        pixels = np.random.RandomState(index).randint(0, 256, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / names[index])
        content["images"][index] |= {"width": width, "height": height}
    content["annotations"] = [
        each | {"bbox": [3, 3, 20, 20]} for each in content["annotations"]
    ]  # inside every image
    write_json(folder, content)
    split = "{annotations: set.json}"
    text = f"data: {{root: {folder}, train: {split}, val: {split}}}\n"
    (folder / "cfg.yml").write_text(text, encoding="utf-8")


def rectangular(folder):
    """Shapes of this rank's inputs, and what is found in the whole set."""
    config = load_config(Path(folder) / "cfg.yml", KEYS)
    model = build_model(config)
    padded = build_evaluator(config, read_split(config.data, "val", 3), model)
    shapes, forward = [], model.forward
    model.forward = lambda images_B3HW: shapes.append(images_B3HW.shape) or forward(images_B3HW)
    found_R7 = padded.predict(model)
    return shapes, {"found": found_R7.tolist(), "scores": padded.measure(found_R7)}


def evaluations(folder):
    """What each kind of evaluation says on this rank; an error of an image that two ranks see."""
    init_cpu()
    found = {}
    for case, (build, model) in EVALUATORS.items():
        share = [*range(5)][comm.rank() :: comm.world_size()]
        if "without" in case:
            share = [] if comm.rank() else [*range(5)]
        under_test = build(share)
        scores = under_test.evaluate(model())
        rows = under_test.predict(model())
        rows = rows if isinstance(rows, tuple) else [rows]
        scores.pop("eval_seconds")
        found[case] = {"found": [each.tolist() for each in rows], "scores": scores}
    shapes, found["padded inputs"] = rectangular(folder)
    said = ""
    if comm.world_size() > 1:
        with pytest.raises(RuntimeError) as error:
            evaluator([0, 1] if comm.rank() else [0, 2, 3, 4]).predict(Oracle(five_images()))
        said = f"{error.value}"
    return {"cases": found, "shapes": shapes, "twice": said}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rectangular")
    write_set(folder)
    return evaluations(folder), run_on_ranks(2, f"{__name__}:evaluations", str(folder))


@pytest.mark.parametrize("case", [*EVALUATORS, "padded inputs"])
def test_two_ranks_say_what_one_says(case, worlds):
    alone, ranks = worlds
    assert [rank["cases"][case] for rank in ranks] == [alone["cases"][case]] * 2
    assert alone["cases"][case]["found"]


def test_an_image_seen_by_two_ranks_is_an_error_on_both(worlds):
    assert all("first /images/0.jpg (2 times)" in rank["twice"] for rank in worlds[1])


def test_inputs_are_padded_by_half_a_stride(worlds):
    alone, (first, second) = worlds
    assert sorted(first["shapes"] + second["shapes"]) == sorted(alone["shapes"])
    shapes = {(height, width) for _, _, height, width in alone["shapes"]}
    # 96 and 72 become ceil(3.5) and ceil(2.75) strides of 32, and so on.
    assert shapes == {(96, 128), (128, 96), (128, 128), (64, 128)}
