"""Parts of other packages: named in YAML, found safely, and the exact line where one is wrong."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.common import plugin
from ppdist.config import plugins
from ppdist.config.distill import Trained
from ppdist.config.experiment import ExperimentConfig, experiment_of, load_config
from ppdist.config.model import PPYOLOEConfig
from ppdist.config.output import LogConfig
from ppdist.config.parse import dump_yaml, parse_config
from ppdist.config.yaml import InvalidConfig
from tests.errors import raises
from tests.forked import THIRD_PARTY

DETECTOR, LINES = "blobs.keys:BlobsConfig", "blobs.keys:LinesConfig"
TEXT = f"""
data:
  format: blobs.keys:BlobsSetConfig
  delimiter: ";"
  root: .
  train: {{annotations: train.txt}}
  val: {{annotations: val.txt}}
model: {{name: "{DETECTOR}", channels: 8}}
log:
  trackers: [wandb, {{name: "{LINES}", digits: 3}}]
"""


@pytest.fixture(autouse=True)
def as_at_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is imported or trusted, before and after each test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "blobs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv(plugins.TRUST_VARIABLE, raising=False)
    plugins.forget()
    yield
    plugins.forget()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of tests/third_party counts as installed."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))


def written(folder: Path, text: str = TEXT) -> Path:
    file = folder / "cfg.yml"
    file.write_text(text)
    return file


def problems(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidConfig) as raised:
        load_config(file, overrides)
    return [f"{each.place}: {each.message}" for each in raised.value.problems]


def test_named_package_adds_its_keys(found: None, tmp_path: Path) -> None:
    config = load_config(written(tmp_path), ["train.epochs=2"])
    assert isinstance(config, ExperimentConfig) and config.train.epochs == 2
    assert config.model.channels == 8 and config.model.needs_nms and config.model.task == "detect"
    assert config.loss.name == DETECTOR and config.loss.box_gain == 2.0
    assert config.data.delimiter == ";" and config.data.task == "detect"
    assert [each.name for each in config.log.trackers] == ["wandb", LINES]
    assert config.log.trackers[1].digits == 3
    assert pickle.loads(pickle.dumps(config.log.trackers[1])) == config.log.trackers[1]
    assert plugins.packages() == ["blobs"]
    assert "blobs.model" not in sys.modules  # what computes is imported when it is built
    # What a checkpoint holds is read back, also as plain data and as that of a teacher.
    (tmp_path / "saved.yml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "saved.yml")
    assert again.model_dump() == config.model_dump()
    assert experiment_of(config.model_dump(mode="json")) == config
    assert parse_config(tmp_path / "saved.yml", (), Trained).model.channels == 8


def test_sections_that_are_not_written_keep_their_defaults(found: None, tmp_path: Path) -> None:
    """`log`, too, in which a plugin's trackers may stand."""
    config = load_config(written(tmp_path, TEXT.partition("log:")[0]))
    assert config.log.model_dump() == LogConfig().model_dump()
    text = TEXT.partition("log:")[0] + "early_stopping: {metric: top1}"
    (problem,) = problems(written(tmp_path, text))
    assert "early_stopping.metric: top1" in problem and DETECTOR in problem


def test_messages_know_keys_of_a_plugin(found: None, tmp_path: Path) -> None:
    file = written(tmp_path)
    wrong = ("data.delimeter=x", "model.chanels=1", "model.channels=2")
    right = ("mean data.delimiter?", "mean model.channels?", "whole number >= 4")
    for line, item, hint in zip(problems(file, *wrong), wrong, right, strict=True):
        assert line.startswith(f"-o {item}: ") and hint in line


def test_a_name_that_earlier_versions_registered_says_what_to_write(tmp_path: Path) -> None:
    text = TEXT.replace(f'"{DETECTOR}"', "blobs").replace("blobs.keys:BlobsSetConfig", "lines")
    for problem in problems(written(tmp_path, text.replace(f'"{LINES}"', "lines"))):
        if ": found " in problem:
            assert "docs/extend.md" in problem


def test_backbone_goes_by_name_into_ppyoloe(tmp_path: Path) -> None:
    body = "blobs.model:BlobsBackbone"
    text = TEXT.replace(f'name: "{DETECTOR}", channels: 8', f'name: ppyoloe, body: "{body}"')
    text = text.partition("log:")[0].replace("blobs.keys:BlobsSetConfig", "coco")
    config = load_config(written(tmp_path, text.replace('  delimiter: ";"\n', "")))
    assert isinstance(config.model, PPYOLOEConfig) and config.model.body == body


def test_part_that_fails_is_named_where_it_stands(found: None, tmp_path: Path) -> None:
    file = written(tmp_path, TEXT.replace(DETECTOR, "no_such_module:Section"))
    with raises("invalid_config") as raised:
        load_config(file, ["data.format=blobs.keys:BlobsConfig"])
    codes = {str(each.place): each.code for each in raised.value.problems}
    assert codes[f"{file}:8:15"] == "plugin_failed"
    assert codes["-o data.format=blobs.keys:BlobsConfig"] == "plugin_invalid"
    with pytest.raises(ModuleNotFoundError):  # our own bug is no other package's
        plugin.load("ppdist.no_such:Model")


def test_stored_configuration_imports_nothing_by_itself(
    found: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    stored = checkpoint / "config.yml"
    stored.write_text(TEXT)
    with raises("invalid_config") as raised:
        load_config(stored)
    codes = {each.code for each in raised.value.problems}
    assert "plugin_untrusted" in codes and "blobs.keys" not in sys.modules
    monkeypatch.setenv(plugins.TRUST_VARIABLE, "1")
    assert load_config(stored).model.name == DETECTOR
    monkeypatch.delenv(plugins.TRUST_VARIABLE)
    plugins.forget()
    load_config(written(tmp_path))  # the user's own names it
    assert load_config(stored).model.name == DETECTOR


def test_current_folder_holds_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blobs.py").write_text("raise SystemExit('hostile')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with raises("plugin_failed", "No module named 'blobs'"):
        plugin.load("blobs:Section")
    assert sys.path[0] == ""
