"""Preflight and the notice about Paddle's own fleetrun."""

import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.cli.doctor import launch_options, parse
from ppdist.common.retry import unavailable
from ppdist.launch import doctor
from ppdist.launch.cli import find_fleetrun, warn_of_stock_launcher
from ppdist.launch.doctor import FAIL, OK, WARN
from tests.unit.launch.machines import A, B, machine, planned

ROOT = Path(__file__).resolve().parents[3]
STOCK = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_RANK_IN_NODE": "0", "PADDLE_TRAINER_ID": "0"}


def test_only_ranks_of_paddles_launcher_are_told() -> None:
    for other in ("ppdist launch", "python tools/launch.py"):
        assert other in (warn_of_stock_launcher(STOCK) or "")
    assert warn_of_stock_launcher(STOCK | {"PPDIST_LAUNCHER": "fleetrun"}) is None
    assert warn_of_stock_launcher({"PADDLE_TRAINERS_NUM": "2"}) is None  # started by hand
    assert warn_of_stock_launcher({}) is None


def test_multi_host_notice_says_what_can_go_wrong() -> None:
    two = STOCK | {"PADDLE_TRAINER_ENDPOINTS": f"{A}:1,{B}:1"}
    one = STOCK | {"PADDLE_TRAINER_ENDPOINTS": f"{A}:1,{A}:2"}
    assert "several hosts" in (warn_of_stock_launcher(two) or "")
    assert "several hosts" not in (warn_of_stock_launcher(one) or "")


@pytest.mark.parametrize(
    ("module", "owner", "level"),
    [("ppdist.launch.cli", "ppdist", WARN), ("paddle.distributed.launch.main", "paddle", WARN)],
)
def test_the_fleetrun_on_path_is_told_apart(
    tmp_path: Path, module: str, owner: str, level: str
) -> None:
    script = tmp_path / "fleetrun"
    script.write_text(f"#!/usr/bin/python3\nfrom {module} import main\n")
    script.chmod(0o755)
    assert find_fleetrun(str(tmp_path)) == (owner, script)
    finding = doctor.check_fleetrun(str(tmp_path))  # ours, but of another Python: a warning too
    assert finding.level == level and "python tools/launch.py" in finding.remedy


def test_the_run_is_told_as_fleetrun_plans_it() -> None:
    found = {each.subject: each for each in doctor.check_plan(planned(f"--ips={A},{B}", machine()))}
    assert found["run"].observation.startswith("host 1 of 2")
    assert found["interface"].observation == "GLOO_SOCKET_IFNAME=eth1; NCCL_SOCKET_IFNAME==eth1"
    assert found["ports"].observation.startswith("6070 and up")
    found = {
        each.subject: each
        for each in doctor.check_plan(
            planned("--ips 127.0.0.2,127.0.0.3 --host 127.0.0.3", machine())
        )
    }
    assert found["interface"].level == WARN
    assert found["ports"].observation.endswith("port 6070 of 127.0.0.2")
    (run, ports) = doctor.check_plan(planned("", machine(cards=2, build="cpu")))
    assert run.level == WARN and ports.level == OK


def test_doctor_takes_the_environment_as_fleetrun_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--start_timeout", "7", "--gpus", "0-1"])
    found = {"POD_IP": A, "FLAGS_START_PORT": "7000", "PADDLE_IPS": f"{A},{B}"}
    for name, value in (found | {"PADDLE_MASTER": "left over"}).items():
        monkeypatch.setenv(name, value)
    options = launch_options(parse())
    assert (options.host, options.start_port, options.ips) == (A, 7000, f"{A},{B}")
    assert (options.start_timeout, options.cards, options.processes) == (7, "0-1", None)
    assert options.typed == ("--start_timeout=7", "--selected_gpus=0-1")


def test_only_the_cards_of_the_run_are_asked_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def output_of(command: list[str], seconds: float, variables: dict[str, str]):
        given.update(variables)
        return 0, "ppdist 3.3.1 12.6 2\n", ""

    monkeypatch.setattr(doctor, "output_of", output_of)
    finding = doctor.check_software("gpu", ["4", "5"])[1]
    assert finding.observation.startswith("3.3.1, CUDA 12.6") and "2 cards" in finding.observation
    assert given["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_two_packages_of_opencv_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(*names: str) -> None:
        monkeypatch.setattr(
            doctor, "installed_version", lambda name: "5.0" if name in names else ""
        )
        found.append([each for each in doctor.check_software("none") if each.level == WARN])

    found: list[list[doctor.Finding]] = []
    versions("opencv-python-headless")
    versions("opencv-python-headless", "opencv-python")
    assert found[0] == [] and [each.subject for each in found[1]] == ["cv2"]
    assert "--force-reinstall opencv-python-headless" in found[1][0].remedy


@pytest.mark.slow
def test_a_failed_check_exits_2_with_the_remedy() -> None:
    command = [sys.executable, "tools/doctor.py", "--ips", "10.254.1.1,10.254.1.2", "-c", "no.yml"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "FAIL  run: " in ended.stdout and "10.254.1.2" in ended.stdout
    assert "FAIL  config: " in ended.stdout and "Traceback" not in ended.stderr
    assert "OK    cores: " in ended.stdout


def test_a_store_that_is_away_fails_one_row() -> None:
    def read() -> str:
        raise unavailable("no answer within 20 s", "s3://bucket/val.json")

    finding = doctor.attempt("data.val", read)
    assert finding.level == FAIL and "s3://bucket/val.json: no answer" in finding.observation


@pytest.mark.parametrize(
    ("version", "protobuf", "level"),
    [
        ("3.3.1", "6.33.6", OK),
        ("3.3.1", "7.36.2", OK),
        ("3.2.2", "6.33.6", OK),
        ("3.2.2", "7.36.2", FAIL),
        ("2.6.2", "4.25.0", WARN),
        ("3.4.0", "7.36.2", WARN),
        ("0.0.0", "7.36.2", WARN),
    ],
)
def test_paddle_and_its_protobuf_are_judged(version: str, protobuf: str, level: str) -> None:
    finding = doctor.judge_paddle(version, f"{version}, CPU build", protobuf)
    assert finding.level == level
    assert ("pip install 'protobuf<7'" in finding.remedy) == (level == FAIL)
