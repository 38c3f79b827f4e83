"""Driver and link, on machines whose /proc and /sys are made up."""

from pathlib import Path

import pytest

from ppdist.launch import doctor
from tests.errors import raises
from tests.unit.launch.machines import machine

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  "
    "(dvs-builder@U16)  Fri Jan 17 17:10:39 UTC 2025\n"
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a driver and an interface."""
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": CLOSED,
            "sys/class/net/eth1/mtu": "9001\n",
            "sys/class/net/eth1/speed": "25000\n",
        },
    )
    return tmp_path


def test_driver_is_read_from_both_kernel_modules(root: Path) -> None:
    assert doctor.driver_version(root) == "535.129.03"
    write(root, {"proc/driver/nvidia/version": OPEN})
    assert doctor.driver_version(root) == "570.86.10"
    assert doctor.driver_version(root / "nowhere") == ""


def test_hosts_are_compared_by_what_they_have(root: Path, tmp_path: Path) -> None:
    found = doctor.collect_facts(machine(cards=2), {"GLOO_SOCKET_IFNAME": "eth1"}, root)
    found.pop("CUDA of Paddle", None)  # what is installed here
    assert found == {
        "cards": "2 x GPU",
        "driver": "535.129.03",
        "cores": "8",
        "MTU": "9001",
        "speed": "25 Gb/s",
    }
    assert doctor.collect_facts(machine(), {}, tmp_path / "nowhere") == {"cores": "8"}


def test_an_output_folder_is_named_with_its_file_system(
    tmp_path: Path,
) -> None:
    assert " can be written (" in doctor.check_writable(tmp_path / "run/of/today")
    with raises("folder_unwritable", "/proc"):
        doctor.check_writable(Path("/proc/ppdist"))
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nhost:/b {tmp_path} nfs4 rw 0 0\n")
    with mounts.open("a") as file:  # mounted when somebody looked there, over the other
        file.write("systemd-1 /auto autofs rw 0 0\nhost:/c /auto nfs rw 0 0\n")
    assert doctor.file_system_of(Path("/auto/run"), mounts) == "nfs"
    assert doctor.file_system_of(tmp_path / "run", mounts) == "nfs4"
    assert doctor.file_system_of(Path("/etc"), mounts) == "ext4"
    assert doctor.file_system_of(Path("/"), tmp_path / "none") == "unknown file system"
