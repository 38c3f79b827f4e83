"""Options of PaddleDetection and ultralytics, and what to write instead.

a key of a file or of -o     TrainReader.batch_size=8    -> train.batch_size_per_card=8
an option of train           --img 640, imgsz=640        -> --image-size 640
a whole file behind -c       data.yaml, a PaddleDetection config, a model's YAML
"""

from collections.abc import Sequence
from typing import NamedTuple

from ppdist.common.errors import ConfigError
from ppdist.config.yaml import BASE_KEY, Node

PADDLE, ULTRA = "PaddleDetection", "ultralytics"


class Equivalent(NamedTuple):
    """What stands for a key of another trainer.

    key: ours; "": there is none.  note: what to know, or what to do where there is no key.
    option: of `ppdist train DATA`, with {} for the value; "": the key behind -o.
    """

    owner: str
    key: str = ""
    note: str = ""
    option: str = ""

    def in_config(self, value: str, sign: str) -> str:
        """What to write in a file (sign `: `) or behind -o (sign `=`)."""
        return self._told(f"{self.key}{sign}{value}" if value else self.key)

    def on_command_line(self, value: str) -> str:
        """What to write behind `ppdist train`."""
        if self.option:
            return self._told(self.option.format(value).rstrip())
        return self._told(f"-o {self.key}={value or '...'}" if self.key else "")

    def _told(self, written: str) -> str:
        if not written:
            return self.note
        return f"write `{written}`" + (f" ({self.note})" if self.note else "")


_PER_CARD = "images per card, not of all"
_CARDS = "`fleetrun --selected_gpus {} ppdist train ...`; on one process: -o device=gpu or cpu"
_FIRST = "train DATA --model NAME"
_SIZE = "one number is a square"

KEYS: dict[str, Equivalent] = {
    # PaddleDetection: of its YAML files and its -o.
    "TrainReader.batch_size": Equivalent(PADDLE, "train.batch_size_per_card", "", "--batch {}"),
    "EvalReader.batch_size": Equivalent(PADDLE, "evaluate.batch_size_per_card"),
    "TestReader.batch_size": Equivalent(PADDLE, "evaluate.batch_size_per_card"),
    "TrainReader": Equivalent(PADDLE, "", "see data.augment, data.resize, train.multi_scale"),
    "EvalReader": Equivalent(PADDLE, "", "see data.resize and model.image_size"),
    "TestReader": Equivalent(PADDLE, "", "see data.resize and model.image_size"),
    "LearningRate.base_lr": Equivalent(PADDLE, "optimizer.lr"),
    "LearningRate": Equivalent(PADDLE, "", "see optimizer.lr and schedule"),
    "OptimizerBuilder": Equivalent(PADDLE, "", "see optimizer"),
    "OptimizerBuilder.optimizer.type": Equivalent(PADDLE, "optimizer.name"),
    "OptimizerBuilder.regularizer.factor": Equivalent(PADDLE, "optimizer.weight_decay"),
    "OptimizerBuilder.clip_grad_by_norm": Equivalent(PADDLE, "train.clip_norm"),
    "TrainDataset": Equivalent(PADDLE, "", "see data.format, data.root and data.train"),
    "TrainDataset.dataset_dir": Equivalent(PADDLE, "data.root"),
    "TrainDataset.image_dir": Equivalent(PADDLE, "data.train.images"),
    "TrainDataset.anno_path": Equivalent(PADDLE, "data.train.annotations"),
    "EvalDataset": Equivalent(PADDLE, "", "see data.val"),
    "EvalDataset.dataset_dir": Equivalent(PADDLE, "data.root"),
    "EvalDataset.image_dir": Equivalent(PADDLE, "data.val.images"),
    "EvalDataset.anno_path": Equivalent(PADDLE, "data.val.annotations"),
    "TestDataset": Equivalent(PADDLE, "", "not needed: names travel with the weights"),
    "num_classes": Equivalent(PADDLE, "model.num_classes"),
    "worker_num": Equivalent(PADDLE, "data.workers"),
    "snapshot_epoch": Equivalent(PADDLE, "checkpoint.every_epochs"),
    "architecture": Equivalent(PADDLE, "", "see model.name: ppyoloe or yolov5"),
    "pretrain_weights": Equivalent(PADDLE, "model.pretrained", "", "--weights {}"),
    "weights": Equivalent(PADDLE, "model.pretrained", "to start from", "--weights {}"),
    "save_dir": Equivalent(PADDLE, "output_dir"),
    "use_gpu": Equivalent(PADDLE, "", "write `device: gpu` (auto takes one where there is one)"),
    "use_xpu": Equivalent(PADDLE, "", "write `device: xpu`"),
    "use_npu": Equivalent(PADDLE, "", "write `device: npu`"),
    "use_ema": Equivalent(PADDLE, "train.ema.enabled"),
    "ema_decay": Equivalent(PADDLE, "train.ema.decay"),
    "log_iter": Equivalent(PADDLE, "log.every_steps"),
    "use_vdl": Equivalent(PADDLE, "log.visualdl", "on as it is"),
    "metric": Equivalent(PADDLE, "", "see data.format (COCO, VOC) and evaluate.metric"),
    "norm_type": Equivalent(PADDLE, "", "write `train.sync_bn: true` for sync_bn"),
    "depth_mult": Equivalent(PADDLE, "model.depth_multiple"),
    "width_mult": Equivalent(PADDLE, "model.width_multiple"),
    "PPYOLOEHead": Equivalent(PADDLE, "", "see model, loss and nms"),
    "CSPResNet": Equivalent(PADDLE, "", "see model"),
    "CustomCSPPAN": Equivalent(PADDLE, "", "see model"),
    "find_unused_parameters": Equivalent(PADDLE, "", "not needed: leave it out"),
    "use_shared_memory": Equivalent(PADDLE, "", "not needed: leave it out"),
    # ultralytics, YOLOv5 and newer.
    "imgsz": Equivalent(ULTRA, "model.image_size", _SIZE, "--image-size {}"),
    "img_size": Equivalent(ULTRA, "model.image_size", _SIZE, "--image-size {}"),
    "img": Equivalent(ULTRA, "model.image_size", _SIZE, "--image-size {}"),
    "batch": Equivalent(ULTRA, "train.batch_size_per_card", _PER_CARD, "--batch {}"),
    "batch_size": Equivalent(ULTRA, "train.batch_size_per_card", _PER_CARD, "--batch {}"),
    "nbs": Equivalent(ULTRA, "optimizer.reference_batch_size"),
    "lr0": Equivalent(ULTRA, "optimizer.lr"),
    "lrf": Equivalent(ULTRA, "schedule.final_factor"),
    "cos_lr": Equivalent(ULTRA, "", "write `schedule.name: cosine`"),
    "save_period": Equivalent(ULTRA, "checkpoint.every_epochs"),
    "project": Equivalent(ULTRA, "output_dir", "project and name in one"),
    "fliplr": Equivalent(ULTRA, "data.augment.flip"),
    "flipud": Equivalent(ULTRA, "data.augment.flip_vertical"),
    "degrees": Equivalent(ULTRA, "data.augment.affine.rotate"),
    "hsv_h": Equivalent(ULTRA, "", "see data.augment.hsv: [h, s, v]"),
    "hsv_s": Equivalent(ULTRA, "", "see data.augment.hsv: [h, s, v]"),
    "hsv_v": Equivalent(ULTRA, "", "see data.augment.hsv: [h, s, v]"),
    "nc": Equivalent(ULTRA, "model.num_classes"),
    "names": Equivalent(ULTRA, "data.class_names"),
    "conf": Equivalent(ULTRA, "nms.score_threshold"),
    "iou": Equivalent(ULTRA, "nms.iou_threshold"),
    "max_det": Equivalent(ULTRA, "nms.keep"),
}
# Words `name=value` of ultralytics' command line whose keys we have under another roof.
WORDS: dict[str, Equivalent] = {
    **{name: each for name, each in KEYS.items() if each.owner == ULTRA},
    "data": Equivalent(ULTRA, "", f"data is the first word: `{_FIRST}`"),
    "model": Equivalent(ULTRA, "", "", "DATA --model {}"),
    "device": Equivalent(ULTRA, "", _CARDS),
    "epochs": Equivalent(ULTRA, "train.epochs", "", "--epochs {}"),
    "resume": Equivalent(ULTRA, "", "write `--resume`, or `--resume PATH` of a checkpoint or run"),
    "name": Equivalent(ULTRA, "output_dir"),
    "pretrained": Equivalent(ULTRA, "model.pretrained", "", "--weights {}"),
    "workers": Equivalent(ULTRA, "data.workers"),
    "patience": Equivalent(ULTRA, "early_stopping.patience", "in evaluations"),
    "optimizer": Equivalent(ULTRA, "optimizer.name", "momentum or adamw"),
    "momentum": Equivalent(ULTRA, "optimizer.momentum"),
    "weight_decay": Equivalent(ULTRA, "optimizer.weight_decay"),
    "warmup_epochs": Equivalent(ULTRA, "schedule.warmup_epochs"),
    "amp": Equivalent(ULTRA, "train.amp.enabled"),
    "seed": Equivalent(ULTRA, "seed"),
    "cache": Equivalent(ULTRA, "data.cache", "ram, disk or none"),
    "freeze": Equivalent(ULTRA, "train.freeze"),
    "close_mosaic": Equivalent(ULTRA, "data.augment.close_mosaic_epochs"),
    "mosaic": Equivalent(ULTRA, "data.augment.mosaic"),
    "mixup": Equivalent(ULTRA, "data.augment.mixup"),
    "rect": Equivalent(ULTRA, "evaluate.rectangular"),
    "val": Equivalent(ULTRA, "", "write `--eval`"),
    "task": Equivalent(ULTRA, "", "leave it out: the model says it"),
    "mode": Equivalent(ULTRA, "", "leave it out: the command says it"),
}
# Options with dashes that `ppdist train` has not.
OPTIONS: dict[str, Equivalent] = {
    "--data": Equivalent(ULTRA, "", f"data is the first word: `{_FIRST}`"),
    "--cfg": Equivalent(ULTRA, "", "the model is a name: `--model yolov5s` (ppdist config list)"),
    "--hyp": Equivalent(ULTRA, "", "see optimizer, schedule, loss and data.augment"),
    "--img": WORDS["img"],
    "--imgsz": WORDS["imgsz"],
    "--img-size": WORDS["img_size"],
    "--batch-size": WORDS["batch_size"],
    "--device": WORDS["device"],
    "--workers": WORDS["workers"],
    "--project": WORDS["project"],
    "--name": WORDS["name"],
    "--patience": WORDS["patience"],
    "--freeze": WORDS["freeze"],
    "--save-period": WORDS["save_period"],
    "--cache": WORDS["cache"],
    "--optimizer": WORDS["optimizer"],
    "--cos-lr": WORDS["cos_lr"],
    "--seed": WORDS["seed"],
    "--sync-bn": Equivalent(ULTRA, "", "write `-o train.sync_bn=true`"),
    "--multi-scale": Equivalent(ULTRA, "", "write `-o train.multi_scale=[[320,320],[640,640]]`"),
    "--label-smoothing": Equivalent(ULTRA, "loss.label_smoothing"),
    "--noval": Equivalent(ULTRA, "", "leave it out: only --eval evaluates"),
    "--evolve": Equivalent(ULTRA, "", "see `ppdist tune`"),
    "-r": Equivalent(PADDLE, "", "", "--resume {}"),
    "--resume_from": Equivalent(PADDLE, "", "", "--resume {}"),
    "--slim_config": Equivalent(PADDLE, "", "there is no pruning; for a teacher see `distill`"),
    "--use_vdl": KEYS["use_vdl"],
    "--vdl_log_dir": Equivalent(PADDLE, "", "leave it out: curves are in vdl/ of the output_dir"),
    "--use_wandb": Equivalent(PADDLE, "", "see docs/monitoring.md for trackers"),
    "--amp": Equivalent(PADDLE, "", "write `-o train.amp.enabled=true`"),
    "--fleet": Equivalent(PADDLE, "", "leave it out: fleetrun says it"),
    "--to_static": Equivalent(PADDLE, "", "leave it out: there is no such mode"),
    "--opt": Equivalent(PADDLE, "", "write `-o KEY=VALUE ...`"),
    "--enable_ce": Equivalent(PADDLE, "", "write `-o train.deterministic=true` on GPUs"),
}
_NOT_RESUMED = (".pt", ".pth", ".pdparams", ".onnx")


def answer_key(path: Sequence[str | int], node: Node) -> str:
    """What to write for an unknown key of a file or -o item; "": it is nobody's.

    Args: node: its value.
    """
    key, value = ".".join(map(str, path)), node
    while isinstance(value.value, dict) and len(value.value) == 1:  # -o TrainReader.batch_size=8
        (name, below), *_ = value.value.items()
        key, value = f"{key}.{name}", below
    while key not in KEYS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return ""
    equivalent = KEYS[key]
    plain = "" if isinstance(value.value, dict | list) else value.text
    told = equivalent.in_config(plain, ": " if node.place.line else "=")
    return f"{key} is a key of {equivalent.owner}; {told}"


def refuse_options(words: Sequence[str]) -> None:
    """Answers options of other trainers on the command line of `train`.

    Raises: ConfigError: there are some; it says what to write for each.
    """
    lines: list[str] = []
    behind_o = False
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            behind_o = word in ("-o", "--override")
            if not equals and not following.startswith("-"):
                value = following
            equivalent = OPTIONS.get(name)
            if name == "--resume" and value.endswith(_NOT_RESUMED):
                note = f"weights cannot be resumed: write `--weights {value}` to start from them"
                lines.append(f"{name} {value}: {note}")
        else:
            equivalent = WORDS.get(name) if equals and not behind_o else None
        if equivalent is not None:
            shown = word if equals else f"{word} {value}".strip()
            told = equivalent.on_command_line(value).replace("{}", value or "0-7")
            lines.append(f"{shown}: an option of {equivalent.owner}; {told}")
    if lines:
        raise ConfigError("\n  ".join(lines), code="foreign_option")


def is_data_yaml(tree: Node) -> bool:
    """Whether a file is a data file of ultralytics or Roboflow, and no configuration."""
    keys = tree.value if isinstance(tree.value, dict) else {}
    named = "names" in keys or ("nc" in keys and "backbone" not in keys)
    return named and any(key in keys for key in ("train", "val", "valid", "path"))


def refuse_file(tree: Node, path: str) -> None:
    """Answers files of other trainers behind -c.

    Args: tree: of the file alone, as `Reader.read_alone` gives it.
    Raises: ConfigError: it is one; it says what to do with it.
    """
    keys = tree.value if isinstance(tree.value, dict) else {}
    if is_data_yaml(tree):
        raise ConfigError(
            "is a data file of ultralytics or Roboflow, not a configuration",
            code="data_yaml_as_config",
            where=path,
            fix=f"write it without -c: `ppdist train {path} --model ppyoloe_plus_s`, which writes "
            f"one; `ppdist data check {path}`; `ppdist eval {path} -w RUN`",
        )
    if "backbone" in keys and "head" in keys and isinstance(keys["backbone"].value, list):
        raise ConfigError(
            "describes a model of ultralytics, layer by layer; ppdist builds YOLOv5 by its size",
            code="model_yaml_as_config",
            where=path,
            fix="write `model: {name: yolov5, size: s}`, or start from `-c yolov5s`",
        )
    if "data" in keys or "model" in keys:
        return
    bases = keys.get(BASE_KEY)
    listed = bases.value if bases is not None and isinstance(bases.value, list) else []
    theirs = [name for name in keys if name in KEYS and KEYS[name].owner == PADDLE]
    if len(theirs) < 2 and not any("runtime.yml" in str(base.value) for base in listed):
        return
    lines = [answer_key((name,), keys[name]) for name in theirs]
    raise ConfigError(
        "is a configuration of PaddleDetection, which ppdist does not read:\n  "
        + "\n  ".join([*lines, "its PP-YOLOE recipes are shipped: `ppdist config list`"]),
        code="paddledetection_config",
        where=path,
        fix="copy configs/examples/my_data.yml, or `ppdist train DATA --model ppyoloe_plus_s`",
    )
