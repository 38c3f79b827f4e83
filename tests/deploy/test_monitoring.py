"""deploy/monitoring/ loads as it is and asks for what exists; Prometheus reads a real run."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppdist.launch.metrics import METRICS
from tests.faults.scenario import FaultScenario
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARDS = {
    path.stem: json.loads(path.read_text())
    for path in (FOLDER / "grafana" / "dashboards").glob("*.json")
}
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="Prometheus is not installed (apt-get install prometheus)",
)


def groups() -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def expressions(name: str) -> dict[str, str]:
    """What a dashboard asks, by where, with Grafana's variables filled in."""
    dashboard = DASHBOARDS[name]
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    found |= {
        f"annotation {each['name']}": each["expr"] for each in dashboard["annotations"]["list"]
    }
    return {
        where: re.sub(r"\$(run|instance)", ".*", text.replace("$__rate_interval", "1m"))
        for where, text in found.items()
    }


def served_names() -> set[str]:
    """Every number of the HTTP service, as Prometheus names it."""
    for package in ("fastapi", "httptools", "httpx", "python_multipart", "prometheus_client"):
        pytest.importorskip(package)
    from tests.deploy.serving_cases import served

    with served() as (service, _):
        service.counts.seconds.labels("200").observe(0.1)
        families = list(service.counts.registry.collect())
    return {sample.name for family in families for sample in family.samples}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:ppdist|process)[:_][\w:]+", text))


def promtool(*words: str, folder: Path = FOLDER) -> None:
    ended = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_prometheus
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")  # the token is the user's
    promtool("check", "rules", "alerts.yml")


@pytest.mark.slow
@needs_prometheus
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")
    tests = (FOLDER / "alerts_test.yml").read_text()
    missing = [rule["alert"] for rule in rules() if "alert" in rule and rule["alert"] not in tests]
    assert not missing


@needs_prometheus
def test_what_the_dashboard_asks_is_promql(tmp_path: Path) -> None:
    texts = [text for name in DASHBOARDS for text in expressions(name).values()]
    asked = [{"record": f"asked:{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": asked}]}))
    promtool("check", "rules", "asked.yml", folder=tmp_path)


def test_dashboard_and_alerts_ask_for_numbers_that_exist() -> None:
    known = set(METRICS) | {rule["record"] for rule in rules() if "record" in rule} | served_names()
    asked = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    for name, dashboard in DASHBOARDS.items():
        shown = expressions(name)
        assert all(names_in(text) for text in shown.values())
        asked += shown.items()
        asked += ((each["name"], str(each["query"])) for each in dashboard["templating"]["list"])
    for where, text in asked:
        assert names_in(text) <= known, f"{where}: {names_in(text) - known}"


def test_compose_mounts_exist_and_ports_are_local() -> None:
    services = yaml.safe_load((FOLDER / "docker-compose.yml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            place = volume.partition(":")[0]
            assert not place.startswith(".") or (FOLDER / place).is_dir()
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    path = yaml.safe_load(
        (FOLDER / "grafana" / "provisioning" / "dashboards" / "ppdist.yml").read_text()
    )["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1] == path for volume in services["grafana"]["volumes"])


def test_every_alert_is_explained() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(re.findall(r"`(Ppdist\w+)`", page)) == alerts


@contextmanager
def prometheus_of(folder: Path, target: str) -> Iterator[Callable[[str], dict[str, float]]]:
    """A Prometheus with our files but a target, and an interval, of this test; yields a function
    that asks it: label `rank` (or "") -> value."""
    for path in FOLDER.glob("*.yml"):
        shutil.copy(path, folder)
    (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": [target]}]))
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", "1s"))
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"],
            cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip

    def ask(query: str) -> dict[str, float]:
        words = urllib.parse.urlencode({"query": query})
        url = f"http://127.0.0.1:{port}/api/v1/query?{words}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:  # it starts
            return {}
        return {each["metric"].get("rank", ""): float(each["value"][1]) for each in result}

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@needs_prometheus
def test_prometheus_scrapes_real_run_with_straggler(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    pytest.importorskip("prometheus_client")
    scenario, port = FaultScenario(tmp_path / "scenario"), free_port()
    words = {
        "launch": ["--metrics_port", str(port)],
        "train": ["--eval"],
        "overrides": ["train.epochs=100", "evaluate.every_epochs=4"],
    }
    with (
        prometheus_of(tmp_path, f"127.0.0.1:{port}") as ask,
        scenario.job("demo", "slow=0.5@rank1:step2", **words) as job,
    ):
        job.reaches(40, 400)
        deadline = time.monotonic() + 60
        while len(own := ask("ppdist:rank_micro_batch_seconds:rate5m")) < 2:
            assert time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()
            time.sleep(1)
        assert own["1"] > 2 * own["0"] and own["1"] > 0.5
        waiting = ask('ALERTS{alertname="PpdistStraggler"}')
        assert list(waiting) == ["1"]  # pending: it fires after five minutes
        record_property("seconds of a micro-batch, each rank's own", own)
        assert ask('ppdist_run_step{run="demo"}')[""] >= 30
        assert ask("ppdist_run_planned_steps") == {"": 400.0}
        assert ask("ppdist_run_checkpoint_step")[""] >= 24
        assert ask("ppdist_run_checkpoint_age_seconds")[""] < 400
        assert ask("ppdist_run_evaluation_step")[""] >= 16
        assert ask('ppdist_run_evaluation{metric="mAP"}')[""] >= 0
        assert ask("sum by (rank) (ppdist_rank_up)") == {"0": 1.0, "1": 1.0}
        for where, text in expressions("ppdist").items():
            assert ask(text) or "GPU" in where or "annotation" in where, where
        assert "straggler: rank 1 (host" in job.text
