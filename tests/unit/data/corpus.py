"""Small sets on disk that have every defect of annotations.KINDS, each in a place that is known."""

import json
import re
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from ppdist.config.data import DataConfig, SplitConfig
from tests.unit.data.sets import voc_xml

SIZE = 64, 48  # width, height of nearly all images
NAMES = ("cat", "dog", "bird")


def picture(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """uint8 RGB, another for every number."""
    noise = np.random.RandomState(number).randint(0, 256, (size[1], size[0], 3))
    return cv2.GaussianBlur(noise.astype(np.uint8), (0, 0), 2)


def write_picture(file: Path, number: int, mode: str = "RGB", **options: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(number)).convert(mode).save(file, **options)
    return file


def mutated(content: bytes, rng: np.random.RandomState, tokens: tuple[bytes, ...] = ()) -> bytes:
    """Words replaced by odd ones; or bytes flipped, left out, doubled; or the end missing."""
    if tokens and rng.rand() < 0.6:  # one or two words replaced: the file keeps its shape
        for _ in range(rng.randint(1, 3)):
            words = [*re.finditer(rb"[\w.-]+", content)]
            start, end = words[rng.randint(len(words))].span()
            content = content[:start] + tokens[rng.randint(len(tokens))] + content[end:]
        return content
    result = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        if len(result) < 4:
            break
        place = rng.randint(min(len(result), int(rng.choice([64, 10**9]))))
        change = rng.randint(6)
        if change == 0:
            result[place] ^= 1 << rng.randint(8)
        elif change == 1:
            result[place] = rng.choice([0, 127, 128, 255])
        elif change == 2:
            del result[place : place + rng.randint(1, 20)]
        elif change == 3:
            start = rng.randint(len(result))
            result[place:place] = result[start : start + rng.randint(1, 60)]
        elif change == 4 and tokens:
            result[place : place + rng.randint(3)] = tokens[rng.randint(len(tokens))]
        elif change == 5 and rng.rand() < 0.3:
            del result[place:]
    return bytes(result)


def exif(orientation: int) -> Image.Exif:
    result = Image.Exif()
    result[0x0112] = orientation
    return result


def lying_png() -> bytes:
    """100 bytes whose last chunk claims 4 GB: OpenCV 5.0 asks for them."""
    start = b"\x89PNG\r\n\x1a\n"
    header = b"IHDR" + struct.pack(">IIBBBBB", 32, 24, 8, 2, 0, 0, 0)
    first = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return start + first + struct.pack(">I", 0xFF000000) + b"IDAT" + bytes(60)


def hollow_jpeg(whole: bytes) -> bytes:
    """A JPEG with a hole amid its pixels, its end in place."""
    middle = len(whole) * 2 // 3
    return whole[:middle] + bytes(len(whole) // 5) + whole[middle + len(whole) // 5 :]


def write_images(folder: Path) -> dict[str, str]:
    """Writes an image for each kind that is about the file; name -> kind ("" for a good one)."""
    kinds = {}

    def add(name: str, kind: str, number: int, mode: str = "RGB", **options: object) -> Path:
        kinds[name] = kind
        return write_picture(folder / name, number, mode, **options)

    for number in range(6):
        add(f"good{number}.jpg", "", number, quality=90)
    add("empty.jpg", "image_empty", 0).write_bytes(b"")
    add("text.jpg", "image_unreadable", 0).write_text("no image at all")
    for number, suffix in enumerate(("jpg", "png", "bmp", "webp"), 10):
        file = add(f"cut_{suffix}.{suffix}", "image_truncated", number)
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    add("lying.png", "image_truncated", 0).write_bytes(lying_png())
    add("renamed.jpg", "wrong_extension", 20, format="PNG")
    add("turned.jpg", "exif_orientation", 21, exif=exif(6))
    add("grey.jpg", "grey", 22, "L")
    add("alpha.png", "alpha", 23, "RGBA")
    add("cmyk.jpg", "cmyk", 24, "CMYK")
    cv2.imwrite(str(add("deep.png", "sixteen_bit", 25)), picture(25).astype(np.uint16) * 257)
    add("other_size.jpg", "size_mismatch", 26)
    add("copy.jpg", "image_duplicate", 0).write_bytes((folder / "good0.jpg").read_bytes())
    kinds["absent.jpg"] = "image_missing"
    return kinds


def write_dirty_coco(root: Path) -> DataConfig:
    """Every defect that COCO can have; the validation split is clean but for what it shares."""
    names = write_images(root / "images")
    write_picture(root / "images" / "val.jpg", 40)
    write_picture(root / "images" / "unlisted.jpg", 41)
    write_picture(root / "images" / "lost.jpg", 42)
    write_picture(root / "images" / "no_size.jpg", 43)
    (root / "images" / "leak.jpg").write_bytes((root / "images" / "val.jpg").read_bytes())
    images = [
        {"id": number, "file_name": name, "width": SIZE[0], "height": SIZE[1]}
        for number, name in enumerate([*names, "leak.jpg", "lost.jpg"], 1)
    ]
    id_of = {image["file_name"]: image["id"] for image in images}
    images[id_of["turned.jpg"] - 1] |= {"width": SIZE[1], "height": SIZE[0]}
    images[id_of["other_size.jpg"] - 1] |= {"width": 50, "height": 50}
    images += [
        {"id": 1, "file_name": "good1.jpg", "width": 64, "height": 48},  # image_id_duplicate
        {"id": 100, "file_name": "good1.jpg", "width": 64, "height": 48},  # image_listed_twice
        {"id": 101, "file_name": "no_size.jpg", "width": 0, "height": 48},  # size_missing
        {"id": 102, "file_name": "../../out.jpg", "width": 64, "height": 48},  # path_outside
    ]
    good = id_of["good2.jpg"]
    bad_boxes = [
        [float("nan"), 1, 5, 5],
        [3, 3, 0, 0],
        [20, 20, -10, -10],
        [100, 100, 5, 5],
        [60, 40, 30, 30],
        [1, 2, "three", 4],  # annotation_line
    ]
    annotations = [
        {"image_id": image["id"], "category_id": 1, "bbox": [1, 2, 20, 20]}
        for image in images
        if image["file_name"] not in ("good5.jpg", "lost.jpg") and image["id"] < 100
    ]
    annotations += [{"image_id": good, "category_id": 4, "bbox": box} for box in bad_boxes]
    annotations += [{"image_id": good, "category_id": 4, "bbox": [5, 5, 7, 7]}] * 2
    annotations += [{"image_id": 101, "category_id": 4, "bbox": [5, 5, 7, 7]}]
    lost = id_of["lost.jpg"]  # image_objects_lost
    annotations += [{"image_id": lost, "category_id": 99, "bbox": [5, 5, 7, 7]}]
    odd = [{"area": "large"}, {"segmentation": [[1, 2, 3]]}]  # area_invalid, outline_malformed
    annotations += [
        {"image_id": good, "category_id": 4, "bbox": [9, 9, n, n]} | part
        for n, part in enumerate(odd, 4)
    ]
    annotations += [{"image_id": 999, "category_id": 1, "bbox": [5, 5, 7, 7]}]
    annotations = [entry | {"id": number} for number, entry in enumerate(annotations, 1)]
    annotations[1]["id"] = annotations[0]["id"]
    categories = [{"id": id, "name": name} for id, name in zip((1, 4, 7), NAMES)]
    train = {"images": images, "annotations": annotations, "categories": categories}
    text = json.dumps(train, indent=1).replace("\n", "\r\n")
    (root / "train.json").write_bytes(text.encode())
    val = {
        "images": [{"id": 1, "file_name": "val.jpg", "width": 64, "height": 48}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 20, 20]}],
        "categories": categories,
    }
    (root / "val.json").write_text(json.dumps(val), encoding="utf-8")
    return config(root, "coco", "train.json", "val.json")


def write_dirty_voc(root: Path) -> DataConfig:
    """What only files of one image each can have: a missing one, a malformed one, GBK text, and no
    size."""
    for number in range(5):
        write_picture(root / "images" / f"{number}.jpg", number)
    entry = voc_xml("{0}.jpg", [("{1}", (1, 2, 20, 30))])
    folder = root / "Annotations"
    folder.mkdir()
    (folder / "0.xml").write_text(entry.format(0, "cat"), encoding="utf-8")
    (folder / "1.xml").write_text(entry.format(1, "cat")[:-30], encoding="utf-8")
    (folder / "2.xml").write_bytes(entry.format(2, "血小板").encode("gbk"))
    (folder / "4.xml").write_text(entry.format(4, "cat").replace(">64<", "><"), encoding="utf-8")
    (root / "train.txt").write_text("0\n1\n2\n4\nabsent\n", encoding="utf-8")
    (root / "val.txt").write_text("0\n", encoding="utf-8")
    return config(root, "voc", "train.txt", "val.txt")


def write_dirty_yolo(root: Path) -> DataConfig:
    """What only a folder of labels can have: one of no image, one of two, one of an AVIF."""
    for split, names in (("train", ("a.jpg", "a.png", "b.jpg")), ("val", ("c.jpg",))):
        (root / "labels" / split).mkdir(parents=True)
        for name in names:
            write_picture(root / "images" / split / name, sum(map(ord, name)))
            label = root / "labels" / split / Path(name).with_suffix(".txt")
            label.write_text("0 0.5 0.5 0.25 0.25\n")
    for name in ("orphan", "new"):
        (root / "labels" / "train" / f"{name}.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    (root / "images" / "train" / "new.avif").write_bytes(b"AVIF")
    splits = {
        split: SplitConfig(images=f"images/{split}", annotations=f"labels/{split}")
        for split in ("train", "val")
    }
    return DataConfig(format="yolo", root=str(root), class_names=("cat",), **splits)


def write_clean_coco(root: Path) -> DataConfig:
    """Two good images in training, one in validation."""
    categories = [{"id": 1, "name": "cat"}]
    for split, numbers in (("train", (0, 1)), ("val", (2,))):
        names = [write_picture(root / "images" / f"{n}.jpg", n).name for n in numbers]
        content = {
            "images": [
                {"id": n, "file_name": name, "width": 64, "height": 48}
                for n, name in enumerate(names)
            ],
            "annotations": [
                {"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 20, 20]}
                for n in range(len(names))
            ],
            "categories": categories,
        }
        (root / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return config(root, "coco", "train.json", "val.json")


def config(root: Path, form: str, train: str, val: str, **changes: object) -> DataConfig:
    splits = {"train": SplitConfig(annotations=train), "val": SplitConfig(annotations=val)}
    return DataConfig(format=form, root=str(root), **splits, **changes)
