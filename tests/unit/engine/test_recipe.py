"""The recipe that is fitted to a data set is an ordinary configuration, sensible for its size."""

from pathlib import Path

import pytest

from ppdist.config.data import SplitConfig
from ppdist.config.experiment import load_config
from ppdist.config.model import YOLOv5Config
from ppdist.config.shipped import short_names
from ppdist.data.datasets.layout import Layout
from ppdist.engine.build import build_schedule_setup
from ppdist.engine.recipe import Recipe, TrainOptions, fit_recipe, read_task
from tests.errors import raises


def fitted(
    model: str = "yolov5n",
    images: int = 200,
    overrides: tuple[str, ...] = (),
    world: int = 1,
    split: bool = True,
    format: str = "yolo",
    **wishes: object,
) -> Recipe:
    train = SplitConfig(images=("a/images", "b/images") if format == "yolo" else "a")
    layout = Layout(
        name="cells",
        format=format,
        root=Path("/data/cells"),
        train=train,
        val=SplitConfig(images="val/images") if split else None,
        class_names=("cat", "no"),
        images=images,
    )
    return fit_recipe(layout, TrainOptions(model, **wishes), overrides, world)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_plus_s"])
def test_written_file_is_the_run(model, split, tmp_path):
    overrides = ("output_dir=2024", "train.max_steps=3", "data.augment.flip=0")
    recipe = fitted(model, overrides=overrides, split=split, image_size=(320, 320), epochs=7)
    file = tmp_path / "recipe.yml"
    file.write_text(recipe.text)
    assert load_config(file) == recipe.config
    data = recipe.config.data
    assert data.root == "/data/cells" and data.class_names == ("cat", "no")
    assert data.val.images == ("val/images" if split else data.train.images)
    assert data.val_fraction == (None if split else 0.2)
    assert recipe.config.output_dir == "2024" and recipe.config.model.num_classes == 2
    assert all(f"#   {' '.join(filter(None, row[:2]))}: " in recipe.text for row in recipe.rows)


@pytest.mark.parametrize("model", [name for name in short_names() if "cls" not in name])
def test_every_short_name_fits(model):
    recipe = fitted(model, world=2)
    assert recipe.config.output_dir == f"output/cells_{model}"
    assert recipe.config.evaluate.every_epochs == recipe.config.checkpoint.every_epochs


@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_plus_s"])
@pytest.mark.parametrize(("images", "epochs"), [(6, 3), (40, 1), (200, None), (3000, 10)])
def test_warmup_never_eats_the_run(model, images, epochs):
    config = fitted(model, images, epochs=epochs).config
    setup = build_schedule_setup(config, images)
    assert setup.lr_scheduler.warmup_steps <= max(1, 0.11 * setup.total_steps)


@pytest.mark.parametrize(
    ("images", "weights", "epochs"),
    [
        (205, None, 147), (2000, None, 100), (20, None, 300),
        (205, "a.pt", 50), (20, "a.pt", 300), (118_000, None, 80),
    ],
)  # fmt: skip
def test_epochs_follow_the_number_of_images(images, weights, epochs):
    config = fitted("ppyoloe_plus_s", images, weights=weights).config
    assert config.train.epochs == epochs and config.model.pretrained == weights


@pytest.mark.parametrize("weights", [None, "a.pt"])
@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_plus_s"])
def test_few_images_are_learned_with_adamw(model, weights):
    few, many = (fitted(model, images, weights=weights) for images in (7999, 8000))
    optimizer = few.config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.nesterov) == ("adamw", 0.002, False)
    assert few.config.train.ema.ramp_steps is None
    assert few.config.schedule.name == "flat_cosine"
    assert few.config.schedule.warmup_bias_lr is None
    assert "optimizer.name" in {key for key, _, _ in few.rows}
    published = load_config(many.rows[1][1])
    assert many.config.optimizer == published.optimizer
    assert many.config.train.ema == published.train.ema


@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_plus_s"])
def test_layers_near_the_image_move_less_from_weights(model):
    tuned = fitted(model, weights="a.pt")
    assert tuned.config.optimizer.layer_decay == 0.8
    assert "optimizer.layer_decay" in {key for key, _, _ in tuned.rows}
    assert fitted(model).config.optimizer.layer_decay is None
    assert fitted(model, 8000, weights="a.pt").config.optimizer.layer_decay is None
    typed = ("optimizer.layer_decay=null",)
    assert fitted(model, weights="a.pt", overrides=typed).config.optimizer.layer_decay is None


def test_batch_is_per_card_and_never_above_the_set():
    assert fitted(batch=32).config.train.batch_size_per_card == 32
    assert fitted(batch="auto").config.train.batch_size_per_card == "auto"
    assert fitted(images=20, world=8).config.train.batch_size_per_card == 3
    assert fitted(images=20, world=32).config.train.batch_size_per_card == 1
    clamped = fitted(batch=5000, world=3)
    assert clamped.config.train.batch_size_per_card == 67
    told = ("67", "per card; --batch would be 5000, but the set has 200 images on 3 ranks")
    assert ("train.batch_size_per_card", *told) in clamped.rows


def test_training_sizes_follow_the_image_size():
    config = fitted("ppyoloe_plus_s", image_size=(320, 480)).config
    assert config.model.image_size == (320, 480)
    assert config.train.multi_scale[0] == (160, 256) and config.train.multi_scale[-1] == (384, 576)
    assert len({*config.train.multi_scale}) == len(config.train.multi_scale)


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        (
            "yolov8n",
            "model_unknown",
            "--model yolov8n: no recipe is called so; did you mean",
        ),
        ("yolov5n.pt", "foreign_option", "`DATA --model yolov5n --weights yolov5n_coco`"),
        ("gone.yml", "model_unknown", "no such file; expected yolov5n, "),
        ("yolov5s_cls_imagenet", "model_without_boxes", "choose a detector"),
    ],
)
def test_unfit_model_is_told(model, code, said):
    with raises(code, said):
        fitted(model)


def test_folders_of_classes_take_the_epochs_of_their_recipe():
    with raises("model_without_boxes", "choose a classifier"):
        fitted(format="folder")
    recipe = fitted("yolov5s_cls", format="folder", split=False, classes=["no"])
    config = recipe.config
    assert (config.data.format, config.train.epochs, config.data.val_fraction) == (
        "folder",
        100,
        0.2,
    )
    assert (config.output_dir, config.model.num_classes) == ("output/cells_yolov5s_cls", 1)


def test_a_part_of_the_set_changes_what_is_decided():
    whole, part = fitted(), fitted(fraction=0.5, classes=["no"], single_class=True)
    assert part.config.train.epochs == 2 * whole.config.train.epochs
    assert part.config.model.num_classes == 1 and part.config.data.classes == ("no",)
    assert fitted(overrides=("data.classes=[no]",)).config.model.num_classes == 1
    assert {"data.fraction", "data.classes", "data.single_class"} <= {row[0] for row in part.rows}
    with raises("class_unknown", "did you mean cat?"):
        fitted(classes=["cats"])


def test_steps_take_the_place_of_epochs():
    recipe = fitted(steps=1000, batch=10)
    schedule = build_schedule_setup(recipe.config, 200)
    assert schedule.total_steps == 1000 and schedule.epochs == 50
    in_epochs = fitted(epochs=50, batch=10)
    assert build_schedule_setup(in_epochs.config, 200) == schedule
    assert intervals_of(in_epochs) == (3, None, 3, None)
    assert intervals_of(recipe)[1::2] == (60, 60), "as often"
    with raises("options_conflict"):
        fitted(steps=3, epochs=2)


def intervals_of(recipe):
    """Of evaluations and checkpoints, in epochs and steps."""
    sections = recipe.config.evaluate, recipe.config.checkpoint
    return tuple(
        number for section in sections for number in (section.every_epochs, section.every_steps)
    )


@pytest.mark.parametrize(
    ("items", "steps", "evaluate", "save"),
    [
        (["evaluate.every_steps=7"], None, (None, 7), (None, 7)),
        (["evaluate.every_steps=7", "checkpoint.every_epochs=9"], None, (None, 7), (9, None)),
        (["evaluate.every_epochs=2"], 1000, (2, None), (3, None)),
        (["checkpoint.every_steps=9"], None, (3, None), (None, 9)),
    ],
)
def test_a_typed_interval_decides_the_unit(items, steps, evaluate, save):
    recipe = fitted(steps=steps, epochs=None if steps else 50, batch=10, overrides=tuple(items))
    pairs = zip(intervals_of(recipe), (*evaluate, *save), strict=True)
    assert all(number == expected for number, expected in pairs if expected is not None)
    assert intervals_of(recipe)[1::2] == (evaluate[1], save[1])
    typed = {item.partition("=")[0] for item in items}
    assert all(why == "-o" for key, _, why in recipe.rows if key in typed)


def test_a_model_says_what_few_images_change(monkeypatch):
    monkeypatch.setattr(YOLOv5Config, "few_images", {"optimizer.lr": 0.5})
    config = fitted().config
    assert (config.optimizer.lr, config.optimizer.name) == (0.5, "momentum")
    monkeypatch.setattr(YOLOv5Config, "few_images", {})
    unchanged = {row[0] for row in fitted(weights="a.pt").rows}
    assert not unchanged & {"optimizer.lr", "optimizer.layer_decay", "schedule.warmup_epochs"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("batch", -1), ("batch", 2.5), ("epochs", 0), ("image_size", "64"), ("image_size", (64,))],
)
def test_a_wrong_option_of_python_is_one_problem(option, value):
    with raises("option_invalid") as caught:
        fitted(**{option: value})
    assert caught.value.where == f"{option}={value!r}"
    assert option != "batch" or '"auto"' in caught.value.what


def test_absent_weights_are_those_of_the_model():
    with raises("weights_not_found", "write `--weights yolov5n_coco`"):
        read_task(TrainOptions("yolov5n", weights="yolov5s.pt"))
    for weights in ("yolov5n.pt", "yolov5s_coco", "mine.pt"):
        read_task(TrainOptions("yolov5n", weights=weights))


def test_a_short_run_is_told_in_its_own_numbers():
    rows = {key: why for key, _, why in fitted(images=8, epochs=1).rows}
    assert rows["evaluate.every_epochs"] == "1 in the run"
    assert "about 1 step" in rows["schedule.warmup_least_steps"]
    whys = {key: why for key, _, why in fitted(epochs=60).rows}
    assert whys["evaluate.every_epochs"].startswith("about 20")


def test_recipe_without_epochs_is_told(tmp_path):
    (tmp_path / "my.yml").write_text("model: {name: yolov5}\n")
    with raises("model_without_epochs", "does not set train"):
        fitted(str(tmp_path / "my.yml"))


def test_what_o_says_decides_the_rest():
    typed = ("train.epochs=40", "train.batch_size_per_card=2", "model.pretrained=a.pt")
    by_o = fitted("ppyoloe_plus_s", overrides=typed)
    by_option = fitted("ppyoloe_plus_s", epochs=40, batch=2, weights="a.pt")
    assert by_o.config == by_option.config
    assert [row for row in by_o.rows if row[0] == "train.epochs"] == [("train.epochs", "40", "-o")]


def test_wrong_override_is_told_as_it_was_typed():
    with raises("unknown_key") as caught:
        fitted(overrides=("train.epoch=3",))
    assert caught.value.where == "-o train.epoch=3"
