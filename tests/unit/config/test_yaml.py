"""Configuration: what a file means, and the exact line a user reads when it is wrong."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field, ValidationError, model_validator

from ppdist.common.errors import ConfigError
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.parse import dump_yaml, parse_config
from ppdist.config.section import Section
from ppdist.config.yaml import InvalidConfig
from tests.errors import raises
from tools.docs import config_text, json_schema

REPOSITORY = Path(__file__).resolve().parents[3]


class Split(Section):
    images: str = Field(description="Folder of the images, relative to data.root.")
    annotations: str = Field("", description="Annotation file.")


class Data(Section):
    """Where the images are."""

    root: str = Field(description="Folder that holds the set.")
    format: Literal["coco", "voc", "yolo"] = Field("coco", description="Annotation format.")
    train: Split = Field(description="The images to learn from.")
    workers: int = Field(2, ge=0, description="Processes that decode images.")


class Amp(Section):
    enabled: bool = Field(False, description="Mixed precision.")
    dtype: Literal["float16", "bfloat16"] = Field("float16", description="The low precision.")


class Train(Section):
    epochs: int = Field(36, ge=1, description="Passes over the training images.")
    amp: Amp = Field(Amp(), description="Mixed precision.")
    multi_scale: tuple[tuple[int, int], ...] = Field((), description="Sizes [H, W] in pixels.")
    clip_norm: float | None = Field(None, gt=0, description="Largest gradient norm.")


class Optimizer(Section):
    lr: float = Field(0.01, gt=0, le=1, description="Learning rate.")


class YoloX(Section):
    name: Literal["yolox"] = Field("yolox", description="Which detector.")
    size: Literal["s", "m", "l"] = Field("s", description="Its size.")
    image_size: tuple[int, int] = Field((640, 640), description="[H, W] in pixels.")
    num_classes: int = Field(ge=1, description="Number of classes.")


class Detr(Section):
    name: Literal["detr"] = Field("detr", description="Which detector.")
    queries: int = Field(300, description="Object queries.")


class Tiny(Section):
    """A small experiment."""

    output_dir: str = Field("output", description="Where results go.")
    data: Data = Field(description="The data.")
    model: Annotated[YoloX | Detr, Field(discriminator="name")] = Field(description="The detector.")
    train: Train = Field(Train(), description="The run.")
    optimizer: Optimizer = Field(Optimizer(), description="The optimizer.")

    @model_validator(mode="after")
    def _workers_need_epochs(self) -> "Tiny":
        if self.data.workers > 10 * self.train.epochs:
            raise ValueError(f"data.workers is {self.data.workers} for a run this short")
        return self


GOOD = """\
data:
  root: ../shared/bccd
  train: {images: train, annotations: train.json}
model:
  name: yolox
  num_classes: 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(text: str, *overrides: str, name: str = "cfg.yml") -> Tiny:
    Path(name).write_text(text, encoding="utf-8")
    return parse_config(name, overrides, Tiny)


def refused(text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return caught.value


def error_of(text: str, *overrides: str) -> str:
    return str(refused(text, *overrides))


def test_a_file_becomes_a_frozen_typed_tree(folder: Path) -> None:
    config = parse(GOOD + "train: {clip_norm: 1, multi_scale: [[256, 320], [320, 320]]}\n")
    assert isinstance(config.model, YoloX) and config.model.num_classes == 3
    assert config.data.train.annotations == "train.json"
    assert config.train.clip_norm == 1.0 and config.train.multi_scale == ((256, 320), (320, 320))
    with pytest.raises(ValidationError, match="frozen"):
        config.data.workers = 9  # type: ignore[misc]


def test_exponents_without_a_point_are_numbers(folder: Path) -> None:
    assert parse(GOOD + "optimizer: {lr: 1e-3}\n").optimizer.lr == 1e-3
    assert parse(GOOD, "optimizer.lr=5E-2").optimizer.lr == 0.05


def test_words_and_dates_of_yaml_1_1_stay_text(folder: Path) -> None:
    text = GOOD.replace("images: train,", "images: no,").replace("train.json", "2024-01-01")
    split = parse(text).data.train
    assert (split.images, split.annotations) == ("no", "2024-01-01")
    assert parse(GOOD + "train: {epochs: 010}\n").train.epochs == 10


def test_every_override_under_one_prefix_applies(folder: Path) -> None:
    config = parse(
        GOOD,
        "train.epochs=7",
        "train.amp.enabled=true",
        "train.amp.dtype=bfloat16",
        "train.epochs=8",
    )
    assert config.train.amp == Amp(enabled=True, dtype="bfloat16") and config.train.epochs == 8


def test_override_values_are_yaml_without_quotes(folder: Path) -> None:
    config = parse(
        GOOD,
        "model.image_size=[256,320]",
        "data.root=../x=y",
        "output_dir=2024",
        "train={epochs: 3}",
        "train.clip_norm=",
    )
    assert isinstance(config.model, YoloX) and config.model.image_size == (256, 320)
    assert (config.data.root, config.output_dir) == ("../x=y", "2024")
    assert config.train.epochs == 3 and config.train.clip_norm is None
    config = parse(GOOD, "data.root=/my #1 set", "output_dir=#2")  # a shell has no comments there
    assert (config.data.root, config.output_dir) == ("/my #1 set", "#2")


def test_base_files_merge_mappings_and_replace_lists(folder: Path) -> None:
    (folder / "_base_").mkdir()
    (folder / "_base_/run.yml").write_text(
        "train: {epochs: 5, clip_norm: 2.0, multi_scale: [[64, 64], [96, 96]]}\n"
    )
    (folder / "_base_/more.yml").write_text("_BASE_: run.yml\ntrain: {clip_norm: 3.0}\n")
    text = "_BASE_: [_base_/run.yml, _base_/more.yml]\n" + GOOD
    config = parse(text + "train: {epochs: 6, multi_scale: [[32, 32]]}\n")
    assert (config.train.epochs, config.train.clip_norm) == (6, 3.0)
    assert config.train.multi_scale == ((32, 32),)


def test_aliases_and_merge_keys_work(folder: Path) -> None:
    text = GOOD.replace("train: {", "train: &set {").replace("  name:", "  name:")
    assert parse(text).data.train.images == "train"
    text = "optimizer: {<<: &o {lr: 0.5}, lr: 0.25}\n" + GOOD
    assert parse(text).optimizer.lr == 0.25


def test_a_dumped_config_reads_back_the_same(folder: Path) -> None:
    config = parse(GOOD, 'data.root="1e-3"', 'output_dir="yes: #1"', "optimizer.lr=1e-5")
    text = dump_yaml(config)
    assert parse(text, name="again.yml") == config
    assert "image_size: [640, 640]" in text and text.startswith("output_dir:")


def test_file_value_replaces_file_dependent_default(folder: Path) -> None:
    (folder / "a.yml").write_text(GOOD)
    defaults = {"output_dir": "output/a"}
    assert parse_config("a.yml", [], Tiny, defaults).output_dir == "output/a"
    assert parse_config("a.yml", ["output_dir=b"], Tiny, defaults).output_dir == "b"


NO_MODEL = "!data: {root: x, train: {images: a}}\n"
# What is appended to GOOD (or replaces it, when it begins with "!"), where it is wrong, the code,
# and what the message says of the value or the remedy.
BAD_FILES = [
    ("train:\n  epoch: 3\n", "8:3: train.epoch", "unknown_key", "mean train.epochs?"),
    ("train:\n  lr: 0.1\n", "8:3: train.lr", "unknown_key", "mean optimizer.lr?"),
    ("clip_norn: 3\n", "7:1: clip_norn", "unknown_key", "mean train.clip_norm?"),
    ("optimizer: {zebra: 1}\n", "7:13: optimizer.zebra", "unknown_key", "knows lr"),
    ("train:\n  epochs: ten\n", "8:11: train.epochs", "bad_value", 'found "ten" (text)'),
    ("train: {epochs: '10'}\n", "7:17: train.epochs", "bad_value", "remove the quotes"),
    ("train: {epochs: 1e3}\n", "7:17: train.epochs", "bad_value", "mean 1000?"),
    ("output_dir: 7\n", "7:13: output_dir", "bad_value", 'mean "7" with quotes?'),
    ("train: {amp: {enabled: yes}}\n", "7:24: train.amp.enabled", "bad_value", "mean true?"),
    ("train: {clip_norm: None}\n", "7:20: train.clip_norm", "bad_value", "mean null?"),
    ("train: {amp: {dtype: float61}}\n", "7:22: train.amp.dtype", "bad_value", "mean float16?"),
    ("optimizer: {lr: -1e-3}\n", "7:17: optimizer.lr", "bad_value", "found -1e-3"),
    ("optimizer: {lr: .nan}\n", "7:17: optimizer.lr", "bad_value", "found .nan"),
    ("  image_size: [320]\n", "7:15: model.image_size", "bad_value", "found a list of 1"),
    ("  image_size: [320, big]\n", "7:21: model.image_size[1]", "bad_value", 'found "big" (text)'),
    ("train: 10\n", "7:8: train", "bad_value", "found 10"),
    ("train:\n", "7:7: train", "bad_value", "found nothing (null)"),
    (NO_MODEL + "model: {name: yolox}\n", "2:1: model.num_classes", "missing_key", ""),
    (NO_MODEL, "1:1: model", "missing_key", ""),
    (
        NO_MODEL + "model: {name: yolo, num_classes: 2}\n",
        "2:15: model.name",
        "bad_value",
        "mean yolox?",
    ),
    (NO_MODEL + "model: {num_classes: 2}\n", "2:1: model.name", "missing_key", ""),
    (
        NO_MODEL + "model: {name: detr, num_classes: 2}\n",
        "2:21: model.num_classes",
        "unknown_key",
        "knows name, queries",
    ),
    ("train: {epochs: 1}\ndata: {workers: 99}\n", "8:1: data", "duplicate_key", "at cfg.yml:1:1"),
    ("train:\n  epochs: 1\n  epochs: 2\n", "9:3: train.epochs", "duplicate_key", "at cfg.yml:8:3"),
    ("train: {epochs: 1\n", "8:1", "not_yaml", "<stream end>"),
    ("train:\n\tepochs: 1\n", "8:1", "not_yaml", "a tab"),
    ("output_dir: a\x07\n", "7:14", "not_yaml", "U+0007"),
    ("optimizer: {lr: !Cosine 3}\n", "7:17: optimizer.lr", "unknown_tag", "write a plain value"),
    ("train: &t {amp: *t}\n", "7:8: train.amp", "alias_contains_itself", ""),
    ("!- a\n- b\n", "1:1", "not_a_mapping", "found a list of 2"),
    ("_BASE_: [../_base_/no.yml]\n", "7:10: _BASE_", "config_missing", "no.yml"),
    ("_BASE_: ./cfg.yml\n", "7:9: _BASE_", "include_cycle", "-> cfg.yml"),
    ("_BASE_: {a: 1}\n", "7:9: _BASE_", "bad_value", "a mapping with"),
]


@pytest.mark.parametrize(("added", "place", "code", "named"), BAD_FILES)
def test_invalid_file_reports_line_key_and_remedy(folder, added, place, code, named) -> None:
    error = refused(added[1:] if added.startswith("!") else GOOD + added)
    assert error.code == code and error.where.startswith("cfg.yml:")
    assert str(error).startswith(f"cfg.yml:{place}: ")
    assert named in str(error) and "\n" not in str(error)


def test_several_problems_keep_their_codes_and_places(folder: Path) -> None:
    error = refused(GOOD + "modle: 1\n", "train.epochs=0", "oops", "_BASE_=x", "train.epochs=[1")
    assert isinstance(error, InvalidConfig) and error.code == "invalid_config"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.code == error.code
    found = [(str(problem.place), problem.code) for problem in again.problems]
    assert found == [
        ("cfg.yml:7:1", "unknown_key"),
        ("-o _BASE_=x", "base_in_override"),
        ("-o oops", "bad_override"),
        ("-o train.epochs=0", "bad_value"),
        ("-o train.epochs=[1", "override_not_yaml"),
    ]


BAD_OVERRIDES = [
    ("data.rot=../x", "unknown_key", "did you mean data.root?"),
    ("train.epochs", "bad_override", "as in -o train.epochs=10"),
    ("=3", "bad_override", ""),
    ("train..epochs=3", "bad_override", ""),
    ("train.epochs=[1", "override_not_yaml", "-o 'train.epochs=\"...\"'"),
    ("train.epochs=0", "bad_value", "train.epochs: found 0"),
    ("_BASE_=x.yml", "base_in_override", ""),
    ("train={epochs: 1, epochs: 2}", "duplicate_key", "train.epochs: given twice"),
]


@pytest.mark.parametrize(("item", "code", "named"), BAD_OVERRIDES)
def test_a_wrong_override_is_quoted_as_it_was_typed(folder, item, code, named) -> None:
    with raises(code, f"-o {item}: ", named):
        parse(GOOD, item)


def test_a_missing_file_says_where_it_was_looked_for(folder: Path) -> None:
    with raises("config_missing", str(folder), "configs/no.yml"):
        parse_config("configs/no.yml", [], Tiny)
    (folder / "configs").mkdir()
    with raises("config_unreadable", "Is a directory"):
        parse_config("configs", [], Tiny)
    (folder / "latin.yml").write_bytes(b"output_dir: caf\xe9\n")
    with raises("not_utf8"):
        parse_config("latin.yml", [], Tiny)


def test_values_that_contradict_each_other_are_reported(folder: Path) -> None:
    error = refused(GOOD, "train.epochs=1", "data.workers=99")
    assert error.where.startswith("cfg.yml:1:1") and "data.workers" in str(error)


def test_problems_are_reported_in_file_order(folder: Path) -> None:
    message = error_of(GOOD + "train: {epoch: 3, clip_norm: -1}\nmodle: 1\n", "data.rot=x", "oops")
    lines = message.splitlines()
    assert lines[0].startswith("5 problems")
    places = [line.split(": ")[0].strip() for line in lines[1:]]
    assert places == ["cfg.yml:7:9", "cfg.yml:7:30", "cfg.yml:8:1", "-o data.rot=x", "-o oops"]


def test_schema_docs_list_every_key_and_type() -> None:
    text = config_text(Tiny)
    rows = {tuple(cell.strip(" `") for cell in line.split("|")[1:4]) for line in text.splitlines()}
    expected = {
        ("workers", "whole number >= 0", "2"),
        ("num_classes", "whole number >= 1", "required"),
    }
    kinds = {row[0]: row[1] for row in rows if len(row) == 3}
    assert expected <= rows and "coco, voc, yolo" in kinds["format"]
    assert "null" in kinds["clip_norm"]
    assert "(`name: yolox`)" in text and "(`name: detr`)" in text
    assert "## data.train" in text and "Where the images are." in text


def test_json_schema_accepts_file_relying_on_base() -> None:
    schema = json_schema(Tiny)
    assert "_BASE_" in schema["properties"] and schema["additionalProperties"] is False
    assert '"required":' not in json.dumps(schema) and '"oneOf"' not in json.dumps(schema)
    assert schema["$defs"]["Train"]["properties"]["epochs"]["minimum"] == 1


def test_every_key_of_an_experiment_is_described() -> None:
    rows = [line for line in config_text(ExperimentConfig).splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


def test_generated_docs_are_up_to_date() -> None:
    remedy = "run `make docs`"
    docs = (REPOSITORY / "docs/config.md").read_text(encoding="utf-8")
    assert docs == config_text(ExperimentConfig), remedy
    schema = json.loads((REPOSITORY / "configs/schema.json").read_text(encoding="utf-8"))
    assert schema == json_schema(ExperimentConfig), remedy


def test_every_shipped_config_round_trips(folder: Path) -> None:
    shipped = [
        path
        for path in (REPOSITORY / "configs").rglob("*.yml")
        if path.parent.name not in ("_base_", "studies")
    ]
    assert shipped
    for path in shipped:
        config = load_config(path)
        assert config.output_dir, path
        text = dump_yaml(config)
        (folder / "again.yml").write_text(text, encoding="utf-8")
        assert load_config("again.yml") == config, path
        yaml.load(
            text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )  # other programs can read it too


def test_reading_a_config_needs_no_paddle() -> None:
    path = REPOSITORY / "configs/ppyoloe/ppyoloe_plus_s_80e_coco.yml"
    # A run of the tool, and what it has imported when it ends.
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['config.py', 'show', '-c', {str(path)!r}]\n"
        f"try: runpy.run_path({str(REPOSITORY / 'tools/config.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end\n"
        "print({'paddle', 'cv2', 'matplotlib', 'ppdist.config'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "{'ppdist.config'}"


def test_the_tool_prints_one_message_and_exits_with_2(folder: Path) -> None:
    (folder / "cfg.yml").write_text("model: {name: ppyoloe\n")
    command = [sys.executable, str(REPOSITORY / "tools/config.py"), "show", "-c", "cfg.yml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 2, ended.stderr
    message = ended.stderr.splitlines()[-1]  # Paddle may have warned before
    assert message.startswith("ppdist: error: cfg.yml:2:1:") and not ended.stdout
    assert "Traceback" not in ended.stderr


def test_mutated_file_gives_config_or_config_error(folder: Path) -> None:
    text = (
        GOOD
        + "train: &t {multi_scale: [[64, 64]], amp: {dtype: bfloat16}}\noptimizer:\n  lr: 1e-3\n"
    )
    pieces = [
        "\t",
        ":",
        "[",
        "}",
        "*t",
        "<<: ",
        "- ",
        "null",
        "!x ",
        "'",
        "\n",
        "0x",
        ".inf",
        "é",
        "",
    ]
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        start = rng.randrange(len(text))
        broken = text[:start] + rng.choice(pieces) + text[start + rng.randrange(8) :]
        try:
            parse(broken, rng.choice(["train.epochs=3", "data=3", "model.image_size=[1,{a: 2}]"]))
        except ConfigError as error:
            refused += 1
            assert str(error).strip(), broken
    assert refused > 200


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_without_an_upper_bound_is_finite(folder: Path, value: str) -> None:
    with raises("invalid_config", "train.clip_norm: found"):
        parse(f"train: {{clip_norm: {value}}}\n")
