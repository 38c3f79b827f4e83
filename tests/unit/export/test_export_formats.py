"""What `ppdist export` is asked for, before anything is exported."""

import argparse
import re
from pathlib import Path

import pytest

from ppdist.cli import folder_for
from ppdist.cli.export import ROADS, formats_of
from tests.errors import raises
from tests.forked import ROOT


def asked(form: str) -> argparse.Namespace:
    return argparse.Namespace(
        format=form, int8=False, calibration=None, int8_loss=None, weights="run"
    )


@pytest.mark.parametrize("form", [name for names in ROADS for name in names])
def test_a_format_of_others_is_told_its_road_from_onnx(form: str) -> None:
    with raises("format_of_others"):
        formats_of(asked(f"onnx,{form}"))


def test_every_road_stands_in_the_table_for_users() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## Other formats")
    for _, made_by in ROADS.values():
        for word in re.findall(r"[\w-]+(?:\.[\w-]+)?", made_by):
            assert word in table or word in ("and", "then"), word


def test_an_unknown_format_is_still_unknown() -> None:
    with raises("option_invalid"):
        formats_of(asked("onnxx"))


@pytest.mark.parametrize(
    ("weights", "folder"),
    [
        ("run", "run/export"),
        ("run/checkpoints/best", "run/export"),
        ("run/exported", "run/export"),  # an export in it, which `predict` reads
        ("soup.pdparams", "output/soup_export"),
        ("yolov5n_coco", "output/yolov5n_coco_export"),
    ],
)
def test_an_export_goes_into_its_run(
    weights: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best = Path("run/checkpoints/best")
    best.mkdir(parents=True)
    (best / "manifest.json").write_text("{}")
    assert folder_for(Path(weights), "export") == Path(folder)
