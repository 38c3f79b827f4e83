"""Folders as runs leave them, made up: numbers follow simple curves, nothing was trained."""

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np

CONFIG: dict[str, Any] = {
    "output_dir": "output/made_up",
    "seed": 0,
    "model": {"name": "yolov5", "size": "n", "num_classes": 3, "image_size": [320, 320]},
    "train": {"epochs": 20, "batch_size_per_card": 8},
    "optimizer": {"lr": 0.01},
    "evaluate": {"metric": None},
    "log": {"every_steps": 20},
}
NAMES = ["RBC", "WBC", "Platelets"]


def make_run(
    folder: Path,
    *,
    names: list[str] = NAMES,
    steps: int = 400,
    ranks: int = 2,
    evaluation: bool = True,
    pictures: bool = True,
) -> Path:
    """Writes what a training of `steps` steps, 20 an epoch, would leave; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIG))
    config["output_dir"], config["model"]["num_classes"] = str(folder), len(names)
    (folder / "config.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    environment = {
        "command": ["tools/train.py", "-c", "x.yml"],
        "paddle": "3.3.1",
        "python": "3.11",
        "ranks": ranks,
        "cpus": 2,
    }
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    records = list(_records(names, steps, ranks))
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "train.log").write_text(
        "2026-01-05 10:00:00 INFO begun\n"
        "2026-01-05 10:00:01 WARNING total batch 16 is small\n"
        "2026-01-05 10:03:01 WARNING step 5: rank 1 (host b) is 2.1 times slower than the others\n"
        "2026-01-05 10:04:01 WARNING step 5: rank 1 (host b) is 2.1 times slower than the others\n",
        encoding="utf-8",
    )
    if evaluation:
        text = json.dumps(make_evaluation(names))
        (folder / "evaluation.json").write_text(text, encoding="utf-8")
    if pictures:
        make_pictures(folder / "plots")
    return folder


def _records(names: list[str], steps: int, ranks: int) -> Any:
    rng = np.random.default_rng(0)
    now = 1_767_607_200.0
    derived = {
        "ranks": {"value": ranks, "why": "processes that fleetrun started"},
        "total_batch": {"value": 8 * ranks, "why": f"{ranks} ranks x 8 images x 1 micro-steps"},
        "lr": {"value": 0.01, "why": "0.01, linear scaling by 1"},
        "steps": {"value": steps, "why": "20 epochs"},
    }
    yield {"time": now, "step": 0, "derived": derived}
    for step in range(20, steps + 1, 20):
        done = step / steps
        noise = 1 + 0.05 * rng.standard_normal()
        parts = {"loss_box": 0.1 * math.exp(-3 * done), "loss_cls": 0.05 * math.exp(-2 * done)}
        parts = {key: value * noise for key, value in parts.items()}
        yield {
            "time": now + step,
            "step": step,
            "epoch": step / 20,
            "loss": sum(parts.values()) * (30 if step == 20 else 1),
            **parts,
            "lr": 0.01 * min(1, step / 60) * (1 - 0.95 * done),
            "gradient_norm": 3 * noise,
            "images_per_second": 40 * ranks * noise,
            "data_seconds": 0.01 * noise,
            "step_seconds": 0.2 / noise,
        }
        own = [0.15 * noise * (1.5 if rank == 1 else 1) for rank in range(ranks)]
        waits = [0.01 * noise] * ranks
        yield {
            "time": now + step,
            "step": step,
            "rank_step_seconds": [0.3] * ranks,
            "rank_own_seconds": own,
            "rank_data_seconds": waits,
            "rank_micro_batch_seconds": [each / 2 for each in own],
        }
        if step % 40 == 0:
            score = 0.6 * (1 - math.exp(-4 * done))
            yield {
                "time": now + step + 3,
                "step": step,
                "epoch": step / 20,
                "mAP": score,
                "mAP50": 1.4 * score,
                "mAP75": 1.1 * score,
                "mAP_small": -1.0,
                **{
                    f"AP/{name}": score * (1 - 0.1 * (place % 5))
                    for place, name in enumerate(names)
                },
                "precision": 0.9 * done,
                "recall": 0.8 * done,
                "f1": 0.85 * done,
                "best_f1_threshold": 0.35,
                "precision_at_25": 0.7 * done,
                "recall_at_25": 0.85 * done,
                "val_loss": 0.2 * math.exp(-2 * done) + 0.05,
                "val_loss_box": 0.12 * math.exp(-2 * done),
                "eval_seconds": 3.0,
            }
    yield {"time": now + steps + 5, "step": steps, "finished": "total"}


def make_evaluation(names: list[str]) -> dict[str, Any]:
    """evaluation.json with every part."""
    rng = np.random.default_rng(0)
    count = len(names)
    confidence_T = np.linspace(0, 1, 101)
    recall_R = np.linspace(0, 1, 101)
    skill_C1 = rng.uniform(0.3, 0.95, (count, 1))
    precision_CT = np.clip(skill_C1 + 0.5 * confidence_T, 0, 1)
    recall_CT = skill_C1 * np.sqrt(1 - confidence_T)
    f1_CT = 2 * precision_CT * recall_CT / np.maximum(precision_CT + recall_CT, 1e-9)
    precision_CR = np.where(recall_R < skill_C1, 1 - 0.3 * recall_R, 0)
    counts = rng.poisson(3, (count + 1, count + 1)) * (rng.random((count + 1, count + 1)) < 0.3)
    counts[np.arange(count), np.arange(count)] = rng.integers(20, 200, count)
    counts[-1, -1] = 0
    images = [
        {
            "file": f"images/{number:05d}.jpg",
            "objects": 9,
            "found": 9 - number,
            "missed": number,
            "wrong": 2,
        }
        for number in range(8)
    ]
    keys = ("AP", "AP50", "AP75", "AP_medium", "AP_large", "AR100", "precision", "recall", "f1")
    per_class = [
        {"name": name, "objects": 1000 // (place + 1), "images": 100, "AP_small": None}
        | {
            key: round(float(rng.uniform(0.2, 0.9)), 4)
            for key in (*keys, "VOC_11_point", "VOC_area")
        }
        for place, name in enumerate(names)
    ]
    metrics = {"mAP": 0.561, "mAP50": 0.85, "mAP75": 0.63, "mAP_small": None, "mAP_medium": 0.43}
    metrics |= {"mAP_large": 0.69, "AR100": 0.66, "AR_small": None, "AR_medium": 0.58}
    metrics |= {"AR_large": 0.78, "fitness": 0.59, "precision": 0.8, "recall": 0.75, "f1": 0.77}
    return {
        "step": 400,
        "images": 120,
        "class_names": names,
        "metrics": metrics,
        "per_class": per_class,
        "curves": {
            "curve_classes": list(range(count)),
            "mean_precision_T": precision_CT.mean(0).round(4).tolist(),
            "mean_recall_T": recall_CT.mean(0).round(4).tolist(),
            "mean_f1_T": f1_CT.mean(0).round(4).tolist(),
            "mean_precision_R": precision_CR.mean(0).round(4).tolist(),
            "confidence_T": confidence_T.round(4).tolist(),
            "precision_CT": precision_CT.round(4).tolist(),
            "recall_CT": recall_CT.round(4).tolist(),
            "f1_CT": f1_CT.round(4).tolist(),
            "recall_R": recall_R.round(4).tolist(),
            "precision_CR": precision_CR.round(4).tolist(),
        },
        "confusion": {"iou": 0.5, "confidence": 0.35, "counts": counts.tolist()},
        "errors": {
            "counts": {"correct": 900, "localisation": 80, "class": 20, "duplicate": 15}
            | {"background": 60, "missed": 110},
            "AP50_gain": {"localisation": 0.04, "class": 0.01, "duplicate": 0.004}
            | {"background": 0.03, "missed": 0.06},
        },
        "worst": images[::-1],
        "best": images,
    }


def make_pictures(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    ramp_HW = np.tile(np.arange(320, dtype=np.uint8), (200, 1))
    for name in ("train_batch_0.jpg", "val_batch_0.jpg", "worst.jpg", "best.jpg", "classes.png"):
        cv2.imwrite(str(folder / name), cv2.applyColorMap(ramp_HW, cv2.COLORMAP_VIRIDIS))


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes, whatever it says of itself."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
