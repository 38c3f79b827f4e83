"""What is said of a run, case by case: the codes, and each sentence once."""

import json

import pytest

from ppdist.metrics.findings import over_fitting
from ppdist.metrics.run import read_run
from ppdist.metrics.verdict import judge_run, verdict


def run(scores, *, mAP50=1.6, val_losses=None):
    """An evaluation an epoch.  Args: mAP50: times the mAP."""
    losses = val_losses or [1.0] * len(scores)
    return [
        {"step": 10 * at, "epoch": at, "mAP": score, "mAP50": mAP50 * score, "val_loss": loss}
        for at, (score, loss) in enumerate(zip(scores, losses), start=1)
    ]


def per_class(**scores):
    rows = [
        {"name": name, "AP": score, "objects": objects} for name, (score, objects) in scores.items()
    ]
    return {"images": 40, "per_class": rows, "left_out": []}


def falling(count):
    return [{"step": 10 * at, "loss": 5.0 / at} for at in range(1, count + 1)]


NOISE = [0.60, 0.62, 0.61, 0.63, 0.62, 0.63, 0.62, 0.63]
RISES = [1.0, 0.8, 0.6, 0.6, 0.6, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
CASES = {
    "no evaluation": (dict(evaluations=[]), ["not_evaluated"]),
    "from scratch, nothing": (dict(evaluations=run([0.001, 0.002, 0.008])), ["not_learned"]),
    "from scratch, nothing, and known why": (
        dict(evaluations=run([0.001, 0.002, 0.03]), findings={"detr_from_scratch": "a DETR"}),
        ["not_learned", "detr_from_scratch"],
    ),
    "half learned, and known why": (
        dict(evaluations=run([0.01, 0.06, 0.13, 0.15]),
             findings={"objects_tiny": "tiny", "objects_crowded": "many"}),
        ["partly_learned", "objects_tiny"],
    ),
    "learned all the same": (
        dict(evaluations=run([0.5]), findings={"objects_beyond_queries": "many"}), ["learned"],
    ),
    "half learned": (
        dict(evaluations=run([0.01, 0.06, 0.13, 0.15])), ["partly_learned", "still_rising"],
    ),
    "COCO, yolov5n as published": (
        dict(evaluations=run([0.27, 0.279, 0.280, 0.280, 0.280])), ["learned"],
    ),
    "rises to its end": (
        dict(evaluations=run([0.1, 0.5, 0.66, 0.70])), ["learned", "still_rising"],
    ),
    "noise is neither fall nor rise": (dict(evaluations=run(NOISE)), ["learned", "steady"]),
    "one evaluation": (dict(evaluations=run([0.5])), ["learned"]),
    "best long ago": (
        dict(evaluations=run([0.4, 0.50, 0.49, 0.50, 0.49, 0.49, 0.50])), ["learned", "steady"],
    ),
    "falls": (dict(evaluations=run([0.3, 0.5, 0.52, 0.5, 0.4, 0.4, 0.3])), ["learned", "fell"]),
    "one bad evaluation is no fall": (
        dict(evaluations=run([0.4, 0.5, 0.52, 0.53, 0.53, 0.1])), ["learned"],
    ),
    "over-fits": (
        dict(evaluations=run([0.3, *[0.5] * 11], val_losses=RISES), steps=falling(12)),
        ["learned", "over_fitting"],
    ),
    "validation loss rises with the training loss": (
        dict(evaluations=run([0.3, *[0.5] * 11], val_losses=RISES)), ["learned", "steady"],
    ),
    "a weak class": (
        dict(evaluations=run([0.5]), evaluation=per_class(cat=(0.7, 90), king=(0.1, 12))),
        ["learned", "weak_classes"],
    ),
    "a class without objects is not weak": (
        dict(evaluations=run([0.5]), evaluation=per_class(cat=(0.7, 90), king=(None, 0))),
        ["learned"],
    ),
    "few images, one left out": (
        dict(
            evaluations=run([0.5]),
            evaluation={"images": 9, "left_out": [{"file": "a.jpg", "why": "cut short"}]},
        ),
        ["learned", "left_out", "few_images"],
    ),
    "stopped early": (
        dict(evaluations=run([0.5, 0.5]), finished="early_stopping"),
        ["learned", "ended_by_early_stopping"],
    ),
    "stopped before an evaluation": (
        dict(evaluations=[], finished="signal"), ["not_evaluated", "ended_by_signal"],
    ),
    "an evaluation alone": (dict(evaluations=[{"mAP": 0.5, "mAP50": 0.9}]), ["learned"]),
    "a classifier at chance": (
        dict(
            evaluations=[{"step": 1, "epoch": 1, "top1": 0.5, "top5": 1.0}],
            evaluation={"per_class": [{"name": name, "top1": 0.5, "images": 9} for name in "ab"]},
        ),
        ["not_learned"],
    ),
    "a classifier": (dict(evaluations=[{"step": 1, "epoch": 1, "top1": 0.9}]), ["learned"]),
    "records cut short": (
        dict(evaluations=[{"mAP": 0.5, "val_loss": 1.0}] * 9, steps=[{"loss": 1.0}] * 9),
        ["learned", "steady"],
    ),
    "nothing to measure": (dict(evaluations=[{"mAP": -1.0, "mAP50": -1.0}]), ["not_evaluated"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_course_has_its_verdict(case):
    arguments, codes = CASES[case]
    assert [finding.code for finding in verdict(**arguments)] == codes


SENTENCES = {
    "not learned yet: mAP 0.008, mAP50 0.013 after 3 epochs; train longer, or start from "
    "pretrained weights (--weights)": dict(evaluations=run([0.001, 0.002, 0.008])),
    "not learned yet: mAP 0.008, mAP50 0.013 after 1 epoch; train longer": dict(
        evaluations=run([0.008]), fine_tuned=True
    ),
    "not learned yet: mAP 0.008, mAP50 0.013 after 5 epochs; check the labels (`ppdist data "
    "show`) and try another optimizer.lr": dict(evaluations=run([0.008] * 5), fine_tuned=True),
    "not learned yet: mAP 0.008, mAP50 0.013 after 1 epoch; more epochs are not the remedy": dict(
        evaluations=run([0.008]), findings={"objects_tiny": "tiny"}
    ),
    "learned: mAP 0.500, mAP50 0.800 (epoch 1)": dict(evaluations=run([0.5])),
    "still rising: mAP +0.040 in the last quarter; more epochs would help": dict(
        evaluations=run([0.1, 0.5, 0.66, 0.70])
    ),
    "mAP 0.520 in epoch 3 fell to 0.400 by the end; use checkpoints/best": dict(
        evaluations=run([0.3, 0.5, 0.52, 0.5, 0.4, 0.4, 0.3])
    ),
    "a weak class: king (AP 0.10, 12 objects); the mean is 0.40": dict(
        evaluations=run([0.5]), evaluation=per_class(cat=(0.7, 90), king=(0.1, 12))
    ),
    "stopped early: no improvement for too long (early_stopping)": dict(
        evaluations=run([0.5, 0.5]), finished="early_stopping"
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_its_sentences(sentence):
    assert sentence in [finding.text for finding in verdict(**SENTENCES[sentence])]


def test_over_fitting_names_its_epoch():
    found = over_fitting([(1 / at, loss) for at, loss in enumerate(RISES, start=1)])
    assert found is not None and found.val_now > 1.2 * found.val_then
    (finding,) = [each for each in verdict(**CASES["over-fits"][0]) if each.code == "over_fitting"]
    assert finding.text.startswith(f"over-fitting from epoch {found.lowest + 1} on: ")


def test_verdict_reads_the_files_of_a_run(tmp_path):
    records = [
        {"step": 0, "derived": {}},
        *falling(2),
        *({**record, "eval_seconds": 1.0} for record in run([0.1, 0.5])),
        {"step": 20, "finished": "hours"},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "evaluation.json").write_text(json.dumps(per_class(cat=(0.7, 9), king=(0.1, 2))))
    found = judge_run(read_run(tmp_path))
    codes = ["learned", "still_rising", "weak_classes", "ended_by_hours"]
    assert [finding.code for finding in found] == codes
    assert found[-1].text.startswith("train.hours")


def test_verdict_names_the_evaluation_of_the_best_checkpoint(tmp_path):
    """Chosen by fitness, checkpoints/best need not be the evaluation with the best mAP."""
    records = run([0.500, 0.490, 0.480])
    for record, fitness in zip(records, [0.50, 0.51, 0.49], strict=True):
        record |= {"fitness": fitness, "eval_seconds": 1.0}
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "config.yml").write_text("evaluate: {metric: fitness}\n")
    assert judge_run(read_run(tmp_path))[0].text.endswith("(epoch 2)")
    (tmp_path / "checkpoints" / "step-00000030").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("step-00000030")  # what the trainer kept
    assert judge_run(read_run(tmp_path))[0].text.endswith("(epoch 3)")
