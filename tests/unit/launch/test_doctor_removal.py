"""What is left of the two scripts named fleetrun when one of their packages comes or goes."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.launch import doctor
from ppdist.launch.cli import whose_fleetrun

ROOT = Path(__file__).resolve().parents[3]
PADDLE_LAUNCHER = "[console_scripts]\nfleetrun = paddle.distributed.launch.main:launch\n"


def wheel(folder: Path, name: str, version: str, scripts: str, content: dict[str, bytes]) -> Path:
    """A wheel of these files, with these entry points and no requirements."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = dict(content)
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    )
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = scripts.encode()
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in files).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in files.items():
            archive.writestr(each, data)
    return path


def our_wheel(folder: Path) -> Path:
    """This package, with the entry points of setup.py."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    scripts = (folder / "ppdist.egg-info" / "entry_points.txt").read_text()
    sources = {path.relative_to(ROOT): path for path in (ROOT / "ppdist").rglob("*.py")}
    content = {str(name): path.read_bytes() for name, path in sources.items()}
    return wheel(folder, "ppdist", "0.1.0", scripts, content)


class Environment:
    """A new virtual environment with pip, and wheels to put into it."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "v")], check=True)
        self.bin = folder / "v" / "bin"
        launcher = {"paddle/__init__.py": b""}
        self.wheels = {
            "paddlepaddle": wheel(folder, "paddlepaddle", "3.3.1", PADDLE_LAUNCHER, launcher),
            "ppdist": our_wheel(folder),
        }

    def pip(self, *words: str) -> None:
        command = [str(self.bin / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*command, *words], check=True, capture_output=True, timeout=120)

    def install(self, name: str) -> None:
        words = ("--force-reinstall", "--no-deps", "--no-index")  # as doctor says it
        self.pip("install", *words, str(self.wheels[name]))

    def remove(self, *names: str) -> None:
        self.pip("uninstall", "-y", *names)

    @property
    def fleetrun(self) -> str:
        """Whose it is, as doctor finds out."""
        owner, _ = whose_fleetrun(str(self.bin))
        finding = doctor.check_fleetrun(str(self.bin))
        assert finding.level == doctor.WARN  # of another Python than this one, if it is ours
        assert "ppdist launch" in finding.remedy
        if owner != "ppdist":
            assert "pip install --force-reinstall --no-deps ppdist" in finding.remedy
        return owner

    @property
    def ppdist_launches(self) -> bool:
        command = [str(self.bin / "ppdist"), "launch", "--help"]
        ended = subprocess.run(command, cwd=self.bin, capture_output=True, text=True, timeout=60)
        return ended.returncode == 0 and "--max_restart" in ended.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    pytest.importorskip("ensurepip")
    pytest.importorskip("setuptools")
    yield Environment(tmp_path)


@pytest.mark.slow
def test_whose_fleetrun_is_left_in_both_orders(environment: Environment) -> None:
    environment.install("paddlepaddle")
    assert environment.fleetrun == "paddle"
    environment.install("ppdist")
    assert environment.fleetrun == "ppdist" and environment.ppdist_launches
    environment.remove("ppdist")
    assert environment.fleetrun == "none", "ours was in the place of Paddle's"
    environment.install("paddlepaddle")
    assert environment.fleetrun == "paddle"

    environment.remove("paddlepaddle")
    environment.install("ppdist")
    environment.install("paddlepaddle")
    assert environment.fleetrun == "paddle" and environment.ppdist_launches
    environment.remove("paddlepaddle")
    assert environment.fleetrun == "none" and environment.ppdist_launches
    environment.install("ppdist")
    assert environment.fleetrun == "ppdist"
