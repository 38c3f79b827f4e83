"""Exported classifiers compute what the model computes, from raw pixels to probabilities."""

import json
import shutil
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest
import yaml

from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.export.export import deployment_copy, export_model
from ppdist.export.predictor import (
    ExportedPredictor,
    open_exported,
    prepare_centre,
)
from ppdist.export.spec import read_spec, write_spec
from ppdist.models.yolov5 import YOLOv5Classifier
from tests.errors import raises
from tests.unit.export.tiny import (
    SIZE,
    classifier_spec,
    exported_classifier,
    pictures,
    probabilities_of,
    tiny_classifier,
    tiny_spec,
)


@pytest.fixture(scope="module")
def model() -> YOLOv5Classifier:
    return tiny_classifier()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_classifier(tmp_path_factory)


@pytest.mark.parametrize("onednn", [True, False], ids=["with oneDNN", "without oneDNN"])
def test_exported_classifier_gives_eager_output(
    model: YOLOv5Classifier, exported: Path, onednn: bool
) -> None:
    options = RuntimeOptions(onednn=onednn)
    _, classify = open_exported(exported, read_spec(exported), options)
    eager = partial(probabilities_of, deployment_copy(model))
    for images in (pictures(1), pictures(3), pictures(2, 96, 64)):
        (found_BC,), expected_BC = classify(images), eager(images)
        assert found_BC.shape == (len(images), 7)
        np.testing.assert_allclose(found_BC, expected_BC, atol=1e-4)
        np.testing.assert_allclose(found_BC.sum(1), 1, atol=1e-5)
    differing = eager(pictures(3))
    assert np.ptp(differing, axis=0).max() > 0.05, "the images make no difference"


def test_infer_yml_suffices_for_eager_probabilities(
    model: YOLOv5Classifier, exported: Path
) -> None:
    """Written without anything of ppdist, as somebody who deploys the model would."""
    image_HW3 = pictures(1, 40, 200)[0].transpose(1, 2, 0).astype(np.uint8)
    spec = yaml.safe_load((exported / "infer.yml").read_text(encoding="utf-8"))
    assert (spec["task"], spec["nms"], spec["resize"]["map_back"]) == ("classify", None, None)
    assert (spec["resize"]["mode"], spec["resize"]["interpolation"]) == ("centre_crop", "linear")
    (output,) = spec["paddle"]["outputs"]
    assert output["shape"] == "[B, C]" and output["meaning"].startswith("probabilities")
    height, width = spec["input"]["size"]
    scale = min(40 / height, 200 / width)
    tall, wide = int(height * scale + 0.5), int(width * scale + 0.5)
    top, left = (40 - tall) // 2, (200 - wide) // 2
    part = image_HW3[top : top + tall, left : left + wide]
    resized = cv2.resize(part, (width, height), interpolation=cv2.INTER_LINEAR)
    config = paddle.inference.Config(*(str(exported / file) for file in spec["paddle"]["files"]))
    config.disable_glog_info()
    predictor = paddle.inference.create_predictor(config)
    predictor.get_input_handle(spec["input"]["name"]).copy_from_cpu(
        resized.transpose(2, 0, 1)[None].astype(spec["input"]["dtype"])
    )
    predictor.run()
    (probability_C,) = predictor.get_output_handle(output["name"]).copy_to_cpu()

    prepared_13HW = prepare_centre(image_HW3, SIZE)[None]
    expected_1C = probabilities_of(deployment_copy(model), prepared_13HW)
    np.testing.assert_allclose(expected_1C[0], probability_C, atol=1e-4)


class OtherWhenStatic(YOLOv5Classifier):
    """A model whose static graph computes something else."""

    def decode(self, outputs: paddle.Tensor) -> paddle.Tensor:
        return super().decode(outputs * (1.0 if paddle.in_dynamic_mode() else 2.0))


def test_differing_export_is_refused_older_one_stays(exported: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(exported, directory)
    kept = {file.name: file.read_bytes() for file in directory.iterdir()}
    with raises("export_differs", "(allowed 0.0001)"):
        export_model(tiny_classifier(OtherWhenStatic), directory, classifier_spec())
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == kept
    assert list(tmp_path.iterdir()) == [directory]


def test_infer_yml_reads_alike_as_json_and_yaml(tmp_path: Path) -> None:
    strange = (
        "größe 1e-5",
        "细胞 🩸",
        'say "x": 1e-05',
        "a\\b\tc",
        "end\u2028\x85\x7f",
        "null",
        "1e-05",
    )
    nms = NMSConfig(score_threshold=1e-05)
    spec = tiny_spec().model_copy(update={"class_names": strange, "nms": nms})
    write_spec(tmp_path, spec)
    text = (tmp_path / "infer.yml").read_text(encoding="utf-8")
    assert json.loads(text) == yaml.safe_load(text) == spec.model_dump(mode="json")
    assert "细胞 🩸" in text and '"score_threshold": 1.0e-05,' in text
    assert read_spec(tmp_path) == spec


def test_an_export_is_only_used_for_its_task(exported: Path, tmp_path: Path) -> None:
    with raises("export_of_other_task"):
        ExportedPredictor(exported)
    spec = read_spec(exported)
    assert spec.paddle is not None and spec.paddle.max_box_error is None
    text = (exported / "infer.yml").read_text(encoding="utf-8")
    (tmp_path / "infer.yml").write_text(text.replace('"classify"', '"detect"'))
    with raises("bad_value"):
        read_spec(tmp_path)
    assert tiny_spec().task == "detect"
