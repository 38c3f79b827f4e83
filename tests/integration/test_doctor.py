"""tools/doctor.py as it is typed: on two processes, and on two hosts that do not agree."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.data.datasets.synthetic import make_shapes
from tests.forked import ROOT, run_tool
from tests.project import write_config


def write_experiment(folder: Path, epochs: int) -> None:
    make_shapes(folder / "data", train=4, val=2, size=64)
    write_config(folder, f"train: {{epochs: {epochs}}}", {"name": "ppyoloe"})


@pytest.mark.slow
def test_two_processes_are_compared_and_measured(tmp_path: Path) -> None:
    write_experiment(tmp_path, epochs=2)
    file = tmp_path / "report.json"
    done = run_tool("doctor", "--nproc_per_node", 2, "-c", "cfg.yml", "--json", file, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK    together: " in done.stdout
    report = json.loads(file.read_text())
    assert report["sizes"][0]["bytes"] == 1024 and len(report["sizes"]) > 4
    for row in report["sizes"]:  # with two ranks 2 (n-1)/n is 1
        assert row["bus_bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
    assert report["latency_seconds"] == pytest.approx(report["sizes"][0]["seconds"] / 2)
    assert report["bandwidth_bytes_per_second"] == report["sizes"][-1]["bus_bytes_per_second"]
    assert report["hosts"] == [socket.gethostname()] * 2
    assert {"level": "OK", "subject": "config", "found": "cfg.yml", "remedy": ""} in report[
        "findings"
    ]


@pytest.mark.slow
def test_one_process_or_quick_measures_nothing(tmp_path: Path) -> None:
    for arguments in ((), ("--quick", "--nproc_per_node", 2)):
        done = run_tool("doctor", *arguments, cwd=tmp_path)
        assert done.returncode == 0 and "together" not in done.stdout


@pytest.mark.slow
def test_two_hosts_both_name_differing_config_key(tmp_path: Path) -> None:
    """Loopback addresses stand in for hosts; the same command is typed in a folder of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    hosts = ("127.0.0.2", "127.0.0.3")
    running = []
    for place, host in enumerate(hosts):
        folder = tmp_path / host
        folder.mkdir()
        write_experiment(folder, epochs=2 + place)
        command = [sys.executable, str(ROOT / "tools" / "doctor.py"), "--ips", ",".join(hosts)]
        command += ["--host", host, "--start_port", str(port), "--nproc_per_node", "1"]
        environment = {key: value for key, value in os.environ.items() if "PADDLE" not in key}
        running.append(
            subprocess.Popen(
                [*command, "-c", "cfg.yml"],
                cwd=folder,
                env={**environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    name = socket.gethostname()
    for process in running:
        said, _ = process.communicate(timeout=180)
        assert process.returncode == 2, said
        (line,) = (line for line in said.splitlines() if "train.epochs: 2.0" in line)
        assert all(f"(host {name} {host})" in line for host in hosts)
        assert "FAIL  together: " in said
    for host in hosts:  # the logs that the message names are still there
        assert list((tmp_path / host).glob("ppdist-doctor-*/log/workerlog.0"))
