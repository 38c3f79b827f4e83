"""`train DATA --model NAME` in one process: what it decides is what a config by hand says."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from ppdist import api
from ppdist.cli import eval as cli_eval
from ppdist.cli import train
from ppdist.common.errors import ConfigError, DataError
from ppdist.common.job import JOB_DIR_VARIABLE, RESTART_VARIABLE
from ppdist.config.data import DataConfig
from ppdist.config.experiment import load_config
from ppdist.config.parse import dump_yaml
from ppdist.engine import run as engine_run
from ppdist.engine.recipe import (
    Recipe,
    TrainOptions,
    fit_to_root,
    load_config_with_data,
    write_recipe,
)
from ppdist.engine.run import plan_training
from ppdist.models import model_card
from tests.errors import raises
from tests.forked import run_on_two_ranks, succeeded
from tests.unit.engine.runs import records

NAMES = ("cat", "dog")
SMALL = ("-o", "model.width_multiple=0.1", "data.workers=0", "log.visualdl=false", "log.images=0")
BY_HAND = """
_BASE_: yolov5n_300e_coco
output_dir: {out}
data:
  format: yolo
  root: {root}
  train: {{images: train/images, annotations: train/labels}}
  val: {{images: valid/images, annotations: valid/labels}}
  class_names: [cat, dog]
  workers: 0
model: {{num_classes: 2, image_size: 64, width_multiple: 0.1}}
train:
  {{epochs: 1, phases_for_epochs: 300, batch_size_per_card: 2,
  ema: {{decay: 0.998, ramp_steps: null}}}}
optimizer:
  {{name: adamw, nesterov: false, lr: 0.002, reference_batch_size: 8, lr_scaling: sqrt,
  weight_decay: 0.05}}
schedule:
  {{name: flat_cosine, final_factor: 0.02, warmup_epochs: 10, warmup_least_steps: 0,
  warmup_bias_lr: null, warmup_momentum: null}}
evaluate: {{every_epochs: 1}}
checkpoint: {{every_epochs: 1}}
log: {{visualdl: false, images: 0}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set of 4 + 2 images as Roboflow's data.yaml, COCO and VOC folder."""
    root = tmp_path_factory.mktemp("project")
    boxes = {"cat": (8, 8, 40, 40), "dog": (16, 24, 56, 48)}  # pixels, exact as fractions too
    for split, count in {"train": 4, "valid": 2}.items():
        coco = {
            "images": [],
            "annotations": [],
            "categories": [{"id": n, "name": name} for n, name in enumerate(NAMES)],
        }
        for number in range(count):
            pixels = np.random.RandomState(number).randint(0, 255, (64, 64, 3), np.uint8)
            for folder in (f"yaml/{split}/images", f"coco/{split}", f"voc/{split}"):
                (root / folder).mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(root / folder / f"{number}.png"), pixels)
            coco["images"].append(
                {"id": number, "file_name": f"{number}.png", "width": 64, "height": 64}
            )
            lines, things = "", ""
            for label, (name, (x1, y1, x2, y2)) in enumerate(boxes.items()):
                lines += f"{label} {(x1 + x2) / 128} {(y1 + y2) / 128} {(x2 - x1) / 64} "
                lines += f"{(y2 - y1) / 64}\n"
                corners = zip(("xmin", "ymin", "xmax", "ymax"), (x1, y1, x2, y2))
                box = "".join(f"<{side}>{value}</{side}>" for side, value in corners)
                things += f"<object><name>{name}</name><bndbox>{box}</bndbox></object>"
                coco["annotations"].append(
                    {
                        "id": len(coco["annotations"]),
                        "image_id": number,
                        "category_id": label,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                    }
                )
            labels = root / "yaml" / split / "labels"
            labels.mkdir(exist_ok=True)
            (labels / f"{number}.txt").write_text(lines)
            size = "<size><width>64</width><height>64</height></size>"
            xml = f"<annotation><filename>{number}.png</filename>{size}{things}</annotation>"
            (root / "voc" / split / f"{number}.xml").write_text(xml)
        (root / "coco" / split / "_annotations.coco.json").write_text(json.dumps(coco))
    data = {"train": "../train/images", "val": "../valid/images", "nc": 2, "names": [*NAMES]}
    (root / "yaml" / "data.yaml").write_text(yaml.safe_dump(data))
    return root


def losses(folder: Path) -> list[object]:
    found = records(folder)
    assert any("mAP" in each for each in found)
    return [each["loss"] for each in found if "loss" in each]


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """The command in this process, without its pictures."""
    monkeypatch.setattr(engine_run, "_draw", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["ppdist train", *map(str, words)])
    assert train.main() == 0


@pytest.fixture(scope="module")
def losses_by_hand(project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hand")
    hand = folder / "hand.yml"
    hand.write_text(BY_HAND.format(out=folder / "out", root=project / "yaml"))
    with pytest.MonkeyPatch.context() as patch:
        run(patch, "-c", hand, "--eval")
    found = losses(folder / "out")
    assert found and all(np.isfinite(found))
    return found


@pytest.mark.parametrize(
    "data",
    ["yaml/data.yaml", *(pytest.param(each, marks=pytest.mark.slow) for each in ("coco", "voc"))],
)
def test_each_layout_trains_as_a_config_by_hand(
    data, project, losses_by_hand, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wishes = ["--model", "yolov5n", "--epochs", 1, "--batch", 2, "--image-size", 64, "--eval"]
    run(monkeypatch, project / data, *wishes, *SMALL)
    name = f"{data.split('/')[0]}_yolov5n"
    out = tmp_path / "output" / name
    assert losses(out) == losses_by_hand
    assert "_BASE_: yolov5n_300e_coco\n" in (out / "recipe.yml").read_text()
    again = f"again     ppdist train -c output/{name}/recipe.yml --eval\n"
    assert again in (out / "train.log").read_text()


def test_dry_run_decides_writes_checks_and_trains_nothing(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [project / "yaml/data.yaml", "--model", "yolov5n", "--image-size", 64, "--dry-run"]
    run(monkeypatch, *words)
    out = capsys.readouterr().out
    assert "model.num_classes" in out and "ok: both splits" in out
    assert re.search(r"about \d+[hms] ", out)
    assert [*map(str, Path("output/yaml_yolov5n").iterdir())] == ["output/yaml_yolov5n/recipe.yml"]
    run(monkeypatch, "-c", "output/yaml_yolov5n/recipe.yml", "--dry-run")
    with raises("image_size_not_multiple", "64 or 96"):
        run(monkeypatch, *words[:3], "--image-size", 65, "--dry-run")


def test_dry_run_leaves_the_recipe_of_a_run(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = Path("output/yaml_yolov5n")
    words = [project / "yaml/data.yaml", "--model", "yolov5n", "--image-size", 64, "--dry-run"]
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text("{}\n")  # a run was made here
    (out / "recipe.yml").write_text("seed: 1\n")
    run(monkeypatch, *words, "-o", "train.max_steps=1")
    told = capsys.readouterr().out
    assert (out / "recipe.yml").read_text() == "seed: 1\n"
    assert {each.name for each in out.iterdir()} == {
        "metrics.jsonl", "recipe.yml", "recipe-dry-run.yml",
    }  # fmt: skip
    assert f"to train: ppdist train -c {out / 'recipe-dry-run.yml'}" in told
    assert f"{out / 'recipe.yml'} stays" in told
    assert "time not known" in told
    (out / "recipe-dry-run.yml").rename(out / "recipe.yml")
    run(monkeypatch, *words, "-o", "train.max_steps=1")  # the same again
    assert not (out / "recipe-dry-run.yml").exists()


@pytest.mark.parametrize(
    ("items", "code"),
    [
        (["model.pretrained=yolov5n_coco"], "weights_offline"),
        (["model.pretrained=damaged.pt"], "weights_damaged"),
        (["train.freeze=10"], "freeze_too_many_stages"),
        (["distill.teacher=nowhere"], "teacher_not_found"),
    ],
)
def test_dry_run_refuses_what_the_run_would(project, tmp_path, monkeypatch, items, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PPDIST_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("damaged.pt").write_bytes(b"PK\x03\x04 and nothing")
    words = [project / "yaml/data.yaml", "--model", "yolov5n", "--image-size", 64]
    for more in (["--dry-run"], []):
        with raises(code):
            run(monkeypatch, *words, *more, "-o", *items)


def test_a_run_that_fails_on_data_leaves_its_recipe(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(project / "yaml", "wrong")
    Path("wrong/train/labels/0.txt").write_text("9 0.5 0.5 0.1 0.1\n")
    with raises("class_unknown"):
        run(monkeypatch, "wrong", "--model", "yolov5n", "--image-size", 64, "--epochs", 1)
    assert Path("output/wrong_yolov5n/recipe.yml").is_file()
    run_again = ["-c", "output/wrong_yolov5n/recipe.yml", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["ppdist train", *run_again])
    assert train.main() == 2


@pytest.mark.parametrize(
    ("data", "more", "names", "said"),
    [
        ("yaml", [], ("cat", "dog"), ""),
        ("alone", [], ("dog", "cat"), "has no validation split: evaluating on 20% of its images"),
        ("alone", ["data.val_fraction=null"], ("dog", "cat"), ""),
    ],
)
def test_other_data_are_evaluated_with_the_model_of_the_weights(
    data, more, names, said, project, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(project / "yaml/train", "alone")
    Path("alone/classes.txt").write_text("dog\ncat\n")
    own = load_config("yolov5n", ["model.width_multiple=0.1", "model.num_classes=7"])
    monkeypatch.setattr(model_card, "config_of_weights", lambda *_: own)
    folder = project / "yaml" if data == "yaml" else data
    words = [str(folder), "-w", "x", *(["-o", *more] if more else [])]
    monkeypatch.setattr(sys, "argv", ["ppdist eval", *words])
    found = cli_eval.config_for(cli_eval.parse())
    assert found.data.class_names == names and found.model.num_classes == 2
    assert found.model.width_multiple == 0.1
    assert (found.data.val_fraction is None) is (said == "")
    assert said in capsys.readouterr().err


def test_recipe_goes_with_its_run(tmp_path):
    (tmp_path / "old-1").mkdir()
    before = {tmp_path / "old-1"}
    write_recipe(Recipe(None, "seed: 1\n", ()), tmp_path, before, evaluate=False)
    (tmp_path / "old-2").mkdir()  # what the run of that recipe became
    write_recipe(Recipe(None, "seed: 2\n", ()), tmp_path, before, evaluate=False)
    texts = {str(each.relative_to(tmp_path)): each.read_text() for each in tmp_path.rglob("*.yml*")}
    assert texts == {"recipe.yml": "seed: 2\n", "old-2/recipe.yml": "seed: 1\n"}


def test_edited_recipe_is_kept_beside(tmp_path):
    recipe = Recipe(None, "seed: 1\n", ())
    for _ in range(2):  # the same again moves nothing
        write_recipe(recipe, tmp_path, set(), evaluate=False)
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yml"]
    (tmp_path / "recipe.yml").write_text("seed: 2\n")
    told = write_recipe(recipe, tmp_path, set(), evaluate=False)
    assert (tmp_path / "recipe.yml").read_text() == "seed: 1\n"
    assert (tmp_path / "recipe.yml.old").read_text() == "seed: 2\n"
    (tmp_path / "recipe.yml").write_text("seed: 3\n")
    write_recipe(recipe, tmp_path, set(), evaluate=False)
    old = [(tmp_path / f"recipe.yml.old{more}").read_text() for more in ("", ".2")]
    assert old == ["seed: 2\n", "seed: 3\n"]
    (tmp_path / "a b").mkdir()
    assert f"-c '{tmp_path}/a b/recipe.yml' --eval" in write_recipe(
        recipe, tmp_path / "a b", set(), True
    )
    assert told == f"ppdist train -c {tmp_path / 'recipe.yml'}"


@pytest.mark.slow
def test_two_ranks_decide_alike_and_one_writes(project, tmp_path):
    wishes = ["--model", "yolov5n", "--epochs", 1, "--image-size", 64, "--eval", *SMALL]
    told = run_on_two_ranks(tmp_path, "train", project / "coco", *wishes)
    succeeded(told)
    out = tmp_path / "output" / "coco_yolov5n"
    first = losses(out)
    file = (out / "recipe.yml").rename(tmp_path / "again.yml")
    succeeded(run_on_two_ranks(tmp_path, "train", "-c", file, "--eval"))
    assert losses(out) == first
    assert "batch_size_per_card: 2" in file.read_text()  # four images on two ranks


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", "option_missing"),
        ("d.yaml", "option_missing"),
        ("d.yaml -c a.yml", "options_conflict"),
        ("-c a.yml --epochs 3 --weights a.pt", "options_conflict"),
        ("d --model yolov5n --image-size 32 64 96", "bad_value"),
        ("--data d.yaml", "foreign_option"),
        ("gone.yaml --model yolov5n", "data_not_found"),
    ],
)
def test_options_that_do_not_go_together_are_told(words, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppdist train", *words.split()])
    with pytest.raises((ConfigError, ValueError)) as caught:
        train.main()
    assert caught.value.code == code


def test_folders_of_classes_train_and_evaluate_by_their_names(monkeypatch, tmp_path):
    for place in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(2):
            pixels = np.random.RandomState(number).randint(0, 255, (32, 32, 3), np.uint8)
            cv2.imwrite(str(tmp_path / place / f"{number}.png"), pixels)
    out = tmp_path / "out"
    words = ("--epochs", 1, "--batch", 2, "--image-size", 32, *SMALL, f"output_dir={out}")
    run(monkeypatch, tmp_path, "--model", "yolov5s_cls", *words)
    assert any("top1" in each for each in records(out))
    card = model_card.read_card(out)
    assert card.class_names == ("cat", "dog") and card.task == "classify"


def test_a_recipe_finds_the_layout_of_another_root_as_data_does(project, tmp_path, capsys):
    for place, kind in (("yaml", "yolo"), ("coco", "coco"), ("voc", "voc")):
        root = f"data.root={project / place}"
        items = [root, "data.single_class=true", "seed=3", "train.epochs=9"]
        config = load_config_with_data("yolov5n", items)
        assert (config.data.format, config.model.num_classes, config.seed) == (kind, 1, 3)
        assert config.data.single_class and "train2017" in capsys.readouterr().err
    assert load_config_with_data("yolov5n", [root, "model.num_classes=5"]).model.num_classes == 5
    for items in ([root, "data.train.images=x"], [f"data.root={tmp_path}"], ["seed=3"]):
        assert load_config_with_data("yolov5n", items) == load_config("yolov5n", items)


def test_a_restart_reads_data_as_its_job_began_with(project, tmp_path, monkeypatch):
    """A folder that is away for a while does not make it look for another."""
    root, out = project / "coco", tmp_path / "out"
    items = [f"data.root={root}", f"output_dir={out}"]

    def plan():
        options = TrainOptions()
        return plan_training(data=None, config="yolov5n", options=options, overrides=items).config

    begun = load_config("yolov5n", items)  # whose data.train is not in this root
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    assert plan().data.train != begun.data.train  # the first attempt ended before it wrote
    out.mkdir()
    (out / "config.yml").write_text(dump_yaml(begun), encoding="utf-8")
    assert plan() == begun


@pytest.mark.parametrize("kind", ["yaml", "coco"])
def test_a_restart_keeps_the_layout_of_its_data(project, tmp_path, monkeypatch, kind):
    """What is away is waited for later, by the check of files; nothing else is trained on."""
    data = shutil.copytree(project / kind, tmp_path / "set")
    job = tmp_path / "job"
    job.mkdir()
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(job))

    def plan(model="yolov5n"):
        options = TrainOptions(model=model)
        return plan_training(data=data, config=None, options=options, overrides=())

    begun = plan()
    data.rename(tmp_path / "away")
    with raises("data_not_found", "set"):  # another training of the same script looks again
        plan()
    monkeypatch.setenv(RESTART_VARIABLE, "1")
    assert plan() == begun
    with pytest.raises(DataError):  # folders of classes would be another set
        plan("yolov5s_cls")
    monkeypatch.delenv(JOB_DIR_VARIABLE)  # another job
    with raises("data_not_found", "set"):
        plan()


def test_evaluations_find_the_layout_of_another_root_as_training_does(project, monkeypatch):
    items = [f"data.root={project / 'yaml'}", "seed=3"]
    trained = load_config_with_data("yolov5n", items)
    assert trained.data.format == "yolo"
    own = load_config("yolov5n", items)
    monkeypatch.setattr(model_card, "config_of_weights", lambda *_, **__: own)
    for words in (["-c", "yolov5n"], []):
        monkeypatch.setattr(sys, "argv", ["ppdist eval", *words, "-w", "x", "-o", *items])
        assert cli_eval.config_for(cli_eval.parse()) == trained
    assert api.config_for(Path("x"), "yolov5n", items) == trained
    assert api.config_for(Path("x"), None, items, needs_data=True) == trained


def test_weights_without_data_find_the_layout_of_root(project, tmp_path):
    shutil.copytree(project / "yaml", tmp_path / "set")
    (tmp_path / "set" / "images").mkdir()  # as a card's `data`, which names no labels, expects
    items = [f"data.root={tmp_path / 'set'}"]
    data = DataConfig.model_validate({"root": f"{tmp_path / 'set'}", "train": {}, "val": {}})
    card = load_config("yolov5n").model_copy(update={"data": data})
    assert fit_to_root(card, items).data.format == "yolo" and fit_to_root(card, []) == card


def commands_in(text):
    """The commands that are printed to be copied, each on its own line, without `curves`."""
    return re.findall(
        r"^(?:.* INFO )?(?:longer|predict|test|export|speed) +ppdist (.*)$", text, re.M
    )


@pytest.mark.slow
def test_what_is_printed_to_be_typed_next_works(project, tmp_path):
    def type_in(words):
        command = [sys.executable, "-m", "ppdist", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    wishes = ["--model", "yolov5n", "--epochs", "1", "--batch", "2", "--image-size", "64"]
    to_type = commands_in(type_in(["train", str(project / "yaml/data.yaml"), *wishes, *SMALL]))
    assert [text.split()[0] for text in to_type] == ["train", "predict", "export"]
    typed = set()
    while to_type:
        text = to_type.pop()
        if text not in typed:
            typed.add(text)
            to_type += commands_in(type_in(shlex.split(text)))
    assert {text.split()[0] for text in typed} == {"train", "predict", "export", "benchmark"}
