"""Hosts with addresses of their own: network namespaces joined by a cable that can be pulled.

Each is a host for everything that fleetrun, gloo and Paddle see; only the disk is shared.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.launch.hosts import ALL_REDUCE, ROOT, hosts_of_a_test, wait_for, write
from tests.unit.launch.namespaces import A, B, Cable, ended, ip

pytestmark = pytest.mark.slow
TRAINING = (
    "data.workers=0",
    "train.epochs=2",
    "train.max_steps=12",
    "evaluate.every_epochs=100",
    "log.every_steps=1",
    "distributed.timeout_seconds=120",
)


def test_pulled_cable_ends_both_hosts_by_name(cable: Cable, cabled, record_property) -> None:
    code = ALL_REDUCE + "Path(f'ready{rank}').touch()\nwhile True: dist.all_reduce(tensor)\n"
    script = write(code)
    hosts = [cabled(A, script), cabled(B, script)]
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    cable.pull()
    begin = time.monotonic()
    one, other = ended(hosts, 150)
    assert (one.code, other.code) == (1, 1)
    assert f"fleetrun: host {B}: no heartbeat for 60 s" in one.errors
    assert f"fleetrun: host {A}: no heartbeat for 60 s" in other.errors
    took = time.monotonic() - begin
    record_property("figure", f"both ended after {took:.0f} s")
    assert took < 110


def test_two_hosts_train_with_the_losses_of_one(
    cabled, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config, *overrides = _training(tmp_path, request)
    tool = str(ROOT / "tools/train.py")

    def words(output: str) -> tuple[str, ...]:
        return (tool, "-c", config, "-o", *TRAINING, *overrides, f"output_dir={output}")

    ends = ended([cabled(host, *words("two")) for host in (A, B)], 600)
    assert [end.code for end in ends] == [0, 0], ends[0].errors + ends[1].errors
    with hosts_of_a_test() as starter:
        alone = starter("alone", "--nproc_per_node", "2", *words("one")).ended(600)
    assert alone.code == 0, alone.errors
    one, two = (_losses(Path(folder) / "metrics.jsonl") for folder in ("one", "two"))
    assert len(one) == len(two) == 12
    for step, (here, there) in enumerate(zip(one, two)):
        assert here == pytest.approx(there, rel=1e-6), f"record {step}"


def _training(folder: Path, request: pytest.FixtureRequest) -> list[str]:
    """The configuration of blood cells where their images are, else of drawn shapes."""
    try:
        root = request.getfixturevalue("shared_dir") / "data" / "bccd"
    except pytest.skip.Exception:
        root = folder / "absent"
    if root.is_dir():
        return [str(ROOT / "configs/examples/bccd_ppyoloe.yml"), f"data.root={root}"]
    command = [sys.executable, "tools/data.py", "synthetic", "--out", str(folder / "data")]
    subprocess.run([*command, "--train", "48", "--val", "8"], cwd=ROOT, check=True)
    return [str(ROOT / "configs/examples/demo.yml"), f"data.root={folder / 'data'}"]


def _losses(metrics: Path) -> list[float]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_the_doctor_finds_another_mtu_on_both_hosts(cable: Cable, tmp_path: Path) -> None:
    ip("-n", cable.namespaces[1], "link", "set", "cable1", "mtu", "1400")
    running = []
    for host in (A, B):
        command = [sys.executable, str(ROOT / "tools" / "doctor.py"), "--ips", f"{A},{B}"]
        command += ["--nproc_per_node", "1", "--json", str(tmp_path / f"{host}.json")]
        environment = {key: value for key, value in os.environ.items() if "PADDLE" not in key}
        running.append(
            subprocess.Popen(
                [*cable.prefix(host), *command],
                cwd=tmp_path,
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for host, process in zip((A, B), running):
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said
        findings = json.loads((tmp_path / f"{host}.json").read_text())["findings"]
        found = {each["subject"]: (each["level"], each["found"]) for each in findings}
        level, text = found["hosts differ"]
        assert level == "WARN" and text.startswith("MTU: 1500 on rank 0 ") and "; 1400 on " in text
