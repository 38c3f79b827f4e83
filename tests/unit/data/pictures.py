"""Noise as pixels, and as a JPEG with its orientation."""

import io

import numpy as np
from PIL import Image


def picture(height=48, width=64, seed=0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)


def jpeg(image_HW3, **options) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image_HW3).save(content, "JPEG", quality=95, **options)
    return content.getvalue()


def exif(orientation: int, thumbnail: bytes = b"") -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes() + thumbnail
