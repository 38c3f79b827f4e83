"""deploy/k8s holds what Kubernetes takes, and what fleetrun, training and serving understand."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppdist.cli import train
from ppdist.launch.network import typed_hosts
from ppdist.launch.options import Options, parse_options
from tests.errors import raises

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "k8s"
# Kubernetes gained what the files use by 1.30; the newest that the validator knows is added.
OLDEST = "1.30.0"
TRAININGS = ["train.yml", "paddlejob.yml", "jobset.yml", "volcano.yml"]
GRACE_SECONDS = 30  # that ranks may take to save (ppdist/launch/worker.py), and a bit
# What the operator (v1) adds to the environment of a worker, if no master is declared.
OF_OPERATOR = {
    "PYTHONUNBUFFERED": "0",
    "PADDLE_JOB_ID": "ppdist",
    "PADDLE_NNODES": "2",
    "PADDLE_MASTER": "ppdist-worker-0:36543",
}
SCHEMAS = yaml.safe_load(Path(__file__).with_name("kubernetes_schemas.yml").read_text())


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by kind, of which each has one."""
    found = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def job_of(name: str) -> dict[str, Any]:
    """The spec of the Job of a file."""
    found = documents(name)
    if "JobSet" in found:
        (only,) = found["JobSet"]["spec"]["replicatedJobs"]
        return only["template"]["spec"]
    return found["Job"]["spec"]


def pod_template(name: str) -> dict[str, Any]:
    found = documents(name)
    if "JobSet" in found:
        return job_of(name)["template"]
    if name == "volcano.yml":
        (host,) = found["Job"]["spec"]["tasks"]
        return host["template"]
    if "PaddleJob" in found:
        return found["PaddleJob"]["spec"]["paddleReplicaSpecs"]["Worker"]["template"]
    return found["Job" if "Job" in found else "Deployment"]["spec"]["template"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod_template(name)["spec"]["containers"]
    return only


def words_of(name: str, given: Mapping[str, str]) -> list[str]:
    """Command and arguments with variables filled in, as Kubernetes does."""
    own = container(name)
    words = [*own["command"], *own.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], word) for word in words]


def fleetrun_options(name: str, given: Mapping[str, str]) -> Options:
    """What fleetrun understands in a pod with these variables."""
    words = words_of(name, given)
    environment = dict(given)
    assert words[:2] == ["tini", "--"]  # process 1 has to reap what others leave
    words = words[2:]
    if words[0] == "env":
        words.pop(0)
        while words[0] == "-u":
            environment.pop(words[1], None)
            words = words[2:]
    assert words[0] == "fleetrun"
    return parse_options(words[1:], environment)


def given_to_pods(name: str) -> dict[str, str]:
    variables = {"POD_IP": "10.1.2.3"}
    if name in ("train.yml", "jobset.yml"):
        return variables | {"JOB_COMPLETION_INDEX": "1"}
    if name == "volcano.yml":
        return variables | {"VC_TASK_INDEX": "1"}
    return variables | {"POD_NAME": "ppdist-worker-1"} | OF_OPERATOR


@pytest.mark.parametrize("name", [*TRAININGS, "serve.yml"])
def test_kubernetes_takes_the_files(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for kind, each in documents(name).items():
        checked = each
        if kind == "JobSet":  # its own schema knows it; what it makes of it is a Job
            pytest.importorskip("jsonschema").validate(each, SCHEMAS["JobSet"])
            checked = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            checked["spec"] = job_of(name)
        if name == "volcano.yml":  # its own schema knows it, too
            pytest.importorskip("jsonschema").validate(each, SCHEMAS["VolcanoJob"])
            pod = pod_template(name)
            checked = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        if kind == "PaddleJob":  # its own schema knows it; what it makes of it is a pod
            pytest.importorskip("jsonschema").validate(each, SCHEMAS["PaddleJob"])
            pod = pod_template(name)
            checked = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        for version in (OLDEST, validator.latest_version()):
            validator.validate(checked, version, strict=True)


@pytest.mark.parametrize("name", TRAININGS)
def test_the_files_differ_from_what_is_wrong(name: str) -> None:
    """The checks above would find a key that is written wrongly."""
    validator = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod_template(name)}
    pod["spec"] = {**pod["spec"], "terminationGracePeriod": 60}
    with pytest.raises(validator.ValidationError, match="terminationGracePeriod"):
        validator.validate(pod, OLDEST, strict=True)


def test_the_pods_of_a_job_are_the_hosts_of_fleetrun() -> None:
    found = documents("train.yml")
    job, service = found["Job"], found["Service"]
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod_template("train.yml")["spec"]["subdomain"] == service["metadata"]["name"]
    expected = [f"{name}-{index}.{name}" for index in range(spec["completions"])]
    options = fleetrun_options("train.yml", given_to_pods("train.yml"))
    assert typed_hosts(options.ips or "") == expected
    assert options.host == "10.1.2.3"
    assert options.log_dir.endswith("/1")  # of its own, for the folder is that of all pods


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("count", [1, 3])
def test_job_created_anew_with_other_hosts_resumes(name: str, count: int) -> None:
    """Only --ips changes: a command that names other hosts still goes on where it was."""
    words = words_of(name, given_to_pods(name))
    (place,) = (index for index, word in enumerate(words) if word.startswith("--ips="))
    first = typed_hosts(words[place].removeprefix("--ips="))[0]
    hosts = [re.sub(r"0(?=(\.|$))", f"{index}", first, count=1) for index in range(count)]
    words[place] = "--ips=" + ",".join(hosts)
    options = parse_options(words[words.index("fleetrun") + 1 :], {"POD_IP": "10.1.2.3"})
    assert typed_hosts(options.ips or "") == hosts and len(set(hosts)) == count
    given = options.script_arguments
    assert given[given.index("--resume") + 1] == "auto"
    # Nothing else in it depends on how many there are, so the checkpoint says how large a step is.
    assert not [word for word in words if "total_batch" in word or "nproc" in word]


def test_jobset_pods_are_fleetrun_hosts() -> None:
    job_set = documents("jobset.yml")["JobSet"]
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]
    (hosts,) = job_set["spec"]["replicatedJobs"]
    assert hosts["replicas"] == 1 and network["publishNotReadyAddresses"]
    expected = [
        f"{name}-{hosts['name']}-0-{index}.{network['subdomain']}"
        for index in range(job_of("jobset.yml")["completions"])
    ]
    options = fleetrun_options("jobset.yml", given_to_pods("jobset.yml"))
    assert typed_hosts(options.ips or "") == expected and options.host == "10.1.2.3"
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert {**job_of("jobset.yml"), "template": 0} == {
        key: value
        for key, value in {**job_of("train.yml"), "template": 0}.items()
        if key != "ttlSecondsAfterFinished"  # the JobSet's own
    }


def test_monitors_scrape_ports_and_tokens_that_the_pods_have() -> None:
    found = documents("monitors.yml")
    pods, service = found["PodMonitor"]["spec"], found["ServiceMonitor"]["spec"]
    check = pytest.importorskip("jsonschema").validate
    for endpoint in (*pods["podMetricsEndpoints"], *service["endpoints"]):
        check(endpoint, SCHEMAS["Endpoint"])
    for name in ("train.yml", "jobset.yml"):
        labels = pod_template(name)["metadata"]["labels"].items()
        assert pods["selector"]["matchLabels"].items() <= labels
        ports = {each["name"] for each in container(name)["ports"]}
        assert {each["port"] for each in pods["podMetricsEndpoints"]} <= ports
    served = documents("serve.yml")["Service"]
    assert service["selector"]["matchLabels"].items() <= served["metadata"]["labels"].items()
    (endpoint,) = service["endpoints"]
    assert endpoint["port"] == served["spec"]["ports"][0]["name"]
    (secret,) = (each["valueFrom"]["secretKeyRef"] for each in container("serve.yml")["env"]
                 if "secretKeyRef" in each.get("valueFrom", ()))  # fmt: skip
    assert endpoint["authorization"]["credentials"] == secret
    (job,) = endpoint["relabelings"]  # else the operator calls it like the Service
    alerts = (ROOT / "deploy" / "monitoring" / "alerts.yml").read_text(encoding="utf-8")
    assert job["targetLabel"] == "job" and f'up{{job="{job["replacement"]}"}} == 0' in alerts


def test_paddlejob_pods_are_fleetrun_hosts() -> None:
    job = documents("paddlejob.yml")["PaddleJob"]
    name, workers = job["metadata"]["name"], job["spec"]["paddleReplicaSpecs"]["Worker"]
    options = fleetrun_options("paddlejob.yml", given_to_pods("paddlejob.yml"))
    expected = [f"{name}-worker-{index}" for index in range(workers["replicas"])]
    assert typed_hosts(options.ips or "") == expected
    assert container("paddlejob.yml")["name"] == "paddle"
    assert options.host == "10.1.2.3" and options.master is None
    with raises("environment_of_other_launch", "PADDLE_MASTER"):  # why the command takes it away
        parse_options(["--ips=a,b", "t.py"], OF_OPERATOR)


def test_volcano_pods_are_fleetrun_hosts() -> None:
    job = documents("volcano.yml")["Job"]
    (host,) = job["spec"]["tasks"]
    assert host["replicas"] == job["spec"]["minAvailable"]  # all of them or none
    name = job["metadata"]["name"]
    expected = [f"{name}-{host['name']}-{index}.{name}" for index in range(host["replicas"])]
    options = fleetrun_options("volcano.yml", given_to_pods("volcano.yml"))
    assert typed_hosts(options.ips or "") == expected and options.host == "10.1.2.3"
    assert job["spec"]["plugins"]["svc"] == ["--publish-not-ready-addresses=true"]
    by_code = {
        rule["exitCode"]: rule["action"] for rule in job["spec"]["policies"] if "exitCode" in rule
    }
    assert by_code == {2: "AbortJob"}
    ours, of_job_set = (pod_template(file)["spec"] for file in ("volcano.yml", "jobset.yml"))
    (ours["containers"][0]["args"], of_job_set["containers"][0]["args"]) = ([], [])
    assert ours == of_job_set


@pytest.mark.parametrize("name", TRAININGS)
def test_training_understands_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = fleetrun_options(name, given_to_pods(name))
    assert (ROOT / options.script).is_file()
    monkeypatch.setattr(sys, "argv", [options.script, *options.script_arguments])
    asked = train.parse()
    assert (ROOT / asked.config).is_file()
    # A pod that comes later is given the same command as one that was there at the beginning.
    assert asked.resume == "auto" and asked.eval
    mounted = {each["mountPath"]: each for each in container(name)["volumeMounts"]}
    written = dict(word.split("=") for word in asked.override)
    assert written["data.root"] in mounted and mounted[written["data.root"]]["readOnly"]
    for place in (written["output_dir"], options.log_dir):
        assert place.startswith("/output/") and "readOnly" not in mounted["/output"]


@pytest.mark.parametrize("name", [*TRAININGS, "serve.yml"])
def test_no_pod_runs_without_its_token(name: str) -> None:
    (secret,) = (each["valueFrom"]["secretKeyRef"] for each in container(name)["env"]
                 if "secretKeyRef" in each.get("valueFrom", ()))  # fmt: skip
    assert "optional" not in secret
    assert f"kubectl create secret generic {secret['name']} " in (FOLDER / name).read_text()


@pytest.mark.parametrize("name", TRAININGS)
def test_pods_wait_for_nodes_and_restart_what_fails(name: str) -> None:
    options = fleetrun_options(name, given_to_pods(name))
    assert options.start_timeout >= 3600 and options.max_restart > 0
    ports = {each["name"]: each["containerPort"] for each in container(name)["ports"]}
    assert (options.metrics_address, options.metrics_port) == ("0.0.0.0", ports["metrics"])


def test_exit_codes_say_what_becomes_of_a_job() -> None:
    job = job_of("train.yml")
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # else there may be no policy
    rules = job["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {2: "FailJob", 75: "Ignore"}
    named = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert named == {container("train.yml")["name"]}
    assert rules[-1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    # A failure of the training is one of every pod.
    assert job["backoffLimit"] % job["completions"] == 0


@pytest.mark.parametrize("name", [*TRAININGS, "serve.yml"])
def test_pods_have_minimal_rights_and_time_to_end(name: str) -> None:
    spec, own = pod_template(name)["spec"], container(name)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] >= GRACE_SECONDS + 5
    rights = own["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"]
    assert rights["capabilities"]["drop"] == ["ALL"]
    mounted = {each["mountPath"] for each in own["volumeMounts"]}
    assert "/tmp" in mounted  # fleetrun's private folder, and caches
    declared = {each["name"] for each in spec["volumes"]}
    assert declared == {each["name"] for each in own["volumeMounts"]}
    assert "limits" in own["resources"]
    assert re.search(r":[\w.-]+$", own["image"])  # a tag: nobody serves what `latest` became
    for probe in (key for key in own if key.endswith("Probe")):
        assert own[probe]["httpGet"]["port"] in {port["name"] for port in own["ports"]}


@pytest.mark.parametrize("name", TRAININGS)
def test_cards_have_shared_memory(name: str) -> None:
    spec, own = pod_template(name)["spec"], container(name)
    shared = next(each["name"] for each in own["volumeMounts"] if each["mountPath"] == "/dev/shm")
    volume = next(each for each in spec["volumes"] if each["name"] == shared)
    assert volume["emptyDir"]["medium"] == "Memory"
    resources = own["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"]


@pytest.mark.parametrize("name", ["train.yml", "jobset.yml", "serve.yml"])
def test_services_and_policies_select_their_pods(name: str) -> None:
    labels = pod_template(name)["metadata"]["labels"].items()
    found = documents(name)
    if "Service" in found:
        assert found["Service"]["spec"]["selector"].items() <= labels
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        if kind in found:
            spec = found[kind]["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            assert selector["matchLabels"].items() <= labels
    if name == "train.yml":  # names have to be known before anything runs in a pod
        spec = found["Service"]["spec"]
        assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"]
    elif name == "serve.yml":
        target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
        assert target["name"] == found["Deployment"]["metadata"]["name"]
        assert found["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_serving_understands_its_command() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    own, spec = container("serve.yml"), pod_template("serve.yml")["spec"]
    script = ROOT / "deploy" / own["command"][1]
    code = f"import sys; sys.argv[1:] = {own['args']}; sys.path.insert(0, {str(script.parent)!r})\n"
    code += "import server; a = server.parse(); print(a.model, a.host, a.port, a.seconds)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    ).stdout.split()
    assert printed[:2] == ["/model", "0.0.0.0"]
    assert int(printed[2]) == own["ports"][0]["containerPort"]
    before_it_stops = own["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > float(printed[3]) + before_it_stops
    source = script.read_text(encoding="utf-8")
    variable = re.findall(r'^TOKEN = "(\w+)"', source, re.MULTILINE)
    assert {each["name"] for each in own["env"]} >= set(variable)
    for probe, path in (("startupProbe", "/ready"), ("livenessProbe", "/health")):
        assert own[probe]["httpGet"]["path"] == path and f'"{path}"' in source
