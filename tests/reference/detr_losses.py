"""Loss values of RT-DETR and D-FINE that transformers (torch) computes: detr_losses.json.

    python -m tests.reference.detr_losses      writes it; needs transformers and torch

What follows the originals and not transformers' classes for these models: D-FINE's boxes and
distributions are learned by the union of all matchings, that of the preliminary boxes included
(transformers has it in DEIMv2's criterion, which is D-FINE's otherwise; and no preliminary boxes).
The originals weigh the positives of denoising queries in DDF by the counts of that union,
transformers by their own; in these cases both ratios are the same.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.reference.formulas import uniform

FILE = Path(__file__).with_name("detr_losses.json")
CLASSES, LAYERS, BINS = 5, 3, 33
SIZE = (96, 128)  # height, width


class Case(NamedTuple):
    """Boxes and queries of a case.

    real: boxes of each image.
    queries: Q.
    groups: denoising groups; 0: no denoising.
    seed: of the formulas.
    """

    real: tuple[int, ...]
    queries: int
    groups: int
    seed: int
    in_bins: bool = False
    classification: str = "varifocal"


CASES = {
    "rtdetr": Case((3,), 12, 2, 1),
    "rtdetr two images": Case((3, 3), 12, 2, 2),
    "rtdetr uneven": Case((4, 0, 2), 12, 0, 3),
    "rtdetr mal": Case((3, 1), 12, 0, 4, classification="mal"),
    "dfine": Case((3,), 12, 2, 5, in_bins=True),
    "dfine mal": Case((2,), 16, 3, 5, in_bins=True, classification="mal"),
    "dfine no boxes": Case((0,), 8, 0, 7, in_bins=True),
}


def truth(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes [B, M, 4] as cxcywh in 0..1, labels and mask."""
    images, most = len(case.real), max(*case.real, 1)
    mask = (np.arange(most) < np.array(case.real)[:, None]).astype("float32")
    noise = uniform(case.seed, images, most, 4)
    boxes = np.concatenate([0.5 + 0.3 * noise[..., :2], 0.3 + 0.2 * noise[..., 2:]], -1)
    labels = ((uniform(case.seed + 100, images, most) + 1) / 2 * CLASSES).astype("int64")
    return (boxes * mask[..., None]).astype("float32"), (labels * mask).astype("int64"), mask


def outputs(case: Case) -> dict[str, dict[str, np.ndarray]]:
    """logits, boxes, and in bins corners and reference of each output by its name."""
    boxes_BM4, _, _ = truth(case)
    names = [f"layer {at}" for at in range(LAYERS)] + ["encoder"] + ["preliminary"] * case.in_bins
    found = {name: _output(case, name, boxes_BM4) for name in names}
    if case.groups:
        names = [name for name in names if name != "encoder"]
        found |= {f"denoised {name}": _output(case, f"dn {name}", boxes_BM4) for name in names}
    return found


def denoised(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """target_BD and positive_BD: groups of an image's boxes to find, then as many not to."""
    images, most = len(case.real), max(case.real)
    target = np.tile(np.arange(most), [images, 2 * case.groups])
    positive = np.tile(np.repeat([1, 0], most), [images, case.groups])
    return target, positive.astype("float32")


def _output(case: Case, name: str, boxes_BM4: np.ndarray) -> dict[str, np.ndarray]:
    """Every second query is near a box."""
    seed = 1000 * case.seed + sum(map(ord, name))
    images, most, _ = boxes_BM4.shape
    count = 2 * most * case.groups if name.startswith("dn") else case.queries
    noise = uniform(seed, images, count, 4)
    boxes = np.concatenate([0.5 + 0.3 * noise[..., :2], 0.3 + 0.2 * noise[..., 2:]], -1)
    near = boxes_BM4[:, np.arange(count) % most] + 0.05 * noise
    boxes = np.where((np.arange(count) % 2)[:, None], near, boxes).clip(0.04, 0.96)
    found = {"logits": 2 * uniform(seed + 1, images, count, CLASSES) - 1, "boxes": boxes}
    if case.in_bins and "layer" in name:
        found["corners"] = 2 * uniform(seed + 2, images, count, 4, BINS)
        found["reference"] = boxes + 0.04 * uniform(case.seed + 3, images, count, 4)
    return {key: value.astype("float32") for key, value in found.items()}


def computed(case: Case) -> dict[str, Any]:
    """Terms and gradients by transformers, in the order of `RTDETRLoss.terms`."""
    import torch
    from transformers import Deimv2Config, RTDetrConfig
    from transformers.loss.loss_deimv2 import Deimv2Loss
    from transformers.loss.loss_rt_detr import RTDetrLoss

    boxes_BM4, labels_BM, _ = truth(case)
    targets = [
        {"boxes": torch.tensor(b[:n]), "class_labels": torch.tensor(label[:n])}
        for b, label, n in zip(boxes_BM4, labels_BM, case.real)
    ]
    leaves = {
        name: {
            key: torch.tensor(value, requires_grad=key != "reference") for key, value in x.items()
        }
        for name, x in outputs(case).items()
    }
    found = {name: _renamed(name, leaves) for name in leaves}
    last = found.pop(f"layer {LAYERS - 1}")
    given: dict[str, Any] = {**last}
    given["auxiliary_outputs"] = [x for name, x in found.items() if "denoised" not in name]
    if case.groups:
        _, positive_BD = denoised(case)
        given["dn_auxiliary_outputs"] = [x for name, x in found.items() if "denoised" in name]
        places = [torch.tensor(row.nonzero()[0]) for row in positive_BD]
        given["denoising_meta_values"] = {
            "dn_positive_idx": places,
            "dn_num_group": case.groups,
        }
    mal = case.classification == "mal"
    if case.in_bins or mal:
        criterion = Deimv2Loss(
            Deimv2Config(num_labels=CLASSES, focal_loss_gamma=1.5 if mal else 2.0)
        )
        criterion.use_dense_one_to_one = case.in_bins
        criterion.weight_dict["loss_vfl"] = 1.0
        criterion.losses = ["mal" if mal else "vfl", "boxes", "local"]
        unions: list[Any] = []
        union_of = criterion._get_dense_o2o_indices
        criterion._get_dense_o2o_indices = lambda *x: unions.extend(union_of(*x)) or unions
    else:
        criterion = RTDetrLoss(RTDetrConfig(num_labels=CLASSES))
    losses = criterion(given, targets)
    if case.in_bins and case.groups:
        assert 2 * len(unions[0][0]) == case.queries, len(unions[0][0])
    sum(losses.values()).backward()
    return {"terms": _by_term(losses, list(leaves)), "gradients": _summaries(leaves)}


def _renamed(name: str, leaves: dict[str, dict]) -> dict[str, Any]:
    """As the criterion calls them; with the last layer's for all but it, outside denoising."""
    names = {"logits": "logits", "boxes": "pred_boxes", "corners": "pred_corners"}
    names |= {"reference": "ref_points"}
    found = {names[key]: value for key, value in leaves[name].items()}
    if "corners" in leaves[name]:
        last = leaves[f"{'denoised ' * ('denoised' in name)}layer {LAYERS - 1}"]
        found["teacher_corners"], found["teacher_logits"] = last["corners"], last["logits"]
    return found


def _by_term(losses: dict[str, Any], names: list[str]) -> dict[str, dict[str, list[float]]]:
    """By term a row of values, matched and denoised apart."""
    keys = {"loss_vfl": "cls", "loss_mal": "cls", "loss_bbox": "l1", "loss_giou": "giou"}
    keys |= {"loss_fgl": "fgl", "loss_ddf": "ddf"}
    found: dict[str, dict[str, list[float]]] = {}
    matched = [name for name in names if "denoised" not in name]
    aux = [name for name in matched if name != f"layer {LAYERS - 1}"]
    suffixes = {name: f"_aux_{aux.index(name)}" if name in aux else "" for name in matched}
    denoised_names = [name for name in names if "denoised" in name]
    suffixes |= {name: f"_dn_{at}" for at, name in enumerate(denoised_names)}
    for name, suffix in suffixes.items():
        for key, term in keys.items():
            if key + suffix not in losses or (term == "ddf" and name.endswith(f"{LAYERS - 1}")):
                continue
            kind = "denoised" if "denoised" in name else "matched"
            found.setdefault(kind, {}).setdefault(term, []).append(losses[key + suffix].item())
    return found


def _summaries(leaves: dict[str, dict]) -> dict[str, list[float]]:
    return {
        f"{name}.{key}": summary(value.grad.numpy())
        for name, x in leaves.items()
        for key, value in x.items()
        if key != "reference"
    }


def summary(gradient: np.ndarray) -> list[float]:
    """Norm of a gradient, and its products with some formulas."""
    flat = gradient.astype("float64").ravel()
    return [float(np.linalg.norm(flat)), *(float(uniform(k, flat.size) @ flat) for k in range(3))]


def main() -> None:
    import torch
    import transformers

    source = f"transformers {transformers.__version__}, torch {torch.__version__}"
    rounded = json.loads(
        json.dumps({name: computed(case) for name, case in CASES.items()}),
        parse_float=lambda text: float(f"{float(text):.7g}"),
    )
    text = json.dumps({"source": source, "cases": rounded})
    FILE.write_text(text.replace('}, "', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
