"""What `ppdist export` is asked for, before anything is exported."""

import argparse
import hashlib
import re
from pathlib import Path

import pytest

from ppdist.cli import default_folder
from ppdist.cli.export import CONVERSIONS, formats_of
from ppdist.export.run import read_lineage
from ppdist.export.spec import LineageSection
from tests.errors import raises
from tests.forked import ROOT


def asked(form: str, **options: object) -> argparse.Namespace:
    usual = {"int8": False, "calibration": None, "int8_loss": None, "out": None}
    return argparse.Namespace(format=form, weights="run", **{**usual, **options})


@pytest.mark.parametrize("form", [name for names in CONVERSIONS for name in names])
def test_a_format_of_others_is_told_its_road_from_onnx(form: str) -> None:
    with raises("format_of_others"):
        formats_of(asked(f"onnx,{form}"))


def test_every_road_stands_in_the_table_for_users() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## Which runtime reads which file")
    for _, made_by in CONVERSIONS.values():
        for word in re.findall(r"[\w-]+(?:\.[\w-]+)?", made_by):
            assert word in table or word in ("and", "then"), word


def test_an_unknown_format_is_still_unknown() -> None:
    with raises("option_invalid"):
        formats_of(asked("onnxx"))


def test_an_export_names_its_weights_and_their_run(tmp_path: Path) -> None:
    step = tmp_path / "cells" / "checkpoints" / "step-00000640"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (step.parent / "best").symlink_to(step.name)
    known = hashlib.sha256(b"{}").hexdigest()
    expected = LineageSection(weights=known, run="cells", step=640)
    assert read_lineage(tmp_path / "cells") == expected  # an old run without environment.json
    for unknown in ("{}", "[]", '{"git_commit": null}', "{"):  # of another version, or damaged
        (tmp_path / "cells" / "environment.json").write_text(unknown)
        assert read_lineage(tmp_path / "cells") == expected
    (tmp_path / "cells" / "environment.json").write_text('{"git_commit": "05443bab"}')
    for weights in (tmp_path / "cells", step.parent / "best", step):
        assert read_lineage(weights) == expected.model_copy(update={"commit": "05443bab"})
    (tmp_path / "soup.npz").write_bytes(b"{}")
    assert read_lineage(tmp_path / "soup.npz") == LineageSection(weights=known)


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
    assert default_folder(Path(weights), "export") == Path(folder)
