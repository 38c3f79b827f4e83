"""Driver, RDMA, link and clock, on machines whose /proc and /sys are made up."""

from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
from ppdist.config.distributed import DistributedConfig
from ppdist.launch import doctor
from ppdist.launch.doctor import OK, WARN, Finding, RdmaPort, judge_hosts
from ppdist.launch.topology import Machine
from tests.distributed import run_on_ranks
from tests.unit.launch.machines import A, B, machine, planned

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  "
    "(dvs-builder@U16)  Fri Jan 17 17:10:39 UTC 2025\n"
)
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max locked memory         {limit:<20} {limit:<20} bytes     \n"
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def add_device(
    root: Path, name: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = "mlx5"
) -> None:
    port = f"sys/class/infiniband/{name}/ports/1"
    rate = "400 Gb/sec (4X NDR)"
    write(root, {f"{port}/{key}": f"{value}\n" for key, value in
                 {"link_layer": layer, "state": state, "rate": rate}.items()})  # fmt: skip
    (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (root / f"sys/class/infiniband/{name}/device").mkdir()
    (root / f"sys/class/infiniband/{name}/device/driver").symlink_to(root / "drivers" / driver)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host in order: a driver, an interface, a device that may be used, unlimited locking."""
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": CLOSED,
            "proc/self/limits": LIMITS.format(limit="unlimited"),
            "sys/class/net/eth1/mtu": "9001\n",
            "sys/class/net/eth1/speed": "25000\n",
            "dev/infiniband/uverbs0": "",
        },
    )
    add_device(tmp_path, "mlx5_0")
    return tmp_path


def test_driver_is_read_from_both_kernel_modules(root: Path) -> None:
    assert doctor.driver_version(root) == "535.129.03"
    write(root, {"proc/driver/nvidia/version": OPEN})
    assert doctor.driver_version(root) == "570.86.10"
    assert doctor.driver_version(root / "nowhere") == ""


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("535.129.03", "12.9", OK),  # minor versions do not matter
        ("535.129.03", "13.0", WARN),
        ("580.65.06", "13.0", OK),
        ("470.57.02", "11.8", OK),
        ("470.57.02", "12.6", WARN),
        ("535.129.03", "", OK),  # the CPU build
        ("", "12.6", OK),  # WSL says no version
    ],
)
def test_driver_too_old_for_paddle_cuda_is_warning(driver: str, cuda: str, level: str) -> None:
    finding = doctor.check_driver(driver, cuda)
    assert finding.level == level
    assert ("install driver" in finding.remedy) == (level == WARN)


def test_cuda_of_paddle_is_read_without_importing_it() -> None:
    paddle = pytest.importorskip("paddle")
    built_for = paddle.version.cuda()
    assert doctor.cuda_of_paddle() == (built_for if str(built_for) != "False" else "")


def test_ports_are_told_apart_by_kind_and_state(root: Path) -> None:
    add_device(root, "mlx5_1", layer="Ethernet", state="1: DOWN")
    add_device(root, "rdmap0s6", layer="Unspecified", driver="efa")
    ports = {port.name: (port.kind, port.state) for port in doctor.rdma_ports(root)}
    assert ports == {
        "mlx5_0:1": ("InfiniBand", "ACTIVE"),
        "mlx5_1:1": ("RoCE", "DOWN"),
        "rdmap0s6:1": ("EFA", "ACTIVE"),
    }


def test_rdma_in_order_is_ok_and_none_at_all_too(root: Path) -> None:
    finding = doctor.check_rdma(doctor.rdma_ports(root), {}, root)
    assert (finding.level, finding.found) == (OK, "1 x InfiniBand 400 Gb/sec (4X NDR)")
    assert doctor.check_rdma([], {}, root).level == OK


def test_each_thing_that_keeps_nccl_from_rdma_is_named(root: Path) -> None:
    ports = doctor.rdma_ports(root)

    def said(environment: dict[str, str]) -> str:
        finding = doctor.check_rdma(ports, environment, root)
        assert (finding.level == WARN) == bool(finding.remedy)
        return f"{finding.found} -> {finding.remedy}"

    assert "NCCL_IB_DISABLE" in said({"NCCL_IB_DISABLE": "1"})
    assert "fits no active port (mlx5_0:1)" in said({"NCCL_IB_HCA": "mlx5_7"})
    (root / "dev/infiniband/uverbs0").unlink()
    assert "--device=/dev/infiniband" in said({})
    write(root, {"proc/self/limits": LIMITS.format(limit=8388608)})
    assert "only 8192 KiB of memory can be locked" in said({})
    down = [RdmaPort("mlx5_0:1", "InfiniBand", "INIT", "")]
    assert "no port is active" in doctor.check_rdma(down, {}, root).found


@pytest.mark.parametrize("wanted", ["mlx5", "=mlx5_0", "mlx5_0:1", "=mlx5_0:1", "^mlx5_1", "^=mlx"])
def test_every_nccl_device_choice_is_accepted(root: Path, wanted: str) -> None:
    environment = {"NCCL_IB_HCA": wanted}
    assert doctor.check_rdma(doctor.rdma_ports(root), environment, root).level == OK


@pytest.mark.parametrize("wanted", ["=mlx5", "^mlx5", "^=mlx5_0", "^mlx5_0:1", "mlx5_0:2"])
def test_a_choice_that_leaves_no_device_is_a_warning(root: Path, wanted: str) -> None:
    environment = {"NCCL_IB_HCA": wanted}
    finding = doctor.check_rdma(doctor.rdma_ports(root), environment, root)
    assert finding.level == WARN and "fits no active port" in finding.found


def test_who_may_lock_memory_needs_no_limit(root: Path) -> None:
    write(root, {"proc/self/limits": LIMITS.format(limit=65536)})
    assert doctor.memory_lock_limit(root) == "64 KiB"
    write(root, {"proc/self/status": "CapEff:\t0000000000004000\n"})  # CAP_IPC_LOCK alone
    assert doctor.memory_lock_limit(root) == ""


def test_a_clock_that_nothing_keeps_right_is_a_warning() -> None:
    assert doctor.check_clock(5).level == WARN
    assert doctor.check_clock(0).level == doctor.check_clock(None).level == OK
    assert doctor.clock_state() in (None, 0, 1, 2, 3, 4, 5)


def test_link_clock_and_rdma_are_for_several_hosts(root: Path) -> None:
    def check(on: Machine, words: str) -> list[Finding]:
        return list(doctor.check_equipment(on, planned(words, on), {}, root))

    there = check(machine(cards=2), f"--ips={A},{B}")
    assert [finding.subject for finding in there] == ["driver", "link", "clock", "RDMA"]
    assert there[1].found == "eth1: MTU 9001, speed 25 Gb/s"
    alone = check(machine(cards=2), "")
    assert [finding.subject for finding in alone] == ["driver"]
    assert check(machine(), "") == []
    on_cpus = check(machine(), f"--ips={A},{B}")
    assert [finding.subject for finding in on_cpus] == ["link", "clock"]  # gloo has no RDMA


def test_hosts_are_compared_by_what_they_have(root: Path, tmp_path: Path) -> None:
    found = doctor.facts(machine(cards=2), {"GLOO_SOCKET_IFNAME": "eth1"}, root)
    found.pop("CUDA of Paddle", None)  # what is installed here
    assert found == {
        "cards": "2 x GPU",
        "driver": "535.129.03",
        "cores": "8",
        "RDMA": "1 x InfiniBand 400 Gb/sec (4X NDR)",
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
    with pytest.raises(LaunchError, match="cannot write in /proc: "):
        doctor.check_writable(Path("/proc/ppdist"))
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nhost:/b {tmp_path} nfs4 rw 0 0\n")
    with mounts.open("a") as file:  # mounted when somebody looked there, over the other
        file.write("systemd-1 /auto autofs rw 0 0\nhost:/c /auto nfs rw 0 0\n")
    assert doctor.file_system_of(Path("/auto/run"), mounts) == "nfs"
    assert doctor.file_system_of(tmp_path / "run", mounts) == "nfs4"
    assert doctor.file_system_of(Path("/etc"), mounts) == "ext4"
    assert doctor.file_system_of(Path("/"), tmp_path / "none") == "unknown file system"
