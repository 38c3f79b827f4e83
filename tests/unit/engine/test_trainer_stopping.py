"""A request to stop: within an evaluation, and the second one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from ppdist.common.signals import STOP_SIGNALS
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from ppdist.engine import stopping
from ppdist.engine.parts import EvaluationStopped
from tests.distributed import run_on_ranks
from tests.unit.engine.oracle import IMAGES, Oracle, evaluator, five_images
from tests.unit.launch.hosts import ROOT

SIGNALS = STOP_SIGNALS


def asked_to_stop_on(one_rank):
    comm.init("cpu", DistributedConfig())
    share = list(range(IMAGES))[comm.rank() :: comm.world_size()]
    under_test, model = evaluator(share), Oracle(five_images())
    try:
        under_test.evaluate(model, lambda: comm.rank() == one_rank)
    except EvaluationStopped:
        seen = len(model.modes)
        return {"batches": seen, "mAP50": under_test.evaluate(model)["mAP50"]}
    return None


def test_stop_on_one_rank_ends_evaluation_on_all():
    results = run_on_ranks(2, "tests.unit.engine.test_trainer_stopping:asked_to_stop_on", 0)
    assert [result["batches"] for result in results] == [1, 1]  # of 2 and 1
    assert [result["mAP50"] for result in results] == [pytest.approx(1.0)] * 2


def meetings_under_signals(argument):
    comm.init("cpu", DistributedConfig())
    asked = []
    vars(stopping)["_SAME_REQUEST_SECONDS"] = 1e9
    stopping.listen(lambda: asked.append(1))
    done = threading.Event()

    def send():
        while not done.wait(0.002):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    met = [comm.all_gather_object(comm.rank()) for _ in range(15)]
    done.set()
    sender.join()
    return {"met": met, "asked": len(asked)}


def test_signals_amid_meetings_do_not_break_them():
    results = run_on_ranks(2, "tests.unit.engine.test_trainer_stopping:meetings_under_signals")
    assert all(result == {"met": [[0, 1]] * 15, "asked": 1} for result in results)


@pytest.fixture
def no_nohup() -> None:
    """The tests themselves may run under it, or in the background of a shell."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_repeated_signal_counts_once_later_one_kills(
    second, code, no_nohup, monkeypatch, capfd
) -> None:
    asked, codes, now = [], [], 100.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    monkeypatch.setattr(stopping.os, "_exit", codes.append)
    stopping.listen(lambda: asked.append(now))
    for pause in (0.0, 0.2, 0.2):  # as Paddle's launcher repeats it
        now += pause
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [100.0] and codes == []
    assert capfd.readouterr().err.count("a second signal") == 1
    now += 3
    os.kill(os.getpid(), second)
    assert asked == [100.0] and codes == [code]


@pytest.mark.parametrize("number", SIGNALS)
def test_each_of_the_signals_of_schedulers_asks(number, no_nohup) -> None:
    asked = []
    stopping.listen(lambda: asked.append(number))
    os.kill(os.getpid(), number)
    assert asked == [number]


def test_a_hangup_that_is_ignored_stays_so(no_nohup) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup, and the ranks of fleetrun
    stopping.until_first_step()
    stopping.listen(lambda: None)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.slow) for n in SIGNALS if n != signal.SIGTERM),
    ],
)
def test_signal_before_first_step_exits_75(number, no_nohup) -> None:
    code = (
        "import os\nfrom ppdist.common.signals import hold_signals\nhold_signals()\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "from ppdist.engine import stopping\n"  # with Paddle, and its handler
        "stopping.until_first_step()\nprint('went on')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert (ended.returncode, ended.stdout) == (75, ""), ended.stderr
    assert f"stopped by {number.name}" in ended.stderr
    assert "Aborted" not in ended.stderr and "FatalError" not in ended.stderr


def test_reported_exit_code_stays_while_rank_ends(tmp_path) -> None:
    code = (
        "import os, signal\nfrom ppdist.common import process\n"
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
        "class Late:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)\n"
        "late = Late()\n"  # goes when Python takes its modules, and its handlers, away
        "process.run(lambda: 75)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PPDIST_EXIT_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=600)
    assert ended.returncode == 75
