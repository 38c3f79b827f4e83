"""Driver and link, on machines whose /proc and /sys are made up; hosts compared."""

from pathlib import Path

import pytest

from ppdist.config.distributed import DistributedConfig
from ppdist.launch import doctor
from ppdist.launch.doctor import OK, WARN, judge_hosts
from tests.distributed import run_on_ranks
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


def test_cuda_of_paddle_is_read_without_importing_it() -> None:
    paddle = pytest.importorskip("paddle")
    built_for = paddle.version.cuda()
    assert doctor.cuda_of_paddle() == (built_for if str(built_for) != "False" else "")


def test_hosts_are_compared_by_what_they_have(root: Path, tmp_path: Path) -> None:
    found = doctor.facts(machine(cards=2), {"GLOO_SOCKET_IFNAME": "eth1"}, root)
    found.pop("CUDA of Paddle", None)  # what is installed here
    assert found == {
        "cards": "2 x GPU",
        "driver": "535.129.03",
        "cores": "8",
        "MTU": "9001",
        "speed": "25 Gb/s",
    }
    assert doctor.facts(machine(), {}, tmp_path / "nowhere") == {"cores": "8"}


def compared(argument: str) -> dict[str, object]:
    """On two ranks that take themselves for hosts; the clock of the second is 600 s ahead."""
    from ppdist.distributed import comm
    from ppdist.verify import cluster

    comm.init("cpu", DistributedConfig())
    rank, real = comm.rank(), cluster.time.time
    cluster.time.time = lambda: real() + 600 * rank
    comm.host = lambda: "ab"[rank]
    return cluster.compare_hosts({"cores": "8", "MTU": ("9000", "1500")[rank]})


@pytest.mark.slow
def test_hosts_learn_of_another_mtu_and_a_wrong_clock() -> None:
    first, second = run_on_ranks(2, "tests.unit.launch.test_doctor_equipment:compared", "")
    assert first["differences"] == second["differences"] and len(first["differences"]) == 1
    findings = list(judge_hosts(first))
    assert [(finding.level, finding.subject) for finding in findings] == [
        (WARN, "hosts differ"),
        (WARN, "clocks"),
    ]
    assert findings[0].found.startswith("MTU: 9000 on rank 0 (host a); 1500 on rank 1 (host b)")
    assert "host b is 600.0 s ahead of the first one" in findings[1].found


def test_equal_hosts_or_one_host_give_no_finding() -> None:
    clocks = [{"host": "a", "seconds": 0.0}, {"host": "b", "seconds": -0.004}]
    findings = list(judge_hosts({"differences": [], "clocks": clocks}))
    assert [finding.level for finding in findings] == [OK, OK]
    assert findings[1].found == "within 4 ms of one another"
    assert not list(judge_hosts({"differences": [], "clocks": clocks[:1]}))


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
