"""What `tests.faults.fuzz` tries: sound files, how they are changed, who reads them."""

import hashlib
import io
import json
import pickle
import pickletools
import re
import socket
import struct
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import DataError
from ppdist.common.files import digest_of_file
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.experiment import ExperimentConfig, load_config
from ppdist.config.parse import dump_yaml
from ppdist.data.checks.images import check_image
from ppdist.data.datasets.annotations import to_detection_set
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.image import read_header, read_image
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.export.spec import describe, read_spec, write_spec
from ppdist.launch.connection import OTHER_PROGRAM, OTHER_TOKEN, Connection
from ppdist.launch.control_channel import HostEnd
from ppdist.launch.handshake import Handshake, differences, read_handshake
from ppdist.models.weights import read_arrays, write_arrays
from ppdist.runtime.decoder import PNG, png_chunks
from tests.deploy.python_folder import predictor
from tests.faults.fuzz import CANARY, Files, Target
from tests.unit.data.pictures import broken_animation, picture, png_chunk
from tests.unit.models.torch_lookalikes import FakeTorch

Rng = np.random.Generator
ROOT = Path(__file__).resolve().parents[2]


# --- changes -------------------------------------------------------------------------------------

_ODD_BYTES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)
_LARGE = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\1",
          b"\0\x70\0\x70", b"\x70\0\x70\0", b"\0\0\x70\0\0\0\x70\0")  # fmt: skip
# In place of a value of JSON or YAML; the last are of the kinds that readers look for.
_ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, -1e-308, float("nan"), float("inf"), "", " ",
    "\0", "\ud800", "é" * 300, "../../../etc/passwd", "/dev/zero", "a" * 5000, [], {}, [[]], [None],
    [1, 2, 3, 4], {"a": 1}, "1", "nan", 0.5, "cat",
)  # fmt: skip


def one(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[rng.integers(len(choices))]


def changed(rng: Rng, content: bytes, words: Sequence[bytes] = ()) -> bytes:
    """Up to six bytes, numbers, words or pieces are others, or its end is missing."""
    if words and rng.random() < 0.6:
        return _other_words(rng, content, words)
    result = bytearray(content)
    for _ in range(rng.integers(1, 7)):
        if len(result) < 4:
            break
        at = int(rng.integers(min(len(result), 200) if rng.random() < 0.6 else len(result)))
        what = rng.integers(8)
        if what < 2:
            result[at] = one(rng, _ODD_BYTES) if rng.random() < 0.5 else rng.integers(256)
        elif what == 2:
            result[at] ^= 1 << rng.integers(8)
        elif what == 3:
            number = one(rng, _LARGE)
            result[at : at + len(number)] = number
        elif what == 4:
            start = int(rng.integers(len(result)))
            result[at:at] = result[start : start + int(rng.integers(60))]
        elif what == 5:
            del result[at : at + int(rng.integers(1, 20))]
        elif what == 6 and words:
            result[at : at + int(rng.integers(3))] = one(rng, words)
        elif rng.random() < 0.3:
            del result[at:]
    return bytes(result)


def _other_words(rng: Rng, content: bytes, words: Sequence[bytes]) -> bytes:
    for _ in range(rng.integers(1, 4)):
        spans = [each.span() for each in re.finditer(rb"[^\s\"'<>,:{}\[\]=]+", content)]
        if spans:
            start, end = one(rng, spans)
            content = content[:start] + one(rng, words) + content[end:]
    return content


def changed_value(rng: Rng, value: Any) -> Any:
    """One value in what JSON can hold is another, missing, doubled or called otherwise."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = one(rng, [*value])
        what = rng.random()
        if what < 0.1:
            return {name: part for name, part in value.items() if name != key}
        if what < 0.15:
            odd = str(one(rng, _ODD_VALUES))
            return {odd if name == key else name: part for name, part in value.items()}
        return {**value, key: changed_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = int(rng.integers(len(value)))
        what = rng.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return value[:at] + [value[at]] * int(rng.integers(2, 4)) + value[at + 1 :]
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.3:
        return value * one(rng, (-1, 0, 0.5, 2, 1000, 10**12))
    return one(rng, _ODD_VALUES)


def changed_json(rng: Rng, content: bytes, words: Sequence[bytes] = ()) -> bytes:
    if rng.random() < 0.3:
        return changed(rng, content, words)
    value = json.loads(content)
    for _ in range(rng.integers(1, 4)):
        value = changed_value(rng, value)
    text = json.dumps(value, ensure_ascii=bool(rng.integers(2)))
    return text.encode(errors="surrogatepass")


# --- images --------------------------------------------------------------------------------------

SIZE = (12, 16)


def encoded(mode: str, kind: str, **options: Any) -> bytes:
    image = Image.fromarray(picture(*SIZE))
    if mode == "I;16":
        image = Image.fromarray(picture(*SIZE)[:, :, 0].astype(np.uint16) * 257)
    file = io.BytesIO()
    (image if mode == "I;16" else image.convert(mode)).save(file, kind, **options)
    return file.getvalue()


def animated(kind: str, **options: Any) -> bytes:
    frames = [Image.fromarray(picture(*SIZE, seed=seed)) for seed in range(3)]
    file = io.BytesIO()
    options |= {"save_all": True, "append_images": frames[1:], "duration": 50}
    frames[0].save(file, kind, **options)
    return file.getvalue()


def by_opencv(suffix: str, kind: type = np.uint8, size: tuple[int, int] = SIZE) -> list[bytes]:
    """Nothing where this build of OpenCV does not write it."""
    try:
        done, content = cv2.imencode(suffix, picture(*size).astype(kind))
    except cv2.error:
        return []
    return [content.tobytes()] if done else []


def masked_bmps() -> list[bytes]:
    made = []
    for header, bits, packing in ((40, 32, 3), (40, 16, 6), (56, 16, 3), (124, 32, 3)):
        masks = (0xFF, 0xFF00, 0xFF0000, 0) if bits == 32 else (0xF800, 0x7E0, 0x1F, 0)
        size = SIZE[0] * SIZE[1] * bits // 8
        head = struct.pack("<IiiHHIIiiII", header, *SIZE[::-1], 1, bits, packing, size, 0, 0, 0, 0)
        head = (head + struct.pack("<4I", *masks)).ljust(header, b"\0")
        start = 14 + len(head)
        made.append(b"BM" + struct.pack("<IHHI", start + size, 0, 0, start) + head + bytes(size))
    return made


@cache
def images() -> dict[str, list[bytes]]:
    """Some of each kind, by the ending of a file."""
    packings = (None, "tiff_lzw", "packbits", "tiff_adobe_deflate")
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "png": [encoded(mode, "PNG") for mode in ("RGB", "RGBA", "L", "P", "1", "I;16")]
        + [encoded("RGB", "PNG", exif=exif)],
        "apng": [animated("PNG"), animated("PNG", default_image=True), broken_animation()],
        "jpg": [
            encoded(mode, "JPEG", progressive=progressive, exif=exif)
            for mode in ("RGB", "L", "CMYK")
            for progressive in (False, True)
        ],
        "webp": [encoded("RGBA", "WEBP", lossless=on) for on in (False, True)] + [animated("WEBP")],
        "tif": [
            encoded(mode, "TIFF", compression=packing)
            for mode in ("RGB", "RGBA", "L", "1", "I;16")
            for packing in packings
        ]
        + [encoded("RGB", "TIFF", compression="jpeg")],
        "bmp": [encoded(mode, "BMP") for mode in ("RGB", "RGBA", "L", "P", "1")] + masked_bmps(),
        # Named like an image that is read: what OpenCV knows besides.
        "gif": [encoded("P", "GIF"), animated("GIF"), *by_opencv(".gif")],
        "avif": by_opencv(".avif"),
        "others": [
            *by_opencv(".ppm"), *by_opencv(".ras"), *by_opencv(".pam"),
            *by_opencv(".jp2", size=(64, 64)),
            *by_opencv(".pfm", np.float32), *by_opencv(".hdr", np.float32),
        ],
    }  # fmt: skip


def changed_png(rng: Rng, content: bytes) -> bytes:
    """Chunks are changed within, doubled or left out; their sums are right."""
    chunks = [
        (content[start + 4 : start + 8], content[start + 8 : end - 4])
        for _, start, end in png_chunks(content)
    ]
    for _ in range(rng.integers(1, 5)):
        at, what = int(rng.integers(len(chunks))), rng.integers(6)
        kind, data = chunks[at]
        if what == 0 and len(chunks) > 3:
            chunks.pop(at)
        elif what == 1:
            chunks.insert(int(rng.integers(1, len(chunks))), (kind, data))
        elif what == 2 and kind in (b"IDAT", b"fdAT"):
            rows = rng.bytes(int(1 + rng.integers(600)))  # filters that there are not, too
            chunks[at] = (kind, data[: 4 * (kind == b"fdAT")] + zlib.compress(rows))
        elif data:
            place = int(rng.integers(len(data)))
            byte = bytes([one(rng, (*_ODD_BYTES, int(rng.integers(256))))])
            chunks[at] = (kind, data[:place] + byte + data[place + 1 :])
    return PNG + b"".join(png_chunk(kind, data) for kind, data in chunks)


def make_image(rng: Rng) -> Files:
    kinds = images()
    kind = one(rng, [kind for kind in kinds if kinds[kind]])
    content = one(rng, kinds[kind])
    by_chunks = content.startswith(PNG) and rng.random() < 0.7
    content = (changed_png if by_chunks else changed)(rng, content)
    name = {"apng": "png", "gif": "jpg", "avif": "jpg", "others": "png"}.get(kind, kind)
    return {f"{kind}.{name}": content}


def read_an_image(folder: Path, files: Files) -> str:
    cv2.setNumThreads(0)
    (name,) = files
    file = folder / name
    header = read_header(file)
    checked = check_image(str(file), header.upright if header else None, decode=True)
    for reduced in (1, 4):
        image_HW3 = read_image(file, reduced=reduced)
        assert image_HW3.dtype == np.uint8 and image_HW3.ndim == 3 and image_HW3.shape[2] == 3
    assert checked.problem is None or "the decoder filled in" in checked.problem.text, (
        checked.problem
    )
    return f"accepted {file.stem}"


# --- annotations ---------------------------------------------------------------------------------

_ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gbk", "cp1252", "utf-32")
_WORDS = {
    "train.json": (b"NaN", b"null", b"-1", b"[]", b"{}", b'""', b"1e999", b"9" * 25, b"\xff",
                   b'"id"', b'"image_id"', b'"../x.jpg"', b"[" * 3000, b"1" * 5000),
    "Annotations/0.xml": (b"<", b"/>", b"&x;", b"<object>", b"NaN", b"-5", b"1e999", b"\x00",
                          b"\xff", b"<size>", b"<!DOCTYPE a [<!ENTITY x 'y'>]>", b"<a>" * 3000,
                          b"9" * 5000, b"<name>", b"../../x.jpg"),
    "labels/0.txt": (b"nan", b"inf", b"-1", b"\n", b" ", b"1e999", b"7", b"\x00", b"\xff", b"\xa0",
                     b"9" * 5000, b"0.5 " * 2000, b"0x1", b"1_000", "٣".encode()),
    "voc.txt": (b"0", b"-1", b"a b c", b"../0", b"/etc/passwd", b"\0", b"\xff", b"a" * 5000),
    "yolo.txt": (b"0.jpg", b"./images/", b"..", b"/dev/zero", b"\0", b"\xff", b"a" * 5000),
    "data.yaml": (b"nc", b"names", b"[", b"{", b"&a", b"*a", b"!!python/name:os.system", b"\0",
                  b"-", b"9" * 5000, b"null", b"[" * 700, b"\xff", b"1: 2", b"train", b"path"),
    "train.csv": (b",", b'"', b"\n", b"\0", b"cat", b"../x.jpg", b"\xff", b"x" * 200_000),
}  # fmt: skip


@cache
def annotations() -> dict[str, bytes]:
    name = "image 0.jpg"
    coco = {
        "images": [{"id": 3, "file_name": name, "width": 64, "height": 48}],
        "annotations": [
            {"id": number, "image_id": 3, "category_id": number, "bbox": [1, 2, 20, 20],
             "segmentation": [[1, 2, 9, 2, 9, 9]], "iscrowd": 0, "area": 400}
            for number in (1, 2)
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "größe"}],
    }  # fmt: skip
    things = "".join(
        f"<object><name>{word}</name><difficult>0</difficult><bndbox><xmin>1</xmin>"
        "<ymin>2</ymin><xmax>20</xmax><ymax>30</ymax></bndbox></object>"
        for word in ("cat", "größe")
    )
    voc = (
        f"<annotation><filename>{name}</filename><size><width>64</width><height>48</height>"
        f"<depth>3</depth></size>{things}</annotation>"
    )
    yolo = "0 0.5 0.5 0.25 0.25\n1 0.1 0.1 0.3 0.1 0.3 0.4 0.1 0.4\n1 0.2 0.2 0.1 0.1\n"
    return {
        "train.json": json.dumps(coco, ensure_ascii=False).encode(),
        "Annotations/0.xml": voc.encode(),
        "labels/0.txt": yolo.encode(),
        "voc.txt": b"0\n",
        "yolo.txt": b"./images/0.jpg\n",
        "data.yaml": "path: .\ntrain: yolo.txt\nnc: 2\nnames:\n  0: cat\n  1: größe\n".encode(),
        "train.csv": f"path,label\n{name},cat\n{name},größe\n".encode(),
    }


def make_annotation(rng: Rng) -> Files:
    whole = annotations()
    name = one(rng, [*whole])
    content = whole[name]
    if rng.random() < 0.2:
        content = content.decode().encode(one(rng, _ENCODINGS), errors="replace")
        content = changed(rng, content) if rng.random() < 0.7 else content
    else:
        content = (changed_json if name.endswith("json") else changed)(rng, content, _WORDS[name])
    return {**{each: whole[each] for each in _BESIDE.get(name, ())}, name: content}


# What a reader needs besides.
_BESIDE = {
    "Annotations/0.xml": ("voc.txt",), "voc.txt": ("Annotations/0.xml",),
    "labels/0.txt": ("yolo.txt",), "yolo.txt": ("labels/0.txt",),
    "data.yaml": ("labels/0.txt", "yolo.txt"),
}  # fmt: skip


def prepare_annotations(folder: Path) -> None:
    (folder / "images").mkdir()
    for name in ("image 0.jpg", "0.jpg"):
        Image.fromarray(picture(48, 64)).save(folder / "images" / name)


def read_annotation(folder: Path, files: Files) -> str:
    splits = {"train.json": "coco", "train.csv": "csv", "voc.txt": "voc", "yolo.txt": "yolo"}
    split = next(name for name in splits if name in files)
    form = splits[split]
    names = () if form == "coco" or "data.yaml" in files else ("cat", "größe")
    settings = DataConfig(
        format=form, root=str(folder), class_names=names,  # type: ignore[arg-type]
        train=SplitConfig(annotations=split), val=SplitConfig(annotations=split),
    )  # fmt: skip
    found: list[object] = []
    raw = read_raw(settings, "train", found.append)
    if form != "csv":
        to_detection_set(raw, "clip", masks=True)
    try:
        read_split(settings, "train", masks=form != "csv")
    except DataError:  # what the first reading has said of a part
        if not found:
            raise
    return "accepted with issues" if found else "accepted"


# --- configurations ------------------------------------------------------------------------------

_YAML_WORDS = (
    b"!!python/object/apply:os.system ['touch ran']", b"!!python/name:os.system", b"&a [*a]", b"*a",
    b"&a", b"<<: *a", b"null", b"~", b".nan", b".inf", b"1e999", b"-1", b"0x10", b"9" * 2000, b"{}",
    b"[]", b"[" * 500, b"{a: " * 300, b"? ", b"|", b">", b"%YAML 9.9", b"---", b"...", b"\t",
    b"\0", b"\xff", b"\xef\xbb\xbf", "\u2028".encode(), b"_BASE_", b"/dev/zero", b".", b"..",
    b"base.yml", b"config.yml", b"2024-01-01", b"yes", b"'", b'"', b"!!binary aGk=", b"!<x>",
    b"yolov5", b"ppyoloe", b"1", b"0.5", b"true", b"[640, 640]", b"a: b: c", b"=", b"@", b"`",
)  # fmt: skip
_ITEMS = (
    "train.epochs=3", "model.image_size=[320,320]", "data.root=/tmp", "optimizer.base_lr=0.1",
    "model.size=s", "loss.box=1", "data.augment.mosaic=0.5", "distill=null",
    "nms.iou_threshold=0.5", "train.multi_scale=[]", "log.trackers=[tensorboard]",
)  # fmt: skip


@cache
def demo() -> ExperimentConfig:
    return load_config(ROOT / "configs" / "examples" / "demo.yml")


@cache
def configurations() -> list[dict[str, bytes]]:
    """Configurations, each with the files it is built upon side by side."""
    found = []
    for name in ("examples/demo", "examples/bccd_best", "yolov5/yolov5s_300e_coco",
                 "ppyoloe/ppyoloe_plus_s_80e_coco", "yolov5/yolov5s_cls_imagenet"):  # fmt: skip
        files: dict[str, bytes] = {}
        pending = [ROOT / "configs" / f"{name}.yml"]
        while pending:
            path = pending.pop()
            content = path.read_bytes()
            bases = re.findall(rb"[\w./]+\.yml", b"".join(re.findall(rb"_BASE_:.*", content)))
            pending += [path.parent / base.decode() for base in bases]
            lines = [
                re.sub(rb"[\w./]+/(\w+\.yml)", rb"\1", line) if b"_BASE_" in line else line
                for line in content.splitlines()
            ]
            files[path.name if files else "config.yml"] = b"\n".join(lines)
        found.append(files)
    return found


@cache
def specification() -> bytes:
    """The infer.yml of an exported model."""
    with tempfile.TemporaryDirectory() as name:
        write_spec(Path(name), describe(demo(), None))
        return (Path(name) / "infer.yml").read_bytes()


def make_configuration(rng: Rng) -> Files:
    if rng.random() < 0.1:
        return {"infer.yml": changed_json(rng, specification(), _YAML_WORDS)}
    files = dict(one(rng, configurations()))
    if rng.random() < 0.7:
        name = one(rng, [*files])
        files[name] = _changed_yaml(rng, files[name])
    items = [str(item) for item in rng.choice(_ITEMS, rng.integers(4))]
    files["items"] = "\n".join(items).encode()
    if items and rng.random() < 0.8:
        files["items"] = changed(rng, files["items"], _YAML_WORDS)
    return files


def _changed_yaml(rng: Rng, content: bytes) -> bytes:
    if rng.random() < 0.5:
        return changed(rng, content, _YAML_WORDS)
    lines = content.split(b"\n")
    for _ in range(rng.integers(1, 4)):
        at, what = int(rng.integers(len(lines))), rng.integers(5)
        if what == 0:
            del lines[at]
        elif what == 1:
            lines.insert(int(rng.integers(len(lines) + 1)), lines[at])
        elif what == 2:
            lines[at] = b"  " * int(rng.integers(3)) + lines[at].lstrip()
        elif what == 3:
            lines[at] = lines[at].partition(b":")[0] + b": " + one(rng, _YAML_WORDS)
        else:
            lines.insert(at, one(rng, _YAML_WORDS))
        lines = lines or [b""]
    return b"\n".join(lines)


def read_configuration(folder: Path, files: Files) -> str:
    if "infer.yml" in files:
        with suppress(predictor.PredictorError):
            predictor.read_spec(folder)
        read_spec(folder)
        return "accepted"
    items = files["items"].decode(errors="replace").split("\n")
    config = load_config(folder / "config.yml", [item for item in items if item])
    (folder / "again.yml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(folder / "again.yml") == config or ".nan" in dump_yaml(config)
    return "accepted"


# --- weights -------------------------------------------------------------------------------------

_TOUCH = f"touch {CANARY}".encode()
# Opcodes that a reader which runs pickles would run; protocol 0, so that they fit everywhere.
_EVIL = (
    b"cos\nsystem\n(S'" + _TOUCH + b"'\ntR",
    b"(S'" + _TOUCH + b"'\nios\nsystem\n",
    b"(cos\nsystem\nS'" + _TOUCH + b"'\no",
    b"cbuiltins\neval\n(S'open(\"" + CANARY.encode() + b"\",\"w\")'\ntR",
    b"cbuiltins\nexec\n(S'open(\"" + CANARY.encode() + b"\",\"w\")'\ntR",
    b"csubprocess\nPopen\n(S'" + _TOUCH + b"'\ntR",
    b"cnumpy\nload\n(S'x.npy'\ntR", b"ctorch\nload\n(S'x.pt'\ntR", b"cposix\nsystem\n",
    b"ccollections\nOrderedDict\n(tR(S'x'\ntR", b"cbuiltins\nmap\n(cos\nsystem\n(lS'x'\natR",
    b"(dS'_parameters'\n(dsb", b"0", b"(", b"t", b"l", b"d", b"2", b"N", b"I01\n", b"L9" + b"9" * 60
    + b"L\n", b"F1e999\n", b"}", b"]", b")", b"s", b"u", b"a", b"e", b"b", b"Q", b"R", b"\x81",
    b"\x93", b"\x94", b"h\0", b"q\0", b"r\xff\xff\xff\xff", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
)  # fmt: skip


@cache
def weights() -> list[tuple[str, bytes]]:
    """(ending, content) of sound files."""
    rng = np.random.default_rng(0)
    arrays = {
        "a.weight": rng.normal(size=(3, 4)).astype(np.float32),
        "a.bias": np.zeros(3, np.float16), "n": np.array(5, np.int64), "e": np.zeros((0, 2)),
    }  # fmt: skip
    floats = {key: value for key, value in arrays.items() if key != "e"}
    made: list[tuple[str, bytes]] = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for ending in (".pdparams", ".pt", ".safetensors", ".npz"):
            write_arrays(folder / f"w{ending}", arrays)
            made.append((ending, (folder / f"w{ending}").read_bytes()))
        np.savez_compressed(folder / "c.npz", allow_pickle=False, **arrays)
        made.append((".npz", (folder / "c.npz").read_bytes()))
        nested = {"model": {**floats, "StructuredToParameterName@@": {"a": "b"}}, "epoch": 3}
        made += [(".pdparams", pickle.dumps(nested, protocol)) for protocol in (0, 2, 4, 5)]
        floats["a.bias"] = np.zeros(3, np.float32)
        for save in ("save", "save_legacy"):
            for wrapped in (False, True):
                torch = FakeTorch(patch)
                state = {key: torch.tensor(value) for key, value in floats.items()}
                content = {"model": torch.model(floats), "epoch": 1} if wrapped else state
                getattr(torch, save)(folder / "w.pt", content)
                made.append((".pt", (folder / "w.pt").read_bytes()))
    return made


def make_weights(rng: Rng) -> Files:
    ending, content = one(rng, weights())
    if rng.random() < 0.3:
        content = changed(rng, content)
    elif content.startswith(b"PK"):
        content = _changed_zip(rng, content)
    elif ending == ".safetensors":
        content = _changed_safetensors(rng, content)
    else:
        content = _changed_pickles(rng, content)
    return {f"w{ending}": content}


def _changed_pickles(rng: Rng, content: bytes) -> bytes:
    """Operations are left out, doubled, put elsewhere, or are some that would run code."""
    parts, tail = [], content
    with_stream = io.BytesIO(content)
    try:
        while with_stream.tell() < len(content):  # torch's old format: one after the other
            begin = with_stream.tell()
            at = [position for _, _, position in pickletools.genops(with_stream)]
            ends = [*at[1:], with_stream.tell()]
            if at and at[0] == 0 and begin:  # positions from the start of this pickle
                at, ends = [begin + n for n in at], [begin + n for n in ends[:-1]] + [ends[-1]]
            parts += [content[start:end] for start, end in zip(at, ends)]
            tail = content[with_stream.tell() :]
    except Exception:  # the numbers behind them
        pass
    parts = parts or [content]
    for _ in range(rng.integers(1, 4)):
        at_one, what = int(rng.integers(len(parts))), rng.integers(6)
        if what == 0 and len(parts) > 1:
            del parts[at_one]
        elif what == 1:
            parts.insert(at_one, one(rng, parts))
        elif what == 2:
            parts[at_one] = changed(rng, parts[at_one])
        elif what == 3:
            parts[at_one] = one(rng, parts)
        else:
            parts.insert(at_one, one(rng, _EVIL))
    return b"".join(parts) + tail


def _changed_zip(rng: Rng, content: bytes) -> bytes:
    """An entry is changed; its checksum is right."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
        packed = archive.infolist()[0].compress_type
    at = int(rng.integers(len(entries)))
    if rng.random() < 0.5:
        at = next((n for n, (name, _) in enumerate(entries) if name.endswith(".pkl")), at)
    name, data = entries[at]
    what = rng.random()
    if name.endswith(".pkl") and what < 0.8:
        entries[at] = name, _changed_pickles(rng, data)
    elif name.endswith(".npy") and what < 0.6:
        length = int.from_bytes(data[8:10], "little")
        odd = (b"(9999999999,)", b"(-1,)", b"()", b"'|O'", b"'<f8'", b"True", b"'<U9'", b"[", b"x",
               b"(1,)*9**9", b"9" * 4000, b"{'a':1}", b"__import__('os')")  # fmt: skip
        header = _other_words(rng, data[10 : 10 + length], odd)
        entries[at] = name, data[:8] + struct.pack("<H", len(header) & 0xFFFF) + header + (
            data[10 + length :]
        )  # fmt: skip
    elif what < 0.9:
        entries[at] = name, changed(rng, data)
    elif what < 0.95:
        entries.append((one(rng, ("../../x.npy", "/x.npy", "a/data.pkl", name, "\0")), data))
    else:
        entries.pop(at)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packed) as archive:
        for entry, data in entries:
            archive.writestr(zipfile.ZipInfo(entry.partition("\0")[0] or "x"), data, packed)
    return file.getvalue()


def _changed_safetensors(rng: Rng, content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = changed_json(rng, content[8 : 8 + length])
    if rng.random() < 0.1:
        length = one(rng, (0, 1, 2**63 - 1, 2**64 - 1, len(content), len(content) * 2))
        return length.to_bytes(8, "little") + content[8:]
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def read_weights(folder: Path, files: Files) -> str:
    (name,) = files
    for array in read_arrays(folder / name).values():
        array.sum()  # touches every number
    digest_of_file(folder / name)
    return "accepted"


# --- checkpoints ---------------------------------------------------------------------------------


@cache
def checkpoint() -> dict[str, bytes]:
    """The files of one that a run could have written."""
    state = {
        "step": 40, "world": 1, "best": 0.5, "best_step": 20, "bad_steps": 0, "bucket_mb": 32,
        "evaluated_step": 20, "returns": 0, "most_images": None, "code": "a" * 16,
        "total_batch": 8, "scaler": {}, "ema_updates": 40, "class_scores": [0.5, None],
        "standing": {"metric": "mAP", "best": 0.4, "best_step": 20, "in_vain": 1},
        "losses": {"pairs": [[2.0, 2.1]], "summed": 3.0, "steps": 2, "warned": False},
        "run": {"id": "b" * 32, "images": 100, "data": "c" * 16, "schedule_steps": 80,
                "bad_images": {"3": "cut short"}, "teacher": None},
    }  # fmt: skip
    groups = {"model": {"w": np.ones((2, 3), np.float32)}, "ema": {"w": np.ones(2, np.float32)}}
    with tempfile.TemporaryDirectory() as name:
        made = save_checkpoint(Path(name), 40, groups, state, dump_yaml(demo()))
        return {file.name: file.read_bytes() for file in made.iterdir()}


def make_checkpoint(rng: Rng) -> Files:
    files = dict(checkpoint())
    if rng.random() < 0.4:
        files["manifest.json"] = changed_json(rng, files["manifest.json"])
    else:
        name = one(rng, ("state.json", "state.json", "config.yml", "model.safetensors"))
        change = {"state.json": changed_json, "config.yml": _changed_yaml}.get(
            name, _changed_safetensors
        )
        files[name] = change(rng, files[name])
        if rng.random() < 0.8:  # somebody who means harm makes its checksum right
            manifest = json.loads(files["manifest.json"])
            manifest["files"][name]["sha256"] = hashlib.sha256(files[name]).hexdigest()
            files["manifest.json"] = json.dumps(manifest).encode()
    return {f"checkpoints/step-00000040/{name}": data for name, data in files.items()}


def read_a_checkpoint(folder: Path, files: Files) -> str:
    from ppdist.engine.continuation import Continuation
    from ppdist.engine.output_dirs import OutputDirs
    from ppdist.engine.resume import find_start

    config = demo()
    step = folder / "checkpoints" / "step-00000040"
    problems = []
    for read in (
        lambda: read_arrays(folder),
        lambda: find_start(Continuation(step, changed=True), OutputDirs(folder), config),
    ):
        try:
            read()
        except ValueError as error:
            if not hasattr(error, "code"):
                raise
            problems.append(error)
    if problems:
        raise problems[-1]
    return "accepted"


# --- requests ------------------------------------------------------------------------------------


@cache
def requests() -> list[bytes]:
    picture_of = {ending: files[0] for ending, files in images().items() if files}
    made = [
        f"{method} {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        for method, path in (("GET", "/"), ("GET", "/ready"), ("GET", "/health"),
                             ("GET", "/metrics"), ("HEAD", "/"), ("PUT", "/detect"))
    ]  # fmt: skip
    for ending in ("png", "jpg", "webp", "bmp", "gif"):
        body = picture_of[ending]
        made.append(
            b"POST /detect?threshold=0.4 HTTP/1.1\r\nHost: a\r\nContent-Type: image/%b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (ending.encode(), len(body), body)
        )
        form = (
            b'--xYz\r\nContent-Disposition: form-data; name="f"; filename="a.%b"\r\n'
            b"Content-Type: image/%b\r\n\r\n%b\r\n--xYz--\r\n"
            % (ending.encode(), ending.encode(), body)
        )
        made.append(
            b"POST /detect HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer t\r\n"
            b"Content-Type: multipart/form-data; boundary=xYz\r\nContent-Length: %d\r\n\r\n%b"
            % (len(form), form)
        )
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (form[:99], form[99:]))
        made.append(
            b"POST /detect HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: multipart/form-data; boundary=xYz\r\n\r\n" + chunks + b"0\r\n\r\n"
        )
    return made


_HTTP_WORDS = (
    b"POST", b"GET", b"OPTIONS", b"/detect", b"/detect?threshold=nan", b"/detect?threshold=1e999",
    b"/detect?threshold=%ff", b"/../../etc/passwd", b"//", b"http://x/detect", b"*", b"HTTP/1.0",
    b"HTTP/9.9", b"Content-Length: 5", b"Content-Length", b"Transfer-Encoding", b"chunked",
    b"Content-Encoding: gzip", b"Expect: 100-continue", b"Connection: close", b"Upgrade: h2c",
    b"Range: bytes=0-", b"Cookie: " + b"a=b;" * 500, b"-1", b"9" * 40, b"0", b"ffffffffffffffff",
    b"boundary=", b"boundary", b"filename*=utf-8''%ff", b"filename=", b"name=", b"--xYz",
    b"\r\n", b"\n", b"\0", b"\xff", b";" * 2000, b"Content-Disposition:", b"a" * 70_000, b"--xYz--",
    b"X: y\r\n" * 200, b"Bearer", b"\xc3\xa9", b"multipart/form-data", b"application/json", b"{}",
)  # fmt: skip


def make_request(rng: Rng) -> Files:
    request = one(rng, requests())
    head, gap, body = request.partition(b"\r\n\r\n")
    where = rng.random()
    if where < 0.45:
        head = changed(rng, head, _HTTP_WORDS)
    elif where < 0.9:
        body = changed(rng, body, _HTTP_WORDS)
    else:
        return {"request": changed(rng, request, _HTTP_WORDS)}
    if rng.random() < 0.6:  # the length is right, so that the body is looked at
        head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head)
    return {"request": head + gap + body}


_READY = b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n"
_served: dict[str, Any] = {}


def serve(folder: Path) -> None:
    """The service of deploy/serving, with a model that needs no runtime, in a thread."""
    import logging
    import time

    from tests.deploy.fake_model import SERVING, FakeModel
    from tests.ports import free_port

    sys.path.insert(0, str(SERVING))
    import server

    class Errors(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                _served["errors"].append(self.format(record))

    # Half requests are ended by the client; none waits for these bounds.
    limits = server.Limits(most_delay=0.0, seconds=20.0, header_seconds=20.0, decoders=1)
    _served.update(errors=[], port=free_port())
    logging.getLogger().addHandler(Errors(logging.ERROR))
    arguments = (FakeModel, limits, "127.0.0.1", _served["port"])
    threading.Thread(target=server.serve, args=arguments, daemon=True).start()
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).propagate = True
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if b" 200 " in _answer(_READY):
                return
        except OSError:
            pass
        time.sleep(0.01)
    raise RuntimeError("the service never got ready")


def _answer(request: bytes) -> bytes:
    """The first line of what comes back, and the rest until the other end has no more."""
    whole = _is_whole(request)
    with socket.create_connection(("127.0.0.1", _served["port"]), timeout=20) as connection:
        try:
            connection.sendall(request)
            if not whole:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
                head, gap, body = answer.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if gap and (length is None or len(body) >= int(length[1]) or b"HEAD" in request):
                    break
        except (ConnectionResetError, BrokenPipeError):
            return b" closed "
    return answer or b" closed "


def _is_whole(request: bytes) -> bool:
    """Whether an answer comes without a byte more."""
    import httptools

    ended: list[bool] = []
    reader = httptools.HttpRequestParser(
        SimpleNamespace(on_message_complete=lambda: ended.append(True))
    )
    try:
        reader.feed_data(request)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return True
    return bool(ended)


def read_request(folder: Path, files: Files) -> str:
    answer = _answer(files["request"])
    assert b" 200 " in _answer(_READY)  # it lives, and has looked at all that came before
    errors, _served["errors"] = _served["errors"], []
    assert not errors, "\n".join(errors)
    status = answer.split(b" ")[1].decode()
    assert status != "500", answer
    return "accepted" if status in ("200", "100") else f"refused {status}"


# --- the launcher's lines ------------------------------------------------------------------------


@cache
def messages() -> list[bytes]:
    hosts = ("10.0.0.1", "10.0.0.2")
    hello = Handshake(
        host="10.0.0.2", hosts=hosts, processes=2, device="cpu", script="train.py",
        arguments=("-c", "a.yml"), ppdist="1.0", paddle="3.3", names=hosts,
        max_restart=1, skip=(7, 9),
    )  # fmt: skip
    end = HostEnd("10.0.0.2", 1, "rank 1 failed", False, 0.0, 7).as_message("ended", 2.0)
    stop = {"type": "stop", "host": "10.0.0.2", "why": "lost", "signal": 0, "known": 1}
    return [json.dumps(each).encode() for each in (hello.message(), end, stop)]


def make_lines(rng: Rng) -> Files:
    words = (b"{" * 3000, b"[" * 100_000, b"1e999", b"NaN", b"9" * 5000, b"\n", b"\0", b"\xff",
             b'"\\ud800"', b'"type"', b"x" * 300_000)  # fmt: skip
    lines = [one(rng, messages()) for _ in range(rng.integers(1, 4))]
    at = int(rng.integers(len(lines)))
    lines[at] = changed_json(rng, lines[at], words)
    known = b"yes" if rng.random() < 0.8 else b""  # whoever sends them has proven the token
    return {"lines": b"\n".join(lines) + (b"\n" if rng.random() < 0.9 else b""), "known": known}


def read_lines(folder: Path, files: Files) -> str:
    mine = read_handshake(json.loads(messages()[0]))
    assert mine is not None
    ours, theirs = socket.socketpair()
    connection, caller = Connection(ours), Connection(theirs, calls=True)
    content, heard = files["lines"], 0
    if files["known"]:
        for end in (caller, connection, caller):
            end.receive()
        lines = enumerate(content.split(b"\n"))
        content = b"\n".join(caller._mac(True, *line) + b" " + line[1] for line in lines)
    while connection.closed is None:
        try:
            sent = theirs.send(content)
            content = content[sent:]
            if not sent:
                theirs.close()
        except BlockingIOError:
            pass
        except OSError:
            break
        for message in connection.receive():
            heard += 1
            HostEnd.read(message, "10.0.0.2").as_message("ended")
            hello = read_handshake(message)
            if hello is not None:
                json.dumps(differences(mine, hello)).encode()
    theirs.close()
    if connection.closed in (OTHER_PROGRAM, OTHER_TOKEN):
        return "refused foreign"
    return "accepted" if heard else "accepted without a line"


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("images", make_image, read_an_image),
        Target("annotations", make_annotation, read_annotation, prepare_annotations),
        Target("configs", make_configuration, read_configuration),
        Target("weights", make_weights, read_weights),
        Target("checkpoints", make_checkpoint, read_a_checkpoint),
        Target("http", make_request, read_request, serve),
        Target("lines", make_lines, read_lines),
    )
}
