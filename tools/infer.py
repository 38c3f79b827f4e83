"""Finds objects in images and videos: tools/infer.py -c cfg.yml -w WEIGHTS --source X --out DIR

With `--model DIR` instead of -c and -w an exported model runs in Paddle Inference; both give the
same boxes.  DIR gets every picture with its boxes drawn, and detections.json: a COCO data set of
what was found (`annotations` is also a COCO result list).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppdist import errors

if TYPE_CHECKING:
    import numpy as np

    from ppdist.inference import InferenceSpec, Predictor
    from ppdist.pictures import Frame


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--config", help="YAML file of the experiment")
    parser.add_argument("-w", "--weights", help="weight file or checkpoint")
    parser.add_argument("-o", "--override", nargs="+", action="extend", default=[],
                        metavar="KEY=VALUE", help="overrides of config keys")  # fmt: skip
    parser.add_argument("--model", type=Path, metavar="DIR",
                        help="an exported model, instead of -c and -w")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of --model")
    parser.add_argument("--source", required=True, type=Path, metavar="IMAGE|DIR|VIDEO",
                        help="what to look at; a folder is searched to its depth")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--threshold", type=float, default=0.5,
                        help="lowest score drawn and written, 0..1 (default: 0.5)")  # fmt: skip
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.pictures import find_sources

    if not 0 <= arguments.threshold <= 1:
        raise errors.ConfigError(f"--threshold {arguments.threshold:g}: expected 0..1")
    root = arguments.source if arguments.source.is_dir() else arguments.source.parent
    if arguments.out.resolve() == root.resolve():
        raise errors.ConfigError(
            f"--out {arguments.out}: the pictures of --source are there and would be overwritten; "
            "choose another folder"
        )
    sources = find_sources(arguments.source, leave_out=arguments.out)
    predict, spec = load(arguments)
    report = Report(arguments.out, arguments.threshold, spec)
    for file in sources:
        report.look_at(file, str(file.relative_to(root)), predict)
    if report.unreadable:
        warn(f"{report.unreadable} of {len(sources)} files could not be read")
    if not report.images:
        raise errors.DataError(f"{arguments.source}: no image or video there could be read")
    print(
        f"{len(report.annotations)} objects in {len(report.images)} images; "
        f"pictures and detections.json in {report.write()}"
    )
    return 0


def load(arguments: argparse.Namespace) -> "tuple[Predictor, InferenceSpec]":
    """The model to ask, and how to prepare its input."""
    if arguments.model is not None:
        if arguments.config or arguments.weights or arguments.override:
            raise errors.ConfigError(
                "--model takes everything from its infer.yml; leave out -c, -w and -o"
            )
        from ppdist.inference import PaddlePredictor, usable_device

        exported = PaddlePredictor(
            arguments.model, threads=arguments.threads, device=usable_device()
        )
        return exported, exported.spec
    if not arguments.config or not arguments.weights:
        raise errors.ConfigError("give -c CONFIG and -w WEIGHTS, or --model DIR (an export)")
    from ppdist import dist
    from ppdist.config import load_config
    from ppdist.engine.experiment import build_model
    from ppdist.inference import EagerPredictor, describe, load_all_weights, validation_set

    config = load_config(arguments.config, arguments.override)
    dist.init(config.device, config.distributed)
    model = build_model(config)
    load_all_weights(model, Path(arguments.weights))
    model.fuse()
    return EagerPredictor(model, config.nms), describe(config, validation_set(config, warn))


class Report:
    """What was found so far, and the pictures of it."""

    def __init__(self, out: Path, threshold: float, spec: "InferenceSpec") -> None:
        self.out, self.threshold, self.spec = out, threshold, spec
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.unreadable = 0

    def look_at(self, file: Path, name: str, predict: "Predictor") -> None:
        """Predicts one image or every frame of a video, and writes it with its boxes."""
        from ppdist.drawing import draw_boxes
        from ppdist.inference import detect
        from ppdist.pictures import PictureWriter, frames_of

        before = len(self.annotations), len(self.images)
        with PictureWriter(file, self.out / name) as writer:
            for frame in frames_of(file, name, self._complain):
                rows_R6 = detect(predict, frame.image_HW3, self.spec.input.size)
                rows_R6 = rows_R6[rows_R6[:, 1] >= self.threshold]
                self._note(frame, rows_R6)
                writer.write(
                    draw_boxes(
                        frame.image_HW3,
                        rows_R6[:, 2:],
                        rows_R6[:, 0].astype(int),
                        self.spec.class_names,
                        rows_R6[:, 1],
                    )
                )
        frames = len(self.images) - before[1]
        if frames:
            what = f" in {frames} frames" if frames > 1 else ""
            print(f"{name}: {len(self.annotations) - before[0]} objects{what}")

    def _complain(self, reason: str) -> None:
        self.unreadable += 1
        warn(f"{reason}; skipped")

    def _note(self, frame: "Frame", rows_R6: "np.ndarray") -> None:
        height, width = frame.image_HW3.shape[:2]
        image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
        if frame.index is not None:
            image["frame"] = frame.index
        self.images.append({**image, "width": width, "height": height})
        for label, score, x1, y1, x2, y2 in rows_R6.tolist():
            self.annotations.append(
                {
                    "id": len(self.annotations) + 1,
                    "image_id": image["id"],
                    "category_id": self.spec.category_ids[int(label)],
                    "bbox": [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)],
                    "area": round((x2 - x1) * (y2 - y1), 2),
                    "iscrowd": 0,
                    "score": round(score, 5),
                }
            )

    def write(self) -> Path:
        pairs = zip(self.spec.category_ids, self.spec.class_names)
        content = {
            "images": self.images,
            "annotations": self.annotations,
            "categories": [{"id": number, "name": name} for number, name in pairs],
        }
        (self.out / "detections.json").write_text(
            json.dumps(content, ensure_ascii=False), encoding="utf-8"
        )
        return self.out


def warn(text: str) -> None:
    print(f"ppdist: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    errors.run(main)
