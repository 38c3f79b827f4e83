"""deploy/apptainer: what its image copies exists; its fleetrun passes words and exit codes on."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "apptainer"
DEFINITION = (FOLDER / "train.def").read_text(encoding="utf-8")
# In place of apptainer: prints its words, one a line, and ends as a run that was stopped.
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "$@"\nexit 75\n'


def section(name: str) -> str:
    match = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL)
    assert match is not None, name
    return match[1]


def run_fleetrun(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    program = folder / "apptainer"
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [FOLDER / "fleetrun", "--ips", "a,b", "tools/train.py", "-o", "a=[1, 2]"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_what_is_copied_exists_and_is_what_docker_copies():
    rows = [row.split() for row in section("files").strip().splitlines()]
    assert rows and all((ROOT / source).exists() for source, _ in rows)
    assert all(target == f"/build/{Path(source).name}" for source, target in rows)
    docker = (ROOT / "deploy" / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    assert all(source in docker for source, _ in rows)


def test_python_and_paddle_are_those_of_docker():
    docker = (ROOT / "deploy" / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    arguments = dict(row.strip().split("=", 1) for row in section("arguments").split())
    arguments["paddle"] = arguments["paddle"].rpartition("==")[2]
    assert f"ARG PADDLE_VERSION={arguments['paddle']}" in docker
    assert f"ARG PADDLE_INDEX={arguments['index']}" in docker
    (python,) = re.findall(r"^From: python:(.+)$", DEFINITION, re.MULTILINE)
    assert f"ARG PYTHON_TAG={python}" in docker
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION)) == set(arguments)


def test_fleetrun_of_the_image_gets_the_words_and_gives_its_exit_code(tmp_path):
    ended = run_fleetrun(tmp_path, IMAGE="x.sif", BIND="/data")
    assert ended.returncode == 75
    words = ended.stdout.splitlines()
    assert words[:2] == ["exec", "--nv"] and words[words.index("--bind") + 1] == f"{tmp_path},/data"
    place = words.index("x.sif")
    assert words[place + 1 :] == ["fleetrun", "--ips", "a,b", "tools/train.py", "-o", "a=[1, 2]"]
    assert "--nv" not in run_fleetrun(tmp_path, IMAGE="x.sif", NVIDIA="0").stdout


def test_missing_image_is_an_error(tmp_path):
    assert run_fleetrun(tmp_path).returncode not in (0, 75)
