"""Writes the classifier's reference file from OUR model, in the form of the original's.

It proves nothing about our numbers, only that the comparison notices what is tampered with.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.losses.classification import ClassificationLoss
from tests.reference import formulas
from tests.reference.formulas import CLASSES, CLS_CASE, parity_image
from tests.reference.parity import family_of
from tests.reference.parity.reference import gradients, set_weights

NAME = "yolov5n_cls"
SAMPLES = 256


def write_folder(folder: Path) -> None:
    """The formulas, and the reference of yolov5n_cls with five classes."""
    shutil.copy(formulas.__file__, folder / "parity_weights.py")
    model = family_of(NAME).build(NAME, CLASSES, ())
    set_weights(model, formulas)
    model.eval()
    with paddle.no_grad():
        backbone = model.backbone(paddle.to_tensor(parity_image("unit", *CLS_CASE)))
        logits = model.head(backbone[-1]).numpy()
    values: dict[str, Any] = {
        "layers_json": json.dumps({"backbone": [4, 6, 8], "neck": []}),
        "logits": logits,
        "probs_top5": np.argsort(-logits[0])[:5],
    }
    for level, feature in enumerate(backbone):
        x = feature.numpy().astype("float64")
        where = np.linspace(0, x.size - 1, SAMPLES).astype("int32")
        values |= {
            f"backbone{level}_shape": x.shape,
            f"backbone{level}_stat": [x.mean(), x.std()],
            f"backbone{level}_idx": where,
            f"backbone{level}_val": x.ravel()[where].astype("float32"),
        }
    set_weights(model, formulas)
    model.train()
    model.clear_gradients()
    labels = np.array([1, 4])
    logits = model(paddle.to_tensor(parity_image("unit", 2, 224, 224, 14)))
    truth = paddle.zeros([2, 1, 4]), paddle.to_tensor(labels[:, None]), paddle.ones([2, 1])
    loss = ClassificationLoss(0.0)(logits, *truth, 0).total / 2
    loss.backward()
    norms = {
        key: np.linalg.norm(g.numpy().astype("float64")) for key, g in gradients(model).items()
    }
    values |= {
        "train_labels": labels,
        "train_loss": float(loss),
        "train_logits": logits.numpy(),
        "grad_names": list(norms),
        "train_grad_l2": list(norms.values()),
    }
    np.savez(folder / f"{NAME}.npz", **{key: np.asarray(value) for key, value in values.items()})


def with_one(stored: Path, folder: Path, **changes: np.ndarray | None) -> Path:
    """A copy of the stored folder, some arrays exchanged (None: left out)."""
    (folder / "parity_weights.py").write_bytes((stored / "parity_weights.py").read_bytes())
    with np.load(stored / f"{NAME}.npz") as archive:
        values = {**archive, **changes}
    np.savez(folder / f"{NAME}.npz", **{k: v for k, v in values.items() if v is not None})
    return folder
