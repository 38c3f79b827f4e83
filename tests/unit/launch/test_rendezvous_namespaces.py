"""Hosts with addresses of their own: network namespaces joined by a cable that can be pulled.

Each is a host for everything that fleetrun, gloo and Paddle see; only the disk is shared.
"""

import time
from pathlib import Path

import pytest

from tests.unit.launch.hosts import ALL_REDUCE, wait_for, write
from tests.unit.launch.namespaces import A, B, Cable, ended

pytestmark = pytest.mark.slow


def test_pulled_cable_ends_both_hosts_by_name(cable: Cable, cabled, record_property) -> None:
    code = ALL_REDUCE + "Path(f'ready{rank}').touch()\nwhile True: dist.all_reduce(tensor)\n"
    script = write(code)
    hosts = [cabled(A, script), cabled(B, script)]
    wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
    cable.pull()
    begin = time.monotonic()
    one, other = ended(hosts, 150)
    assert (one.code, other.code) == (1, 1)
    assert f"fleetrun: host {B}: no heartbeat" in one.errors
    assert f"fleetrun: host {A}: no heartbeat" in other.errors
    took = time.monotonic() - begin
    record_property("figure", f"both ended after {took:.0f} s")
    assert took < 110
