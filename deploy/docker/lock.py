"""Writes the packages of the images, with their hashes: python3.12 deploy/docker/lock.py

Run it from the root of the repository, with the minor version of Python that the Dockerfiles name,
on x86-64 Linux: each package is pinned to the one wheel that pip takes there.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PADDLE = "paddlepaddle"  # locked apart: the image for cards replaces it


def resolve(*requirements: str) -> dict[str, str]:
    """Resolves requirements as pip would in an empty environment: name -> line of the lock."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary", ":all:", "--report", "-", *requirements]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    lines = {}
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        hashes = package["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:  # ppdist itself has none
            lines[name.lower()] = f"{name}=={version} --hash=sha256:{hashes['sha256']}"
    return lines


def write(name: str, lines: dict[str, str]) -> None:
    """Writes one lock; pip install -r reads it."""
    header = f"# {name}, written by deploy/docker/lock.py with Python 3.12 on x86-64 Linux\n"
    text = "".join(f"{lines[key]}\n" for key in sorted(lines))
    (HERE / f"{name}.lock").write_text(header + text, encoding="utf-8")


def main() -> int:
    if sys.version_info[:2] != (3, 12):
        print("lock.py: the images have Python 3.12: start it with python3.12", file=sys.stderr)
        return 2
    # setuptools builds ppdist itself; pip would otherwise fetch a builder that is not pinned.
    train = resolve(".[cpu,monitoring,onnx,tensorboard]", "setuptools")
    write("paddle-cpu", {PADDLE: train.pop(PADDLE)})
    write("train", train)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:  # the same version in both locks
        pins.writelines(f"{line.partition(' ')[0]}\n" for line in train.values())
        pins.flush()
        write("serve", resolve("-c", pins.name, "-r", "deploy/serving/requirements.txt"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
