"""Removed keys and values: dropped, refused or warned of, whichever way they come."""

import logging
from pathlib import Path

import pytest

from ppdist.config import removed
from ppdist.config.experiment import ExperimentConfig, experiment_of, load_config
from ppdist.config.removed import DROPPED, GONE_VALUES, REMOVED, GoneValue, Removed
from ppdist.config.schema import all_keys
from tests.errors import raises

OURS = "data: {root: x, train: {}, val: {}}\nmodel: {name: yolov5}\n"


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(
        removed,
        "REMOVED",
        {
            "train.pace": Removed(2, "leave it out"),
            "hosts": Removed({"least": 1, "wait": None}, "leave it out"),
            "optimizer.rate": Removed(0.1, "write optimizer.lr", renamed="optimizer.lr"),
        },
    )
    monkeypatch.setattr(
        removed,
        "GONE_VALUES",
        {
            ("log.trackers.*.name", "tape"): GoneValue(DROPPED, "use wandb"),
            ("data.cache", "tape"): GoneValue("none", "leave it out"),
        },
    )


def typed(folder: Path, text: str, *overrides: str) -> ExperimentConfig:
    file = folder / "config.yml"
    file.write_text(OURS + text)
    return load_config(file, overrides)


def stored(folder: Path, text: str, *overrides: str) -> ExperimentConfig:
    (folder / "manifest.json").write_text("{}")
    return typed(folder, text, *overrides)


@pytest.mark.parametrize(
    "text",
    [
        "train: {pace: 2, epochs: 7}\n",
        "hosts: {least: 1, wait: null}\ntrain: {epochs: 7}\n",
        "hosts: {least: 1}\ntrain: {epochs: 7}\n",
    ],
)
def test_old_default_is_dropped_silently(tmp_path, caplog, rows, text):
    assert typed(tmp_path, text).train.epochs == 7
    assert typed(tmp_path, "", "train.pace=2", "train.epochs=7").train.epochs == 7
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "items", "line"),
    [
        ("train: {pace: 3}\n", (), 3),
        ("hosts: {least: 2}\n", (), 3),
        ("log:\n  trackers: [tape]\n", (), 4),
        ("", ("train.pace=3",), None),
        ("", ("data.cache=tape",), None),
    ],
)
def test_other_value_that_is_typed_is_refused(tmp_path, rows, text, items, line):
    where = f"{tmp_path / 'config.yml'}:{line}:" if line else f"-o {items[0]}"
    with raises("removed_key", where):
        typed(tmp_path, text, *items)


def test_what_is_typed_beside_a_stored_file_is_refused(tmp_path, rows):
    with raises("removed_key", "-o train.pace=5"):
        stored(tmp_path, "train: {pace: 3}\n", "train.pace=5")


def test_other_value_that_is_stored_is_a_warning_once(tmp_path, caplog, rows):
    text = "train: {pace: 3, epochs: 7}\nlog: {trackers: [{name: tape}, {name: wandb}]}\n"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            config = stored(tmp_path, text, "seed=3")
    assert (config.train.epochs, config.seed) == (7, 3)
    assert [tracker.name for tracker in config.log.trackers] == ["wandb"]
    assert len(caplog.records) == 2


def test_renamed_key_gives_its_value(tmp_path, rows):
    assert typed(tmp_path, "optimizer: {rate: 0.3}\n").optimizer.lr == 0.3
    assert typed(tmp_path, "optimizer: {rate: 0.3, lr: 0.2}\n").optimizer.lr == 0.2


def test_plain_data_of_an_earlier_version_are_read(tmp_path, rows):
    tree = typed(tmp_path, "").model_dump(mode="json")
    tree["train"]["pace"] = 3
    assert experiment_of(tree) == typed(tmp_path, "")


def test_table_names_nothing_that_is_there():
    known = {".".join(key) for key in all_keys(ExperimentConfig)}
    assert all(row.hint for row in REMOVED.values())
    assert all(gone.hint for gone in GONE_VALUES.values())
    assert {row.renamed for row in REMOVED.values()} <= {"", *known}


@pytest.mark.parametrize("name", [name for name in REMOVED if "*" not in name])
def test_old_default_of_a_removed_key_goes_silently(tmp_path, caplog, name):
    if name.startswith(("model.", "loss.", "distill.", "early_stopping.")):
        pytest.skip("of a section that only the stored runs have")
    config = typed(tmp_path, "").model_dump(mode="json")
    section = config
    *above, key = name.split(".")
    for part in above:
        section = section[part] if section.get(part) is not None else section.setdefault(part, {})
    section[key] = REMOVED[name].default
    assert experiment_of(config) == typed(tmp_path, "")
    assert not caplog.records


def test_renamed_key_is_read_with_a_line_that_says_the_new_name(tmp_path, caplog, rows):
    with caplog.at_level(logging.WARNING):
        config = typed(tmp_path, "optimizer: {rate: 0.1}\n", "optimizer.rate=0.3")
    assert config.optimizer.lr == 0.3
    (record,) = caplog.records
    assert "optimizer.lr" in record.getMessage()


def test_stored_renamed_key_is_silent_at_its_default(tmp_path, caplog, rows):
    assert stored(tmp_path, "optimizer: {rate: 0.1}\n").optimizer.lr == 0.1
    assert not caplog.records
    assert stored(tmp_path, "optimizer: {rate: 0.4}\n").optimizer.lr == 0.4
    assert stored(tmp_path, "", "optimizer.rate=0.1").optimizer.lr == 0.1
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("train.cpu_convolutions", "train.cpu_kernels", "plain"),
        ("distributed.sync_every", "distributed.local_sgd_steps", "4"),
    ],
)
def test_old_names_are_read_from_files_items_and_stored_runs(tmp_path, old, new, value):
    section, key = old.split(".")
    read = typed(tmp_path, f"{section}: {{{key}: {value}}}\n")
    tree = read.model_dump(mode="json")
    tree[section][key] = tree[section].pop(new.partition(".")[2])
    assert f"{tree[section][key]}" == value
    assert read == typed(tmp_path, "", f"{old}={value}") == typed(tmp_path, "", f"{new}={value}")
    assert read == experiment_of(tree)
