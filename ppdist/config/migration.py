"""Keys and options of other trainers and earlier versions, and their replacements.

a key of a file or of -o      TrainReader.batch_size=8          -> train.batch_size_per_card=8
a word of a command           train --img 640, train imgsz=640  -> --image-size 640
                              predict --conf-thres 0.4          -> --threshold 0.4
a whole file behind -c        data.yaml, a PaddleDetection config, a model's YAML
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from ppdist.common.errors import ConfigError
from ppdist.config.shipped import find_config
from ppdist.config.yaml import BASE_KEY, Node

PADDLE, ULTRA, EARLIER = "PaddleDetection", "ultralytics", "earlier versions of ppdist"


class Equivalent(NamedTuple):
    """The equivalent of a key or an option of another trainer.

    key: ours; "": there is none.  note: what to know, or what to do where there is no key.
    option: of `ppdist train DATA`, with {} for the value; "": the key behind -o.
    values: theirs and ours, where they differ; the key stands for these alone where there is a note
        for the others.
    """

    owner: str
    key: str = ""
    note: str = ""
    option: str = ""
    values: Mapping[str, str] = {}

    def in_config(self, value: str, sign: str) -> str:
        """What to write in a file (sign `: `) or behind -o (sign `=`)."""
        ours = self._ours(value)
        return self._told(f"{self.key}{sign}{ours}" if ours else self.key, value)

    def on_command_line(self, command: str, value: str) -> str:
        """What to write behind `ppdist COMMAND`."""
        ours = self._ours(value)
        if command == "train" and self.option:
            return self._told(self.option.replace("{}", ours).rstrip(), value)
        if command != "train" and self.key.startswith(_OF_TRAINING):
            return "leave it out: it only applies to training"
        if command in _WITHOUT_DATA and self.key.startswith(("data.", "evaluate.")):
            return "leave it out: it only applies to data sets"
        if self.key and command in _WITH_KEYS:
            return self._told(f"-o {self.key}={ours or '...'}", value)
        if self.note and not self.key and not self.option:
            return self._told("", value)
        return f"leave it out; `ppdist {command} --help` lists the options"

    def _ours(self, value: str) -> str:
        return self.values.get(value.lower(), value)

    def _told(self, written: str, value: str) -> str:
        known = not self.values or not self.note or value.lower() in self.values
        if not written or not known:
            return self.note.replace("{}", value or "0-7")
        note = "" if self.values else self.note
        return f"write `{written}`" + (f" ({note})" if note else "")


_OF_TRAINING = (
    "train.", "optimizer.", "schedule.", "loss.", "checkpoint.", "early_stopping.", "data.augment",
)  # fmt: skip
_WITH_KEYS = ("train", "eval", "predict", "export", "convert", "data")  # commands with -o
_WITHOUT_DATA = ("predict", "export", "convert")
_PER_CARD = "images per card, not of all"
_FIRST = "train DATA --model NAME"
_SIZE = "one number is a square"
_DEVICE = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "0": "gpu", "cuda:0": "gpu", "gpu:0": "gpu"}

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
    "use_gpu": Equivalent(PADDLE, "device", values={"true": "gpu", "false": "cpu", "": "gpu"}),
    "use_xpu": Equivalent(PADDLE, "device", values={"true": "xpu", "false": "auto", "": "xpu"}),
    "use_npu": Equivalent(PADDLE, "device", values={"true": "npu", "false": "auto", "": "npu"}),
    "use_ema": Equivalent(PADDLE, "train.ema.enabled"),
    "ema_decay": Equivalent(PADDLE, "train.ema.decay"),
    "log_iter": Equivalent(PADDLE, "log.every_steps"),
    "use_vdl": Equivalent(PADDLE, "log.visualdl", "on as it is"),
    "metric": Equivalent(PADDLE, "", "see data.format (COCO, VOC) and evaluate.metric"),
    "norm_type": Equivalent(
        PADDLE, "train.sync_bn", values={"sync_bn": "true", "bn": "false", "": "true"}
    ),
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
    "cos_lr": Equivalent(
        ULTRA, "schedule.name", values={"true": "cosine", "": "cosine", "false": "linear"}
    ),
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
    # Ours once.
    "checkpoint.fallback_dir": Equivalent(
        EARLIER, "", "leave it out, and put output_dir on a disk with room for checkpoint.keep + 2"
    ),
}
# What is typed behind a command, `name=value` or `--name value`, by its name with underscores.
_CARDS = "write `fleetrun --selected_gpus {} ppdist train ...`"
WORDS: dict[str, Equivalent] = {
    **{name: each for name, each in KEYS.items() if each.owner == ULTRA},
    "data": Equivalent(ULTRA, "", f"give the data as the first argument: `{_FIRST}`"),
    "model": Equivalent(ULTRA, "", "", "DATA --model {}"),
    "weights": KEYS["weights"],
    "device": Equivalent(
        ULTRA, "device", f"{_CARDS}; for one process: -o device=gpu or cpu", values=_DEVICE
    ),
    "gpus": Equivalent(ULTRA, "", _CARDS),
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
    "amp": Equivalent(ULTRA, "train.amp.enabled", values={"": "true"}),
    "half": Equivalent(ULTRA, "train.amp.enabled", values={"": "true"}),
    "seed": Equivalent(ULTRA, "seed"),
    "cache": Equivalent(ULTRA, "data.cache", values={"true": "ram", "": "ram", "false": "none"}),
    "freeze": Equivalent(ULTRA, "train.freeze"),
    "close_mosaic": Equivalent(ULTRA, "data.augment.close_mosaic_epochs"),
    "mosaic": Equivalent(ULTRA, "data.augment.mosaic"),
    "mixup": Equivalent(ULTRA, "data.augment.mixup"),
    "rect": Equivalent(ULTRA, "evaluate.rectangular", values={"": "true"}),
    "val": Equivalent(
        ULTRA, "", "leave it out: the validation split is evaluated unless --no-eval"
    ),
    "noval": Equivalent(ULTRA, "", "write `--no-eval`"),
    "task": Equivalent(ULTRA, "", "leave it out: the model determines it"),
    "mode": Equivalent(ULTRA, "", "leave it out: the command determines it"),
    "cfg": Equivalent(ULTRA, "", "name the model: `--model yolov5s` (ppdist config list)"),
    "hyp": Equivalent(ULTRA, "", "see the keys of optimizer, schedule, loss and data.augment"),
    "sync_bn": Equivalent(ULTRA, "train.sync_bn", values={"": "true"}),
    "multi_scale": Equivalent(ULTRA, "", "write `-o train.multi_scale=[[320,320],[640,640]]`"),
    "label_smoothing": Equivalent(ULTRA, "loss.label_smoothing"),
    "image_weights": Equivalent(ULTRA, "data.sampling.name", values={"": "balanced"}),
    "conf_thres": KEYS["conf"],
    "iou_thres": KEYS["iou"],
    "classes": Equivalent(ULTRA, "", "leave it out: training uses all classes of the data"),
    "exist_ok": Equivalent(ULTRA, "", "leave it out: an earlier run in the folder is moved aside"),
    "save": Equivalent(ULTRA, "", "leave it out: this is always done"),
    "plots": Equivalent(ULTRA, "", "leave it out: they are in plots/ of the run"),
    "verbose": Equivalent(ULTRA, "", "leave it out: this is always done"),
    "evolve": Equivalent(ULTRA, "", "see `ppdist tune`"),
    "r": Equivalent(PADDLE, "", "", "--resume {}"),
    "resume_from": Equivalent(PADDLE, "", "", "--resume {}"),
    "slim_config": Equivalent(
        PADDLE, "", "pruning is not supported; for distillation see `distill`"
    ),
    "use_gpu": KEYS["use_gpu"],
    "use_vdl": KEYS["use_vdl"],
    "vdl_log_dir": Equivalent(PADDLE, "", "leave it out: curves are in vdl/ of the output_dir"),
    "use_wandb": Equivalent(PADDLE, "", "see docs/monitoring.md for trackers"),
    "fleet": Equivalent(PADDLE, "", "leave it out: fleetrun sets it"),
    "to_static": Equivalent(PADDLE, "", "leave it out: training always runs in dynamic mode"),
    "opt": Equivalent(PADDLE, "", "write `-o KEY=VALUE ...`"),
    "enable_ce": Equivalent(PADDLE, "", "write `-o train.deterministic=true` on GPUs"),
    "output_dir": Equivalent(PADDLE, "output_dir"),
}
# What another command has for a word; WORDS holds for all others.
_ON_ONE_CARD = "it uses one card, the first of CUDA_VISIBLE_DEVICES; for the CPU: `-o device=cpu`"
_ON_CPU = "leave it out: exports are made on the CPU, with the same result"
_CLASSES = "leave it out: the weights store the classes"
_SHOWN = "leave it out: --out receives the pictures"
ELSEWHERE: dict[str, dict[str, dict[str, str]]] = {
    "predict": {
        ULTRA: {
            "model": "write `-w {}`", "source": "write `--source {}`", "data": _CLASSES,
            "conf": "write `--threshold {}`", "conf_thres": "write `--threshold {}`",
            "iou": "write `--iou {}`", "iou_thres": "write `--iou {}`",
            "classes": "write `--classes` with names or numbers",
            "device": _ON_ONE_CARD, "gpus": _ON_ONE_CARD,
            "half": "leave it out; for exports see --bfloat16",
            "project": "write `--out {}`", "name": "write `--out {}`",
            "save_txt": "write `--format yolo`", "save_conf": "write `--format yolo`",
            "save_crop": "write `--format crops`", "save_csv": "write `--format csv`",
            "save_json": "leave it out: detections.json is always written",
            "save": _SHOWN, "show": _SHOWN, "view_img": _SHOWN, "nosave": "write `--no-pictures`",
            "augment": "see `ppdist ensemble tta`",
        },
        PADDLE: {
            "weights": "write `-w {}`", "model_dir": "write `--model {}`",
            "infer_img": "write `--source {}`", "infer_dir": "write `--source {}`",
            "image_file": "write `--source {}`", "image_dir": "write `--source {}`",
            "video_file": "write `--source {}`", "draw_threshold": "write `--threshold {}`",
            "output_dir": "write `--out {}`", "slice_infer": "write `--slice PIXELS`",
        },
    },
    "eval": {
        ULTRA: {
            "model": "write `-w {}`", "data": "write `ppdist eval {} -w WEIGHTS`",
            "split": "write `--split {}`", "task": "write `--split {}` if it names a split",
            "device": "write `-o device=gpu` or cpu; on several cards "
            "`fleetrun --selected_gpus {} ppdist eval ...`",
            "gpus": "write `fleetrun --selected_gpus {} ppdist eval ...`",
            "project": "write `--out {}`", "name": "write `--out {}`",
            "save_json": "write `--save-detections FILE`", "save_txt": "write `--out DIR`",
            "plots": "write `--out DIR`, which receives plots/", "half": "leave it out",
            "augment": "see `ppdist ensemble tta`",
        },
        PADDLE: {
            "weights": "write `-w {}`", "output_eval": "write `--out {}`",
            "classwise": "leave it out: classes are always shown",
        },
    },
    "export": {
        ULTRA: {
            "model": "write `-w {}`", "data": _CLASSES,
            "include": "write `--format {}`", "format": "write `--format {}`",
            "device": _ON_CPU, "gpus": _ON_CPU,
            "half": "leave it out: runtimes convert to half themselves (docs/deploy.md)",
            "project": "write `--out {}`", "name": "write `--out {}`",
            "dynamic": "leave it out: this is the default (off: --fixed-batch, --fixed-size)",
            "simplify": "leave it out: this is always done",
            "opset": "leave it out: infer.yml records the opset",
            "nms": "leave it out: this is the default (off: --without-nms)",
        },
        PADDLE: {"weights": "write `-w {}`", "output_dir": "write `--out {}`"},
    },
    "convert": {ULTRA: {"model": "write `-w {}`"}, PADDLE: {"weights": "write `-w {}`"}},
    "data": {ULTRA: {"data": "write `ppdist data check {}`"}},
}  # fmt: skip
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


def without_removed_keys(tree: Node) -> Node:
    """The tree without keys that are gone where they are null, as our config.yml has all keys."""
    for path in (name.split(".") for name, each in KEYS.items() if each.owner == EARLIER):
        tree = _without_null(tree, path)
    return tree


def _without_null(tree: Node, path: Sequence[str]) -> Node:
    child = tree.child(path[0])
    if child is None or not isinstance(tree.value, dict):
        return tree
    others = {key: each for key, each in tree.value.items() if key != path[0]}
    if len(path) == 1:
        return replace(tree, value=others) if child.value is None else tree
    return replace(tree, value={**tree.value, path[0]: _without_null(child, path[1:])})


def refuse_options(command: str, words: Sequence[str], unknown: Container[str]) -> None:
    """Answers words of other trainers on the command line of one of ours.

    Args:
        words: what follows the command.
        unknown: options, with their dashes, that it has not.
    Raises: ConfigError: there are some; it says what to write for each.
    """
    lines: list[str] = []
    behind_o = False
    leading = True  # nothing of ours that takes name=value has come
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            leading, behind_o = False, word in ("-o", "--override")
            if not equals and not following.startswith("-"):
                value = following
            foreign = name in unknown
        else:
            foreign = bool(equals) and not behind_o and (leading or word in unknown)
        name = name.lstrip("-").replace("-", "_")
        item = behind_o and bool(equals)
        told = _answer(command, name, value, item=item) if foreign or item else ""
        if told:
            lines.append(f"{word if equals else f'{word} {value}'.strip()}: {told}")
    if lines:
        raise ConfigError("\n  ".join(lines), code="foreign_option")


def _answer(command: str, name: str, value: str, *, item: bool) -> str:
    """What to write for a word behind a command; "": it is nobody's.

    Args: item: it stands behind -o, where only what is no key of a configuration is answered.
    """
    for owner, words in ELSEWHERE.get(command, {}).items():
        if name in words and (not item or owner == PADDLE):
            told = words[name].replace("{}", value or "...")
            return f"an option of {owner}; {told}"
    if item or name not in WORDS:
        return ""
    told = _of_model(value) if command == "train" and name == "model" else ""
    return (
        f"an option of {WORDS[name].owner}; {told or WORDS[name].on_command_line(command, value)}"
    )


def refuse_weights(value: str) -> None:
    """Raises: ConfigError: weights where `train --resume` takes a run or a checkpoint."""
    if value.endswith(_NOT_RESUMED):
        raise ConfigError(
            "--resume takes a run or a checkpoint, not a weight file",
            code="foreign_option",
            where=f"--resume {value}",
            fix=f"to start from these weights, use `--weights {value}`",
        )


def _of_model(value: str) -> str:
    """What `model=yolov5n.pt` is in `ppdist train`."""
    path = PurePath(value)
    name = path.stem if path.suffix in (".pt", ".yaml", ".yml") else value
    if find_config(name) == name:  # none that ships
        known = "`--model yolov5n`, `--model ppyoloe_plus_s`, ... (ppdist config list)"
        return f"ppdist trains YOLOv5 and PP-YOLOE: {known}"
    start = f" --weights {name}_coco" if path.suffix == ".pt" else ""
    return f"write `DATA --model {name}{start}`"


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
            fix=f"leave out -c: `ppdist train {path} --model ppyoloe_plus_s` writes a "
            f"configuration; also `ppdist data check {path}`, `ppdist eval {path} -w RUN`",
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
