"""Gathers what deploy/cpp needs beside a compiler and CMake, for `make test-all`.

    python -m tests.deploy.cpp_requirements      # a large download, once

ONNX Runtime's headers come from an npm package, its library is that of the Python wheel; both go
to build/onnxruntime.  OpenCV and nlohmann-json are Debian's packages, which a test leaves to the
user.  Where something is missing, one line says what, and the tests of deploy/cpp are skipped.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ONNXRUNTIME = REPOSITORY / "build" / "onnxruntime"  # include/, lib/
LIBRARIES = ("lib/libonnxruntime.so", "lib/libonnxruntime.so.1")  # for the linker, for the loader
PROGRAMS = ("cmake", "c++")
DEBIAN_PACKAGES = {"OpenCV": "libopencv-dev", "nlohmann_json": "nlohmann-json3-dev"}
# Microsoft's iOS framework lies in it as it was released; headers are the same on all systems.
NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"
OLDEST_LIBRARY = (1, 29)  # ORT_API_VERSION of its headers
NPM_SHA512 = (
    "064cf176e499f4891e0cfe90f25cf64c553689eee1492bd2ed921fccca28131a"
    "2ad02373267bae19a509ec8b288c182a3b8a2e0f58d76a1f0e63225b08ddbd16"
)
HEADERS = "onnxruntime.xcframework/ios-arm64/onnxruntime.framework/Headers/"


def missing_programs() -> list[str]:
    """Returns the programs that a build needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def onnxruntime_root() -> Path | None:
    """Returns the folder with include/ and lib/ of ONNX Runtime that a build takes.

    None: the system's, if it has one.
    """
    if given := os.environ.get("ONNXRUNTIME_ROOT"):
        return Path(given)
    is_complete = (ONNXRUNTIME / "include").is_dir() and (ONNXRUNTIME / LIBRARIES[0]).exists()
    return ONNXRUNTIME if is_complete else None


def has_onnxruntime() -> bool:
    return onnxruntime_root() is not None or Path("/usr/include/onnxruntime").is_dir()


def _has_cmake_package(name: str) -> bool:
    options = (f"-DNAME={name}", "-DCOMPILER_ID=GNU", "-DLANGUAGE=CXX", "-DMODE=EXIST")
    with tempfile.TemporaryDirectory() as folder:  # CMake leaves files where it is started
        command = ["cmake", "--find-package", *options]
        return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def require_debian_packages() -> None:
    """Says what to type where OpenCV's or nlohmann-json's headers are missing."""
    packages = [
        package for name, package in DEBIAN_PACKAGES.items() if not _has_cmake_package(name)
    ]
    if packages:
        line = f"apt-get install --no-install-recommends {' '.join(packages)}"
        raise SystemExit(f"deploy/cpp is not tested: it needs {' and '.join(packages)} ({line})")


def gather_onnxruntime() -> None:
    """Fills build/onnxruntime: the library of the installed wheel, headers from npm."""
    wheel = importlib.util.find_spec("onnxruntime")
    places = wheel.submodule_search_locations or [] if wheel else []
    files = [file for place in places for file in Path(place).glob("capi/libonnxruntime.so.*")]
    if not files:
        raise SystemExit("deploy/cpp is not tested: no onnxruntime wheel with libonnxruntime.so")
    version = files[0].name.partition(".so.")[2]
    if tuple(map(int, version.split(".")[:2])) < OLDEST_LIBRARY:
        oldest = ".".join(map(str, OLDEST_LIBRARY))
        raise SystemExit(f"deploy/cpp is not tested: it needs onnxruntime>={oldest}, not {version}")
    for name in LIBRARIES:  # links again: the environment may be a new one
        (ONNXRUNTIME / name).parent.mkdir(parents=True, exist_ok=True)
        (ONNXRUNTIME / name).unlink(missing_ok=True)
        (ONNXRUNTIME / name).symlink_to(files[0])
    if (ONNXRUNTIME / "include").is_dir():
        return
    if shutil.which("npm") is None:
        raise SystemExit("deploy/cpp is not tested: npm, which fetches headers, is not installed")
    with tempfile.TemporaryDirectory(dir=ONNXRUNTIME) as folder:
        headers = unpack_headers(download_npm_package(Path(folder)), Path(folder, "include"))
        headers.rename(ONNXRUNTIME / "include")


def download_npm_package(folder: Path) -> Path:
    """Downloads the package; refuses any other content than the one named here."""
    command = ["npm", "pack", "--silent", NPM_PACKAGE]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        raise SystemExit(f"deploy/cpp is not tested: npm: {done.stderr.strip() or 'no package'}")
    if hashlib.sha512(archives[0].read_bytes()).hexdigest() != NPM_SHA512:
        raise SystemExit(f"deploy/cpp is not tested: {NPM_PACKAGE} is not what it was")
    return archives[0]


def unpack_headers(archive: Path, folder: Path) -> Path:
    """Unpacks ONNX Runtime's headers, and nothing else, into a new folder."""
    folder.mkdir()
    with tarfile.open(archive) as package:
        for member in package:
            if member.isfile() and HEADERS in member.name and (file := package.extractfile(member)):
                (folder / Path(member.name).name).write_bytes(file.read())
    return folder


def main() -> None:
    if programs := missing_programs():
        raise SystemExit(f"deploy/cpp is not tested: {' and '.join(programs)} not installed")
    require_debian_packages()
    if not has_onnxruntime():
        gather_onnxruntime()


if __name__ == "__main__":
    main()
