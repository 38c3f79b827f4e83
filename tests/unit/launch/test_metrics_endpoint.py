"""Prometheus gets its answers, and the job no harm whatever happens to who answers."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.launch import metrics
from ppdist.launch.options import parse_options
from ppdist.launch.topology import Machine, metrics_endpoint
from tests.errors import raises
from tests.ports import free_port
from tests.unit.launch.hosts import ROOT, hosts_of_a_test, wait_for, write
from tests.unit.launch.measured import Ranks

pytest.importorskip("prometheus_client")
SECONDS = {"step_seconds": 2.0, "own_seconds": 1.5, "data_seconds": 0.5, "micro_batches": 2.0}


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    folder = tmp_path / "private"
    folder.mkdir()
    return Ranks(folder)


@pytest.fixture
def port() -> int:
    return free_port()


def ask(port: int, method: str = "GET") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def asked(port: int) -> str:
    """Once somebody answers."""
    answers: list[str] = []

    def got() -> bool:
        try:
            answers.append(ask(port))
        except OSError:
            return False
        return True

    wait_for(got)
    return answers[-1]


@pytest.fixture
def endpoint(ranks: Ranks, port: int, capfd: pytest.CaptureFixture) -> Iterator[int]:
    ranks.say(0, "step", 20)
    ranks.say(1, "step", 20)
    with metrics.export_metrics(ranks.folder, ("127.0.0.1", port)):
        asked(port)
        yield port
    assert capfd.readouterr().err == ""


def test_it_answers_in_prometheus_words(endpoint: int) -> None:
    text = ask(endpoint)
    name = socket.gethostname()
    assert f'ppdist_rank_step{{host="{name}",rank="1",run=""}} 20.0' in text
    assert "# TYPE ppdist_rank_step gauge" in text
    assert "# TYPE ppdist_rank_steps_total counter" in text
    with pytest.raises(urllib.error.HTTPError, match="405"):
        ask(endpoint, "POST")


def test_silent_rude_or_gone_clients_disturb_nobody(endpoint: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", endpoint)) for _ in range(50)]
    rude = socket.create_connection(("127.0.0.1", endpoint))
    rude.sendall(b"\xff" * 100_000 + b"\r\n\r\n")
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    rude.close()  # with a reset
    assert "ppdist_rank_up" in ask(endpoint)
    for client in silent:
        client.close()


def test_files_in_cwd_are_not_imported_as_modules(
    ranks: Ranks, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("wsgiref", "prometheus_client", "ppdist", "json"):
        Path(f"{name}.py").write_text("open('ran', 'w')\nraise RuntimeError")
    with metrics.export_metrics(ranks.folder, ("127.0.0.1", port)):
        assert "ppdist_host_ranks" in asked(port)
    assert not Path("ran").exists()


def test_signals_for_the_whole_job_leave_it_answering(ranks: Ranks, port: int) -> None:
    ranks.say(0, "step", 20)
    with metrics.export_metrics(ranks.folder, ("127.0.0.1", port)):
        asked(port)
        (child,) = children_that_export(ranks.folder)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(child, number)
        time.sleep(0.5)
        assert "ppdist_rank_up" in ask(port)
    assert not children_that_export(ranks.folder)


def children_that_export(folder: Path) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ppdist.launch.metrics" in command and str(folder).encode() in command:
            found.append(int(place.name))
    return found


def test_it_ends_with_fleetrun_however_that_ends(tmp_path: Path, port: int) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from ppdist.launch.metrics import export_metrics\n"
        "with export_metrics(Path(sys.argv[1]), ('127.0.0.1', int(sys.argv[2]))): time.sleep(1000)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(port)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        asked(port)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not children_that_export(tmp_path), 20)


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1", "Address already in use"), ("203.0.113.7", "Cannot assign"), ("no.such.", "")],
)
def test_an_address_that_cannot_be_opened_is_one_line(
    address: str, says: str, tmp_path: Path, port: int, capfd: pytest.CaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert metrics.main([str(tmp_path), address, str(port)]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"fleetrun: --metrics_port: {address}:{port} cannot be opened (")
    assert says in said and said.endswith("; the run continues without it\n")


def test_missing_package_is_one_line_with_remedy(
    tmp_path: Path, port: int, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.main([str(tmp_path), "127.0.0.1", str(port)]) == 1
    assert capfd.readouterr().err == (
        "fleetrun: --metrics_port: the package prometheus-client is missing: "
        "pip install 'ppdist[monitoring]'; the run continues without it\n"
    )


@pytest.mark.parametrize(
    ("typed", "address", "port"),
    [("9410", "", 9410), ("0.0.0.0:9410", "0.0.0.0", 9410), ("[::1]:9", "::1", 9)],
)
def test_the_option_takes_a_port_or_an_address_too(typed: str, address: str, port: int) -> None:
    options = parse_options(["--metrics_port", typed, "t.py"], {})
    assert (options.metrics_address, options.metrics_port) == (address, port)


@pytest.mark.parametrize("typed", ["94100000", "70000", "0", "::9410", "a b:9410", ":9410", "x"])
def test_invalid_port_is_refused_before_start(typed: str) -> None:
    with raises("option_invalid"):
        parse_options(["--metrics_port", typed, "t.py"], {})


@pytest.mark.parametrize(
    ("typed", "endpoint"),
    [
        ([], None),
        (["--metrics_port", "9410"], ("127.0.0.1", 9410)),
        (["--ips", "127.0.0.2,127.0.0.3", "--host", "127.0.0.3", "--metrics_port", "9410"],
         ("127.0.0.3", 9410)),
        (["--ips", "127.0.0.2,127.0.0.3", "--metrics_port", "0.0.0.0:9410"], ("0.0.0.0", 9410)),
    ],
)  # fmt: skip
def test_it_listens_on_the_address_of_its_host(
    typed: list[str], endpoint: tuple[str, int] | None
) -> None:
    options = parse_options([*typed, "t.py"], {})
    assert metrics_endpoint(options, Machine([], "cpu", 2)) == endpoint


@pytest.mark.slow
def test_it_lives_over_a_restart_and_counts_it(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(
        "from ppdist.distributed import heartbeat\n"
        "heartbeat.begin(60.0, None)\nheartbeat.tell_run(Path('output/demo'))\nheartbeat.plan(9)\n"
        "again = os.environ.get('PPDIST_RESTART')\n"
        "heartbeat.beat('step', 4)\n"
        f"heartbeat.record_step(loss=1.5, images=16, bad=False, **{SECONDS})\n"
        "name = 'second' if again else 'first'\n"
        "while not Path(f'go-{name}').exists(): time.sleep(0.05)\n"
        "heartbeat.beat('end', 5)\n"
        "sys.exit(0 if again else 3)\n"
    )
    with hosts_of_a_test() as start:
        words = ("--nproc_per_node", "2", "--max_restart", "1", "--metrics_port", str(port))
        host = start("a", *words, script)
        wait_for(lambda: "ppdist_run_loss{" in asked(port) and asked(port).count("_up{") == 2)
        first = asked(port)
        assert 'ppdist_run_loss{host="' in first and 'run="demo"} 1.5' in first
        assert re.search(r"ppdist_host_restarts_total\{.*\} 0.0", first)
        Path("go-first").touch()
        wait_for(lambda: re.search(r"ppdist_host_restarts_total\{.*\} 1.0", ask(port)) is not None)
        wait_for(lambda: 'rank="1",run="demo"} 4.0' in ask(port))
        Path("go-second").touch()
        assert host.ended().code == 0, host.said
