"""Wheels and the sdist hold the licence, and the sdist what its tests read."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_wheel_of_the_predictor_has_the_licence_of_the_repository(name: str) -> None:
    copy = ROOT / "deploy" / "python" / name
    assert copy.read_bytes() == (ROOT / name).read_bytes()
    for file in ("setup.py", "deploy/python/pyproject.toml"):
        assert f'"{name}"' in (ROOT / file).read_text(encoding="utf-8")


def test_sdist_holds_what_its_tests_read() -> None:
    rows = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    folders = {"tests", "tools", "deploy", "docs", "examples", "benchmarks", "configs"}
    assert folders <= set(rows) and {"Makefile", "mkdocs.yml"} <= set(rows)
