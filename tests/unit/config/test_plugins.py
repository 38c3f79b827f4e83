"""What other packages register: names in YAML, and the exact line where one is wrong."""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from ppdist.config import ExperimentConfig, load_config, plugins
from ppdist.config.base import dump_yaml, parse_config
from ppdist.config.distill import Trained
from ppdist.config.experiment import experiment_of
from ppdist.config.model import PPYOLOEConfig, YOLOv5Config
from ppdist.config.output import LogConfig
from ppdist.config.yaml import InvalidConfig
from tests.errors import raises
from tests.forked import THIRD_PARTY

TEXT = """
data:
  format: lines
  delimiter: ";"
  root: .
  train: {annotations: train.txt}
  val: {annotations: val.txt}
model: {name: blobs, channels: 8}
log:
  trackers: [wandb, {name: lines, digits: 3}]
"""


@pytest.fixture(autouse=True)
def as_at_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is registered or imported, no package was looked for, before and after each test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "blobs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.delenv(plugins.OFF_VARIABLE, raising=False)
    plugins.load_installed.cache_clear()
    plugins._opened.cache_clear()
    yield
    plugins.load_installed.cache_clear()
    plugins._opened.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of tests/third_party counts as installed."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose plugin cannot be imported counts as installed."""
    described = tmp_path / "site" / "ppdist_broken-1.2.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: ppdist-broken\nVersion: 1.2")
    (described / "entry_points.txt").write_text("[ppdist.plugins]\nbad = no_such_module:register")
    monkeypatch.syspath_prepend(str(described.parent))


def written(folder: Path, text: str = TEXT) -> Path:
    file = folder / "cfg.yml"
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidConfig) as raised:
        load_config(file, overrides)
    return [f"{each.place}: {each.message}" for each in raised.value.problems]


def test_installed_package_adds_names_and_keys(installed: None, tmp_path: Path) -> None:
    config = load_config(written(tmp_path), ["train.epochs=2"])
    assert isinstance(config, ExperimentConfig) and config.train.epochs == 2
    assert config.model.channels == 8 and config.model.needs_nms and config.model.task == "detect"
    assert config.loss.name == "blobs" and config.loss.box_gain == 2.0
    assert config.data.delimiter == ";" and config.data.task == "detect"
    assert [each.name for each in config.log.trackers] == ["wandb", "lines"]
    assert config.log.trackers[1].digits == 3
    # What a checkpoint holds is read back, also as plain data and as that of a teacher.
    (tmp_path / "saved.yml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "saved.yml")
    assert again.model_dump() == config.model_dump()
    assert experiment_of(config.model_dump(mode="json")) == config
    assert parse_config(tmp_path / "saved.yml", (), Trained).model.channels == 8


def test_sections_that_are_not_written_keep_their_defaults(installed: None, tmp_path: Path) -> None:
    """`log`, too, in which a plugin's trackers may stand."""
    config = load_config(written(tmp_path, TEXT.partition("log:")[0]))
    assert config.log.model_dump() == LogConfig().model_dump()
    text = TEXT.partition("log:")[0] + "early_stopping: {metric: top1}"
    (found,) = problems(written(tmp_path, text))
    assert "early_stopping.metric: top1 is not measured for model.name: blobs" in found


def test_messages_know_keys_of_a_plugin(installed: None, tmp_path: Path) -> None:
    file = written(tmp_path)
    assert problems(file, "model.channels=2", "data.delimeter=x", "model.chanels=1") == [
        "-o data.delimeter=x: data.delimeter: unknown key; did you mean data.delimiter?",
        "-o model.chanels=1: model.chanels: unknown key; did you mean model.channels?",
        "-o model.channels=2: model.channels: found 2, expected whole number >= 4",
    ]
    file = written(tmp_path, TEXT.replace("name: blobs", "name: blob").replace("s: lines", "s: li"))
    (found,) = problems(file, "model={name: blob}", "data={format: lines}")[-1:]
    assert found.endswith("ppyoloe, yolov5, rtdetr, yolov5_cls, blobs; did you mean blobs?")
    file = written(tmp_path, TEXT.replace("name: blobs, channels: 8", "name: yolov5"))
    (found,) = problems(file, "data.format=linse", "log.trackers=[linez]")[-1:]
    assert found.endswith("swanlab, lines; did you mean lines?")


def test_backbone_goes_by_name_into_ppyoloe(installed: None, tmp_path: Path) -> None:
    file = written(tmp_path, TEXT.replace("name: blobs, channels: 8", "name: ppyoloe, body: blobs"))
    config = load_config(file)
    assert isinstance(config.model, PPYOLOEConfig) and config.model.body == "blobs"
    (found,) = problems(file, "model.body=blob")
    assert found.endswith("one of csprepresnet, yolov5, blobs; did you mean blobs?")


def test_packages_are_looked_for_only_for_unknown_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: asked.append(group) or ())
    text = TEXT.replace("name: blobs, channels: 8", "name: yolov5").replace("lines", "voc")
    known = text.replace('  delimiter: ";"\n', "").replace("{name: voc, digits: 3}", "mlflow")
    assert type(load_config(written(tmp_path, known))) is ExperimentConfig and asked == []
    problems(written(tmp_path))
    problems(written(tmp_path))
    assert asked == ["ppdist.plugins"]  # once in a process


def test_plugin_that_fails_is_named_where_it_is_needed(
    broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.replace("format: lines", "format: coco").replace('  delimiter: ";"\n', "")
    file = written(tmp_path, text.replace("{name: lines, digits: 3}", "mlflow"))
    with raises("plugin_failed") as raised:
        load_config(file)
    first = raised.value.problems[0]
    assert first.code == "plugin_failed" and first.place[1:] == (7, 15)
    assert first.message == (
        'model.name: "blobs" is unknown, expected one of ppyoloe, yolov5, rtdetr, yolov5_cls; the '
        "plugin bad of the installed package ppdist-broken 1.2 fails (ModuleNotFoundError: No "
        "module named 'no_such_module'): repair the package, or switch it off with "
        "PPDIST_PLUGINS_OFF=bad"
    )
    plugins.load_installed.cache_clear()
    monkeypatch.setenv(plugins.OFF_VARIABLE, "bad")
    assert problems(file)[0].endswith("expected one of ppyoloe, yolov5, rtdetr, yolov5_cls")


def test_broken_plugin_costs_no_run_of_another(
    broken: None, installed: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_config(written(tmp_path)).model.name == "blobs"
    assert ["ppdist-broken 1.2" in message for message in caplog.messages] == [True]


def test_registering_twice_or_wrongly_is_refused(installed: None) -> None:
    blobs = __import__("blobs")
    blobs.register()
    blobs.register()  # the same again: a script and an entry point
    keys = {"loss_config": blobs.BlobsLossConfig, "loss": "blobs.loss:BlobsLoss"}
    wrong = {
        "plugin_name_taken": lambda: plugins.register_backbone("yolov5", "a:B"),
        "plugin_invalid": lambda: plugins.register_backbone("mine", "a.B"),
    }
    for code, call in wrong.items():
        with raises(code):
            call()
    for config, model, code in (
        (blobs.BlobsConfig, "other:Blobs", "plugin_name_taken"),
        (YOLOv5Config, "other:Blobs", "plugin_invalid"),
        (plugins.DetectorConfig, "other:Blobs", "plugin_invalid"),
    ):
        with raises(code):
            plugins.register_detector(config=config, model=model, **keys)


def test_registrations_reach_another_process(installed: None) -> None:
    __import__("blobs").register()
    before, told = dict(plugins._registered), plugins.registrations()
    plugins._registered.clear()
    plugins.register_again(told)
    assert plugins._registered == before
    assert "blobs.model" not in sys.modules  # what computes is imported when it is built
    with raises("plugin_failed"):
        plugins.load("blobs.no_such:Model")
    with pytest.raises(ModuleNotFoundError):  # our own bug is no other package's
        plugins.load("ppdist.no_such:Model")
