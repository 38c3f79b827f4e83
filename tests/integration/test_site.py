"""The documentation as a site: every page is there, and every link leads somewhere."""

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.forked import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    texts = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/dev/*.md")]
    pages = {path.stem for path in tmp_path.rglob("*.html")}
    assert {text.stem for text in texts} - {"README"} <= pages
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'href="[^"]*\.md[#"]', first) and 'href="start.html"' in first
    assert (tmp_path / "deploy" / "serving" / "index.html").is_file()
