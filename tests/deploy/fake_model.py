"""A model without a runtime for tests of the server; fake_model.py PORT SECONDS serves it."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

SERVING = Path(__file__).resolve().parents[2] / "deploy" / "serving"
GREY, RED = (114, 114, 114), (255, 0, 0)
BOX = (30, 20, 70, 50)  # xyxy of the red rectangle


class FakeModel:
    """Finds the red rectangle of an image (class 0, 0.9), and always a faint one (class 1, 0.3)."""

    def __init__(self, task: str = "detect", seconds: float = 0.0) -> None:
        names = ["thing", "faint"]
        size = {"size": [64, 96]}
        self.spec: dict[str, Any] = {
            "task": task, "input": size, "class_names": names, "category_ids": [1, 7],
            "best_f1_threshold": 0.5,
        }  # fmt: skip
        self.identity = {"name": "fake", "sha256": "ab" * 32}
        self.seconds = seconds
        self.warm: list[int] = []  # sizes of the warm-up's batches
        self.batches: list[int] = []  # of those after it

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        is_warm_up = all(image.shape == (64, 96, 3) and (image == 114).all() for image in images)
        if is_warm_up:
            self.warm.append(len(images))
        else:
            self.batches.append(len(images))
            time.sleep(self.seconds)
        if any(image.shape[:2] == (13, 13) for image in images):
            raise ValueError("13 x 13 brings bad luck")
        if any(image.shape[:2] == (17, 17) for image in images):
            raise RuntimeError("the runtime broke")
        if self.spec["task"] == "classify":
            return [np.array([0.25, 0.75], np.float32) for _ in images]
        return [rows(image) for image in images]


def rows(image_HW3: np.ndarray) -> np.ndarray:
    red_HW = (image_HW3[..., 0].astype(int) - image_HW3[..., 1]) > 100
    y, x = np.nonzero(red_HW)
    found = [[1, 0.3, 1, 1, 9, 9]]
    if len(x):
        found.insert(0, [0, 0.9, x.min(), y.min(), x.max() + 1, y.max() + 1])
    return np.array(found, np.float32)


def picture(width: int = 120, height: int = 80, seed: int | None = None) -> np.ndarray:
    """uint8 RGB with a red rectangle at BOX; a seed adds noise that no compression removes."""
    image_HW3 = np.full((height, width, 3), GREY, np.uint8)
    if seed is not None:
        noise = np.random.default_rng(seed).integers(0, 60, image_HW3.shape)
        image_HW3 = (image_HW3 + noise).astype(np.uint8)
    image_HW3[BOX[1] : BOX[3], BOX[0] : BOX[2]] = RED
    return image_HW3


def encoded(image_HW3: np.ndarray, suffix: str = ".png") -> bytes:
    lossless = [cv2.IMWRITE_WEBP_QUALITY, 101] if suffix == ".webp" else []
    return cv2.imencode(suffix, image_HW3[..., ::-1], lossless)[1].tobytes()


if __name__ == "__main__":
    sys.path.insert(0, str(SERVING))
    from server import Limits, leave, serve

    port, seconds = int(sys.argv[1]), float(sys.argv[2])
    token = sys.argv[3] if len(sys.argv) > 3 else None
    leave(serve(lambda: FakeModel(seconds=seconds), Limits(), "127.0.0.1", port, token))
