"""YOLOv5's own evaluation: inputs padded by half a stride, the same numbers on any ranks."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.config.experiment import load_config
from ppdist.data.datasets.build import read_split
from ppdist.engine.build import build_evaluator, build_model
from tests.distributed import run_on_ranks
from tests.unit.data.sets import coco_content, write_json
from tests.unit.engine.tiny import init_cpu

SIZES_WH = [(96, 72), (72, 96), (90, 60), (60, 90), (96, 96), (200, 50), (31, 33)]
KEYS = [
    "model.name=yolov5", "model.size=n", "model.width_multiple=0.1", "model.num_classes=3",
    "model.image_size=[96,96]", "data.resize=letterbox", "data.workers=0", "device=cpu",
    "nms.score_threshold=0.0", "nms.iou_threshold=0.6", "nms.keep=20", "evaluate.rectangular=true",
    "evaluate.batch_size_per_card=2",
]  # fmt: skip


def write_set(folder: Path) -> Path:
    """Images of several shapes; returns the configuration of their evaluation."""
    names = [f"{index}.png" for index in range(len(SIZES_WH))]
    content = coco_content(names)
    for index, (width, height) in enumerate(SIZES_WH):
        pixels = np.random.RandomState(index).randint(0, 256, (height, width, 3)).astype(np.uint8)
        (folder / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "images" / names[index])
        content["images"][index] |= {"width": width, "height": height}
    content["annotations"] = [
        each | {"bbox": [3, 3, 20, 20]} for each in content["annotations"]
    ]  # inside every image
    write_json(folder, content)
    file = folder / "cfg.yml"
    split = "{annotations: set.json}"
    file.write_text(f"data: {{root: {folder}, train: {split}, val: {split}}}\n", encoding="utf-8")
    return file


def evaluated(argument):
    """Shapes of this rank's inputs, and what is found in the whole set."""
    file, *more = argument
    init_cpu()
    config = load_config(file, [*KEYS, *more])
    dataset = read_split(config.data, "val", 3)
    model = build_model(config)
    evaluator = build_evaluator(config, dataset, model)
    shapes, forward = [], model.forward
    model.forward = lambda images_B3HW: shapes.append(images_B3HW.shape) or forward(images_B3HW)
    found_R7 = evaluator.predict(model)
    return {"shapes": shapes, "found": found_R7.tolist(), "metrics": evaluator.measure(found_R7)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rectangular")


def test_two_ranks_evaluate_padded_inputs_like_one(folder):
    arguments = [f"{write_set(folder)}", "evaluate.rectangular_pad=0.5"]
    alone = evaluated(arguments)
    first, second = run_on_ranks(
        2, "tests.unit.engine.test_evaluator_rectangular:evaluated", arguments
    )
    assert first["found"] == second["found"] == alone["found"] and alone["found"]
    assert first["metrics"] == alone["metrics"]
    assert sorted(first["shapes"] + second["shapes"]) == sorted(alone["shapes"])
    shapes = {(height, width) for _, _, height, width in alone["shapes"]}
    # 96 and 72 become ceil(3.5) and ceil(2.75) strides of 32, and so on.
    assert shapes == {(96, 128), (128, 96), (128, 128), (64, 128)}
