"""What users of PaddleDetection and ultralytics type is answered with what to write."""

import re
import sys
from pathlib import Path

import pytest

from ppdist import cli
from ppdist.cli import load_main
from ppdist.cli.train import parse
from ppdist.common.errors import ConfigError
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.migration import refuse_options, table
from ppdist.config.schema import all_keys
from tests.errors import raises
from tests.typed import Typed, check

OURS = "data: {root: x, train: {}, val: {}}\nmodel: {name: yolov5}\n"


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def config(folder: Path, text: str) -> Path:
    file = folder / "cfg.yml"
    file.write_text(text)
    return file


def test_every_equivalent_is_a_key_or_a_note():
    known = {".".join(key) for key in all_keys(ExperimentConfig)}
    tables = (table().keys, table().words)
    for name, each in ((name, each) for rows in tables for name, each in rows.items()):
        assert each.key in known or (not each.key and (each.note or each.option)), name
        named = re.findall(r"\b((?:data|model|train|optimizer|schedule|nms)\.\w+)", each.note)
        assert {*named} - {"train.py"} <= known, name


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("TrainReader.batch_size=8", "write `train.batch_size_per_card=8`"),
        ("TrainReader.batch_transforms=[1]", "see data.augment"),
        ("LearningRate.base_lr=0.001", "write `optimizer.lr=0.001`"),
        ("num_classes=3", "write `model.num_classes=3`"),
        ("worker_num=4", "write `data.workers=4`"),
        ("epoch=100", "write `train.epochs=100`"),
        ("snapshot_epoch=5", "write `checkpoint.every_epochs=5`"),
        ("architecture=PPYOLOE", "see model.name: ppyoloe or yolov5"),
        ("pretrain_weights=x.pdparams", "write `model.pretrained=x.pdparams`"),
        ("imgsz=640", "write `model.image_size=640` (one number is a square"),
        ("batch=16", "write `train.batch_size_per_card=16` (images per card, not of all)"),
    ],
)
def test_foreign_key_behind_o_is_answered(tmp_path, item, said):
    error = refused(config(tmp_path, OURS), item)
    assert (
        error.code == "foreign_key" and said in str(error) and str(error).startswith(f"-o {item}")
    )


def test_foreign_key_in_a_file_is_answered_at_its_line(tmp_path):
    file = config(tmp_path, f"{OURS}snapshot_epoch: 5\n")
    error = refused(file)
    assert error.code == "foreign_key" and str(error).startswith(f"{file}:3:1: ")
    assert "`checkpoint.every_epochs: 5`" in str(error)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("train: ../train/images\nval: ../valid/images\nnc: 3\nnames: [a, b, c]\nroboflow: {a: 1}",
         "data_yaml_as_config", "leave out -c: `ppdist train "),
        ("path: coco\nnames: {0: person}", "data_yaml_as_config", "data file of ultralytics"),
        ("_BASE_: ['../datasets/coco_detection.yml', '../runtime.yml']\nsnapshot_epoch: 5\n"
         "weights: output/x/model_final", "paddledetection_config", "checkpoint.every_epochs: 5"),
        ("architecture: PPYOLOE\nTrainReader: {batch_size: 8}", "paddledetection_config",
         "train.batch_size_per_card: 8"),
        ("nc: 80\nbackbone: [[-1, 1, Conv, [64, 6, 2, 2]]]\nhead: []", "model_yaml_as_config",
         "model: {name: yolov5, size: s}"),
    ],
)  # fmt: skip
def test_file_of_another_trainer_is_one_message(tmp_path, text, code, said):
    file = config(tmp_path, text)
    error = refused(file)
    assert error.code == code and said in str(error) and str(error).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data coco.yaml", "an option of ultralytics; give the data"),
        ("--img 640", "--img 640: an option of ultralytics; write `--image-size 640`"),
        ("d --batch-size=16", "an option of ultralytics; write `--batch 16` (images per"),
        ("--cfg yolov5s.yaml", "name the model: `--model yolov5s`"),
        ("-c x.yml -r x/10", "an option of PaddleDetection; write `ppdist train --resume x/10`"),
        ("-c x.yml --slim_config s.yml --use_vdl=true", "write `-o log.visualdl=true`"),
        ("batch=8", "batch=8: an option of ultralytics; write `--batch 8`"),
        ("-c x.yml --batch_size 8", "write `-o train.batch_size_per_card=8` (images per"),
        ("-c x.yml -w a.pt", "write `-o model.pretrained=a.pt`"),
        ("model=yolov5n.pt", "write `DATA --model yolov5n --weights yolov5n_coco`"),
        ("model=yolov5n.yaml", "write `DATA --model yolov5n`"),
        ("model=rtdetr-l.pt", "write `DATA --model rtdetr_l --weights rtdetr_l_coco`"),
        ("model=yolov8n.pt", "PP-YOLOE, RT-DETR and D-FINE: `--model yolov5n`, `--model dfine_s`"),
        ("device=cpu", "write `-o device=cpu`"),
        ("d.yaml --device cuda:0", "write `-o device=gpu`"),
        ("d.yaml --gpus 0,1", "write `fleetrun --selected_gpus 0,1 ppdist train ...`"),
        ("d.yaml --use_gpu", "write `-o device=gpu`"),
        ("d.yaml lr0=0.01", "write `-o optimizer.lr=0.01`"),
        ("d.yaml imgsz=640,480", "write `--image-size 640 480`"),
        ("d.yaml --imgsz 640 480", "write `--image-size 640 480`"),
        ("d.yaml batch=-1", "write `--batch auto`"),
        ("d.yaml --batch-size -1", "write `--batch auto`"),
        ("d.yaml optimizer=AdamW", "write `-o optimizer.name=adamw`"),
        ("d.yaml optimizer=SGD", "write `-o optimizer.name=momentum`"),
        ("d.yaml freeze=10", "write `-o 'train.freeze=[backbone]'`"),
        ("d.yaml --lr 0.1", "an option of other trainers; write `-o optimizer.lr=0.1`"),
        ("d.yaml --node_rank 1", "`fleetrun --ips A,B ppdist ...`"),
        ("d.yaml --master_addr a", "`fleetrun --ips A,B ppdist ...`"),
        ("d.yaml --max_iter 9", "write `-o train.steps=9`"),
        ("d.yaml --device 0,1 --img 64", "0,1 ppdist train d.yaml --image-size 64 --model"),
        ("d.yaml --project runs --name a", "write `-o output_dir=runs/a`"),
        ("d.yaml name=a project=runs", "write `-o output_dir=runs/a`"),
        ("d.yaml --model yolov5n.pt", "write `DATA --model yolov5n --weights yolov5n_coco`"),
        ("d.yaml --amp", "an option of PaddleDetection and ultralytics; write `-o train.amp.en"),
        ("model=yolov5s-cls.pt", "`DATA --model yolov5s_cls --weights yolov5s_cls_imagenet`"),
    ],
)  # fmt: skip
def test_foreign_option_is_answered(words, said):
    with raises("foreign_option", said):
        refuse_options("train", words.split(), {word.partition("=")[0] for word in words.split()})


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("yolo detect train data=d.yaml model=yolov5n.pt epochs=3 imgsz=160",
         "train d.yaml --model yolov5n --weights yolov5n_coco --epochs 3 --image-size 160"),
        ("yolo train data=coco128.yaml model=yolo11s.pt device=cpu plots=True",
         "train FOLDER --model yolov5s --weights yolov5s_coco -o device=cpu"),
        ("train data=d.yaml batch=8 lr0=0.1",
         "train d.yaml --batch 8 --model yolov5n -o optimizer.lr=0.1"),
        ("train --data d.yaml --cfg yolov5s.yaml --weights= --img 160",
         "train d.yaml --model yolov5s --weights= --image-size 160"),
        ("train -c x.yml --amp -o TrainReader.batch_size=8 epoch=2",
         "train -c x.yml -o train.amp.enabled=true train.batch_size_per_card=8 train.epochs=2"),
        ("yolo val model=a/best.pt data=d.yaml split=test",
         "eval d.yaml -w a/best.pt --split test"),
        ("val -w RUN", "eval -w RUN"),
        ("detect --weights a.pt --source 0 --conf-thres 0.4",
         "predict --weights a.pt --source 0 --threshold 0.4"),
        ("yolo track model=yolov5n.pt source=f.mp4",
         "predict -w yolov5n_coco --source f.mp4 --track"),
        ("yolo export model=a.pt format=onnx", "export -w a.pt --format onnx"),
    ],
)  # fmt: skip
def test_a_pasted_line_is_answered_with_one_that_works(typed, written, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppdist", *typed.split()])
    monkeypatch.setattr(cli, "run", lambda command: load_main(command)())
    with raises("foreign_option", f"write `ppdist {written}`"):
        cli.main()
    check(Typed(typed, f"ppdist {written}"))


@pytest.mark.parametrize(
    "typed", ["yolo segment train data=x", "yolo", "train2 data=x", "classify yolo"]
)
def test_a_command_of_nobody_is_refused(typed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppdist", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "there is no command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict model=yolov5n.pt", "model=yolov5n.pt: an option of ultralytics; "
         "write `-w yolov5n.pt`"),
        ("predict -w a.pt conf=0.4", "conf=0.4: an option of ultralytics; write `--thr"),
        ("predict -w a.pt --source x --conf-thres 0.4", "write `--threshold 0.4`"),
        ("predict -w a.pt --source x --conf=0.4", "write `--threshold 0.4`"),
        ("predict -w a.pt --source x --device 0", "the first of CUDA_VISIBLE_DEVICES"),
        ("predict -c x.yml --infer_img=a.jpg", "write `--source a.jpg`"),
        ("predict -c x.yml -o weights=a.pdparams use_gpu=true", "write `-w a.pdparams`"),
        ("predict -w a.pt --source x augment=True", "write `--augment`"),
        ("predict -w a.pt --source x --agnostic-nms", "write `--agnostic`"),
        ("eval -w a --agnostic-nms", "write `-o nms.class_agnostic="),
        ("predict -w a.pt --source x --imgsz 640", "write `-o model.image_size=640`"),
        ("eval --data coco.yaml -w a.pt", "write `ppdist eval coco.yaml -w WEIGHTS`"),
        ("eval -w a --iou 0.6", "write `-o nms.iou_threshold=0.6`"),
        ("eval -w a --gpus 0,1", "write `fleetrun --selected_gpus 0,1 ppdist eval ...`"),
        ("eval -w a --project runs --name a", "write `--out runs/a`"),
        ("train d --model yolov5n -w a.pt", "write `--weights a.pt`"),
        ("train d.yaml resume model=last.pt", "resume: an option of ultralytics; write `--resume"),
        ("train -c x.yml max_iter=100", "write `-o train.steps=100`"),
        ("eval -w a --classwise", "leave it out: classes are always shown"),
        ("export model=a.pt", "write `-w a.pt`"),
        ("export -w a.pt --include onnx", "write `--format onnx`"),
        ("data check data=coco.yaml", "write `ppdist data check coco.yaml`"),
        ("data stats d.yaml --lr0 0.1", "leave it out: it only applies to training"),
        ("export -w a.pt --workers 2", "leave it out: it only applies to data sets"),
        ("report out --imgsz 640", "leave it out; `ppdist report --help` lists the options"),
    ],
)  # fmt: skip
def test_every_command_answers_words_of_other_trainers(words, said, monkeypatch):
    command, *rest = words.split()
    monkeypatch.setattr(sys, "argv", [f"ppdist {command}", *rest])
    with raises("foreign_option", said):
        load_main(command)()


@pytest.mark.parametrize(
    "words", ["train d.yaml --epoch 3", "train d --zz 1", "predict --threshold 0.1 --conf-thre"]
)
def test_a_word_of_nobody_is_argparse_s(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"ppdist {words.split()[0]}", *words.split()[1:]])
    with pytest.raises(SystemExit) as ended:
        load_main(words.split()[0])()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and f"\n  ppdist {words.split()[0]} " in told
    assert ("did you mean --epochs?" in told) is ("--epoch" in words)
    assert "--zz" not in words or "did you mean" not in told


def test_a_switch_of_a_card_becomes_a_device(tmp_path):
    error = refused(config(tmp_path, OURS), "use_gpu=true")
    assert "write `device=gpu`" in str(error) and "`=true`" not in str(error)


def test_weights_are_not_resumed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppdist-train", "-c", "x.yml", "--resume", "last.pt"])
    with raises("foreign_option"):
        load_main("train")()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch -1", "or auto"),
        ("--image-size 640,480", "--image-size 640 480"),
        ("--model yolov5n --optimiser x", "unrecognized"),
    ],
)
def test_our_options_name_the_form_that_works(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppdist train", "data", *words.split()])
    with pytest.raises(SystemExit) as ended:
        load_main("train")()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-c yolov5n --epochs 3 --image-size 64 96", "options_conflict",
         "`ppdist train -c yolov5n -o train.epochs=3 'model.image_size=[64,96]'`"),
        ("-c yolov5n --classes a b --resume", "options_conflict",
         "-c yolov5n --resume -o 'data.classes=[a,b]' model.num_classes=2`"),
        ("d.yaml --weights a/yolov5s.pt", "option_missing", "yolov5s.pt --model yolov5s`"),
        ("-c yolov5n train.epochs=3", "options_conflict", "write `-o train.epochs=3`"),
    ],
)  # fmt: skip
def test_options_beside_a_configuration_become_its_keys(words, code, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppdist train", *words.split()])
    with raises(code, said):
        parse()


def test_no_weights_are_from_scratch(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppdist train", "d", "--model", "yolov5n", "--weights", ""])
    assert parse().weights is None


@pytest.mark.parametrize(
    ("item", "ours"),
    [
        ("optimizer.name=sgd", "momentum"),
        ("optimizer.name=AdamW", "adamw"),
        ("train.batch_size_per_card=-1", "auto"),
        ("data.augment.rotate=10", "data.augment.affine.rotate"),
        ("train.iterations=100", "train.steps"),
        ("train.epoch=100", "train.epochs"),
    ],
)
def test_a_wrong_value_or_key_names_ours(tmp_path, item, ours):
    assert f"did you mean {ours}?" in str(refused(config(tmp_path, OURS), item))


def test_files_of_other_trainers_are_no_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["-w", "a.pt", "--source", "photos", "conf=0.4", "max_det=10"]
    with raises("foreign_option", "`ppdist predict -w a.pt --source photos --threshold 0.4 -o nms"):
        refuse_options("predict", words, ())
    (tmp_path / "conf=0.4").touch()  # a picture of that name
    refuse_options("predict", words[:-1], ())


def test_our_own_words_pass():
    for words in (
        "train data.yaml --model yolov5n --epochs 3 --batch 8 --weights a.pt --eval",
        "train -c x.yml -o seed=1 train.epochs=3 device=cpu --resume auto --eval",
        "data split d.yaml --parts train=0.8 val=0.2",
        "eval -w a --at-least mAP50=0.8 -o nms.keep=3",
    ):
        command, *rest = words.split()
        refuse_options(command, rest, ())
