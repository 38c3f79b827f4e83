"""ppdist in Python: three lines from weights to boxes, and what the package promises."""

import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

import ppdist
from ppdist import Detections, Detector, load_config
from ppdist.common.errors import ConfigError
from ppdist.common.manifest import CARD_NOTE
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.data.image import read_image
from ppdist.engine.recipe import with_data
from ppdist.engine.run import TrainingPlan
from ppdist.export.predictor import EagerPredictor, detect
from ppdist.models.model_card import card_of
from ppdist.models.weights import load_all_weights, write_arrays
from tests.errors import raises
from tests.media import write_video
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.export.tiny import NMS, exported_classifier, exported_detector, tiny_model
from tests.wheel import PIP, built_wheel

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """
model: {image_size: [64, 96]}
nms: {score_threshold: 0.3}
train: {cpu_kernels: plain}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cfg.yml, data/ and photos/; w.npz without a card, carded.npz with one."""
    folder = tmp_path_factory.mktemp("project")
    make_shapes(folder / "data", train=4, val=2, size=128)
    write_config(folder, CONFIG, TINY_PPYOLOE)
    model = tiny_model()
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    write_arrays(folder / "w.npz", arrays)
    card = card_of(load_config(folder / "cfg.yml"), model, ("disc", "box", "wedge"), (4, 5, 6))
    write_arrays(folder / "carded.npz", arrays, {CARD_NOTE: card.text()})
    (folder / "photos").mkdir()
    for number, file in enumerate(sorted((folder / "data/images/val").iterdir())):
        shutil.copy(file, folder / "photos" / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def detector(project: Path) -> Detector:
    return Detector(project / "carded.npz")


def assert_same(one: Detections, other: Detections, pixels: float = 1e-3) -> None:
    assert len(one) == len(other) > 0 and one.class_ids.tolist() == other.class_ids.tolist()
    assert np.allclose(one.boxes_xyxy, other.boxes_xyxy, atol=pixels)
    assert np.allclose(one.scores, other.scores, atol=1e-4)


def test_weights_with_a_card_need_nothing_else(project: Path, detector: Detector) -> None:
    assert detector.names == ("disc", "box", "wedge")
    found = detector(project / "photos/0.jpg", threshold=0.35)
    assert found.source.endswith("0.jpg") and found.boxes_xyxy.dtype == np.float32
    assert found.to_coco()[0]["category_id"] in (4, 5, 6)
    model = tiny_model()
    load_all_weights(model, project / "w.npz")
    rows_R6 = detect(EagerPredictor(model, NMS), found.image, (64, 96))
    rows_R6 = rows_R6[rows_R6[:, 1] >= 0.35]
    assert np.allclose(found.boxes_xyxy, rows_R6[:, 2:], atol=0.05)
    assert np.allclose(found.scores, rows_R6[:, 1], atol=1e-4) and len(found) > 0


def test_weights_without_a_card_need_a_config(project: Path) -> None:
    with raises("weights_without_card"):
        Detector(project / "w.npz")
    assert Detector(project / "w.npz", config=project / "cfg.yml").names[0] == "circle"


def test_every_kind_of_image_gives_the_same_boxes(project: Path, detector: Detector) -> None:
    file = project / "photos" / "0.jpg"
    image_HW3 = read_image(file)
    first = detector(str(file), threshold=0.35)
    content = file.read_bytes()
    sources = (image_HW3, Image.fromarray(image_HW3), file, content, io.BytesIO(content))
    for source in sources:
        assert_same(detector(source, threshold=0.35), first)
    assert detector(image_HW3).source == "" and first.image.shape == image_HW3.shape
    with raises("image_array"):
        detector(image_HW3.astype(np.float32))


def test_lists_folders_and_iterators_are_batched(project: Path, detector: Detector) -> None:
    files = sorted((project / "photos").iterdir())
    alone = [detector(file, threshold=0.35) for file in files]
    listed = detector(files, threshold=0.35, batch=2)
    assert isinstance(listed, list)
    folder = detector(project / "photos", threshold=0.35)
    pattern = detector(str(project / "photos" / "*.jpg"), threshold=0.35)
    lazy = detector((read_image(file) for file in files), threshold=0.35, batch=1)
    for several in (listed, folder, pattern, lazy):
        for one, other in zip(several, alone, strict=True):
            assert_same(one, other)
    assert detector([]) == []
    with raises("source_of_many"):
        detector([project / "photos"])


def test_an_iterator_is_read_as_it_is_used(detector: Detector) -> None:
    taken = []

    def frames():
        for number in range(5):
            taken.append(number)
            yield np.zeros((32, 32, 3), np.uint8)

    found = detector(frames(), batch=2)
    assert taken == [] and next(found).source == "0" and taken == [0, 1]


def test_damaged_files_of_a_folder_are_skipped(
    project: Path, detector: Detector, tmp_path: Path
) -> None:
    shutil.copy(project / "photos/0.jpg", tmp_path / "b.jpg")
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"a\.jpg: .*skipped"):
        (found,) = detector(tmp_path)
    assert found.source == str(tmp_path / "b.jpg")
    with raises("image_unreadable"):
        detector(tmp_path / "a.jpg")


def test_a_video_gives_its_frames(detector: Detector, tmp_path: Path) -> None:
    write_video(tmp_path / "film.avi", 3)
    assert [found.frame for found in detector(tmp_path / "film.avi")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("source", "code"), [(None, "image_array"), ("rtsp://127.0.0.1:1/x", "video_unreadable")]
)
def test_what_gives_no_image_is_an_error(detector: Detector, source: Any, code: str) -> None:
    with raises(code):
        list(detector(source))


def test_thresholds_and_slices_are_arguments(project: Path, detector: Detector) -> None:
    image_HW3 = read_image(project / "photos/0.jpg")
    most = detector(image_HW3, threshold=0.3)
    assert len(detector(image_HW3, threshold=0.3, iou=0.05)) < len(most)
    assert_same(detector.predict(image_HW3, threshold=0.3), most)
    first = most.class_ids[0]
    some = detector(image_HW3, threshold=0.3, classes=[int(first)])
    assert {*some.class_ids} == {first} and len(some) == (most.class_ids == first).sum()
    assert_same(detector(image_HW3, threshold=0.3), most)  # of the next call it is not
    large_HW3 = cv2.resize(image_HW3, (256, 256))
    sliced = detector(large_HW3, threshold=0.3, slice=128)
    assert sliced.boxes_xyxy.max() <= 256 and (np.diff(sliced.scores) <= 0).all()
    for options in ({"threshold": 2}, {"batch": 0}, {"slice": 8}, {"slice": 99, "overlap": 1}):
        with raises("option_invalid"):
            detector(image_HW3, **options)


@pytest.mark.slow
def test_an_export_finds_what_its_weights_find(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = exported_detector(tmp_path_factory)
    exported = Detector(folder)
    weights = Detector(project / "w.npz", config=project / "cfg.yml")
    file = project / "photos/0.jpg"
    assert_same(exported(file, threshold=0.35), weights(file, threshold=0.35), 0.1)
    assert exported.names == ("red", "green", "blue")
    if (folder / "model.onnx").is_file():
        by_onnx = Detector(folder / "model.onnx")
        assert_same(by_onnx(file, threshold=0.35), exported(file, threshold=0.35), 0.1)
    for call in (exported.evaluate, lambda: exported.export("x"), lambda: exported.train()):
        with raises("export_not_weights"):
            call()
    with raises("options_conflict"):
        exported(file, iou=0.99)


@pytest.mark.slow
def test_a_classifier_is_no_detector(tmp_path_factory: pytest.TempPathFactory) -> None:
    with raises("model_of_other_task"):
        Detector(exported_classifier(tmp_path_factory))


def test_evaluation_takes_weights_alone(project: Path, detector: Detector) -> None:
    config = load_config(project / "cfg.yml")
    expected = ppdist.evaluate(project / "w.npz", config=config)
    assert {"mAP", "mAP50"} <= set(expected)
    data = config.data.model_dump(mode="json", exclude={"class_names"})
    got = detector.evaluate(data)
    assert got["mAP"] == pytest.approx(expected["mAP"], abs=1e-6)


def test_training_needs_the_main_thread(project: Path) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            ppdist.train(project / "cfg.yml")
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [error.code for error in raised] == ["not_main_thread"]


@pytest.mark.slow
def test_a_detector_trains_on_and_exports(
    project: Path, detector: Detector, tmp_path: Path
) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    better = detector.train(
        data=project / "cfg.yml", epochs=2, batch=2, output_dir=tmp_path / "run",
        overrides=["optimizer.lr=0.0001"],
    )  # fmt: skip
    assert signal.getsignal(signal.SIGINT) == before
    assert better.weights.parent == tmp_path / "run" / "checkpoints"
    assert better.names == ("circle", "square", "triangle")
    assert Detector(tmp_path / "run").names == better.names
    assert "mAP" in better.evaluate()
    exported = Detector(better.export(tmp_path / "exported", fixed_batch=True))
    files = sorted((project / "photos").iterdir())
    for one, other in zip(exported(files, threshold=0.05), better(files, threshold=0.05)):
        assert np.allclose(one.boxes_xyxy, other.boxes_xyxy, atol=0.1)


def test_what_is_said_to_a_detector_reaches_its_training(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "a: b #1.npz"  # which means something else in YAML
    shutil.copy(project / "carded.npz", weights)
    detector = Detector(weights, device="cpu")
    seen: list[ExperimentConfig] = []

    def train(config: ExperimentConfig, **_: object) -> Path:
        seen.append(config)
        Path(config.output_dir or "").mkdir(parents=True)
        return weights

    monkeypatch.setattr("ppdist.api.train", train)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        detector.train(data=project / "cfg.yml")
    detector.train(data=project / "cfg.yml", output_dir="my run: 2 #x")
    assert [each.output_dir for each in seen] == ["output/data", "output/data-2", "my run: 2 #x"]
    assert {each.model.pretrained for each in seen} == {str(weights)}
    assert {each.device for each in seen} == {"cpu"}
    with raises("options_conflict"):
        Detector(weights, threads=2)


def chosen(monkeypatch: pytest.MonkeyPatch, *args: object, **options: object) -> dict[str, Any]:
    """What `train` would train."""
    seen: dict[str, Any] = {}

    def run_training(plan: TrainingPlan, output_dir: Path, **rest: object) -> int:
        seen.update(rest, plan=plan, config=plan.config, output_dir=output_dir)
        return 0

    monkeypatch.setattr("ppdist.engine.run.run_training", run_training)
    seen["run"] = ppdist.train(*args, **options)  # type: ignore[arg-type]
    return seen


def test_train_takes_data_a_config_or_a_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own: dict[str, Any] = {"epochs": 3, "batch": 2, "image_size": 64, "weights": "yolov5n_coco"}
    more = {"optimizer": {"lr": 0.25}, "train.clip_norm": 1e-05, "output_dir": "a: #b"}
    for source in ({"config": project / "data"}, {"data": str(project / "data")}):
        found = chosen(monkeypatch, overrides=more, model="yolov5n", **source, **own)
        config = found["config"]
        assert found["plan"].recipe.config is config and found["evaluate"]
        assert (config.train.epochs, config.train.images_per_card) == (3, 2)
        assert (config.model.image_size, config.model.pretrained) == ((64, 64), "yolov5n_coco")
        assert (config.optimizer.lr, config.train.clip_norm) == (0.25, 1e-5)
        assert found["run"] == Path("a: #b") == found["output_dir"]
        assert isinstance(found["run"], ppdist.Run) and isinstance(found["run"], Path)
    config = chosen(monkeypatch, project / "cfg.yml", ["seed=3"], epochs=3, batch=2)["config"]
    assert (config.train.epochs, config.seed, config.model.name) == (3, 3, "ppyoloe")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "option_missing"),
        ({"config": "data"}, "option_missing"),
        ({"config": "cfg.yml", "model": "yolov5n"}, "option_missing"),
        ({"config": "cfg.yml", "epochs": "+5"}, "options_conflict"),
        ({"config": "cfg.yml", "callbacks": [print]}, "callback_unknown"),
    ],
)
def test_train_refuses_what_does_not_go_together(
    project: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], code: str
) -> None:
    monkeypatch.chdir(project)
    with raises(code):
        ppdist.train(**options)


def test_frames_are_followed(
    project: Path, detector: Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackers", reason="needs trackers: pip install 'ppdist[track]'")
    image = np.array(Image.open(sorted((project / "photos").iterdir())[0]))
    found = [*detector((image for _ in range(3)), track=True, threshold=0.05)]
    assert [each.frame for each in found] == [0, 1, 2]
    assert all(each.track_ids is not None for each in found)
    assert detector(image, track=True, threshold=0.05).track_ids is None


def test_other_data_keep_how_images_are_augmented(project: Path) -> None:
    config = load_config(project / "cfg.yml", ["data.augment.mosaic=0.5", "data.resize=letterbox"])
    named = with_data(config, project / "data")  # a folder says nothing of augmentation
    assert named.data.augment == config.data.augment and named.data.resize == "letterbox"
    section = {**config.data.model_dump(mode="json"), "resize": "stretch"}
    assert with_data(config, section).data.resize == "letterbox", "that of the weights"


def test_names_of_the_package_are_those_promised() -> None:
    for name in ppdist.__all__:
        assert getattr(ppdist, name) is not None and name in dir(ppdist)
    assert callable(ppdist.export) and ppdist.export.__name__ == "ppdist.export"
    with pytest.raises(AttributeError):
        ppdist.nothing  # noqa: B018


USER_SCRIPT = """
from ppdist import Callback, Detections, Detector, MetricWriter
from ppdist import evaluate, export, load_config, train
import numpy as np

detector = Detector("run", device="cpu")
one: Detections = detector(np.zeros((4, 4, 3), np.uint8), threshold=0.4)
many: list[Detections] = detector(["a.jpg", "b.jpg"], batch=2)
for found in detector("photos/"):
    print(found)
print(one.boxes_xyxy.shape, [item.name for item in one], many[0].to_coco(), detector.names)
run = train(load_config("ppyoloe_plus_s"), ["train.epochs=1"], callbacks=[Callback()])
print(evaluate(run)["mAP"], export(run, "out", formats=["onnx"]).name, one.save("a.png"))
writer: MetricWriter | None = None
wrong: int = detector.names
"""


@pytest.mark.slow
def test_a_users_script_passes_strict_mypy(tmp_path: Path) -> None:
    """Against the wheel, in an environment that shares the other packages."""
    pytest.importorskip("mypy", reason="needs mypy")
    run = {"check": True, "capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
    installed = tmp_path / "installed"
    install = [*PIP, "install", "--no-deps", "--target", installed, built_wheel(tmp_path)]
    subprocess.run(install, **run)
    assert (installed / "ppdist" / "py.typed").is_file()
    (tmp_path / "script.py").write_text(USER_SCRIPT, encoding="utf-8")
    shared = [path for path in sys.path if path and Path(path) != REPOSITORY]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "script.py"],
        **{**run, "check": False}, env={**os.environ, "MYPYPATH": "", "PYTHONPATH": os.pathsep.join(
            [str(installed), *shared])},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(lines) == 1, done.stdout
    assert "script.py:15" in lines[0] and "[assignment]" in lines[0], done.stdout
