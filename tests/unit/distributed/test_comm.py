"""The seam: collectives and store meetings on one process and on real gloo ranks."""

import signal
import socket
import subprocess
import sys
import time

import numpy as np
import paddle
import pytest

from ppdist.common.errors import DataError, RankError
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import collectives, comm, store
from ppdist.distributed.collectives import buckets
from tests.distributed import run_on_ranks
from tests.errors import raises

HOST = socket.gethostname()


SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, True),  # torchrun
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "4"}, False),  # of a machine: fleetrun may follow
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, False),
        (SRUN, True),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, False),
        (SRUN | {"SLURM_PTY_PORT": "39001"}, False),  # srun --pty bash, and ppdist typed there
        (SRUN | {"PADDLE_TRAINERS_NUM": "1"}, False),  # deploy/slurm: srun starts fleetrun
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "PADDLE_TRAINERS_NUM": "1"}, False),
    ],
)
def test_one_of_several_of_another_launcher_is_refused(environment, refused):
    if not refused:
        comm.require_own_ranks(environment)
        return
    with raises("foreign_launcher"):
        comm.require_own_ranks(environment)


CLUSTER = {
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "0",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6071,10.0.0.2:6071",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:6071",
}


def test_variables_of_a_cluster_without_a_launcher_are_refused():
    with raises("environment_of_other_launch", "10.0.0.1,10.0.0.2", " ".join(CLUSTER)):
        comm.require_own_ranks(CLUSTER)
    with raises("environment_of_other_launch", "unset PADDLE_NNODES PADDLE_MASTER"):
        comm.require_own_ranks({"PADDLE_NNODES": "2", "PADDLE_MASTER": "job-worker-0:36543"})
    for started in (
        {"PADDLE_MASTER": "10.0.0.1:6070"},  # fleetrun, Paddle's own launcher
        {"PADDLE_RANK_IN_NODE": "0"},
        {"PADDLE_DISTRI_BACKEND": "gloo"},  # paddle.distributed.spawn
        {"FLAGS_selected_gpus": "0"},
        {"PADDLE_TRAINERS_NUM": "1"},
    ):
        comm.require_own_ranks(CLUSTER | started)


def meet(argument):
    comm.init("cpu", DistributedConfig())
    me = comm.rank()
    total = comm.all_reduce_sum(paddle.to_tensor([1.0 + me]))
    means = [paddle.to_tensor([1.0 + me, 4.0]), paddle.to_tensor([[6.0 * me]])]
    collectives.mean_tensors(means)
    rows = comm.all_gather_rows(np.full((me * 2, 3), me, "float32"))  # rank 0 has no row
    objects = comm.all_gather_large_object({"rank": me, "text": "höhe\n" * me})
    slow = comm.run_on_main(lambda: time.sleep(0.3) or {"from": comm.rank()})
    try:
        comm.run_on_main(lambda: 1 / 0 if me == 0 else None)
        failure = ""
    except (ZeroDivisionError, RankError) as error:
        failure = f"{type(error).__name__}: {error}"
    comm.barrier()
    return {
        "sum": total.tolist(),
        "means": [mean.tolist() for mean in means],
        "rows": rows.tolist(),
        "objects": objects,
        "slow": slow,
        "failure": failure,
    }


def test_collectives_and_meetings_agree_on_two_ranks():
    first, second = run_on_ranks(2, "tests.unit.distributed.test_comm:meet")
    assert first["sum"] == second["sum"] == [3.0]
    assert first["means"] == second["means"] == [[1.5, 4.0], [[3.0]]]
    assert first["rows"] == second["rows"] == [[1.0] * 3] * 2
    objects = [{"rank": 0, "text": ""}, {"rank": 1, "text": "höhe\n"}]
    assert first["objects"] == second["objects"] == objects
    assert first["slow"] == second["slow"] == {"from": 0}
    assert first["failure"] == "ZeroDivisionError: division by zero"
    assert second["failure"].startswith(f"RankError: rank 0 (host {HOST})")


def fail_alone(argument):
    """Rank 1 alone fails, first at the user's fault and then at ours, and is late every time."""
    comm.init("cpu", DistributedConfig())

    def work(error):
        time.sleep(0.3 * comm.rank())
        if error and comm.rank() == 1:
            raise error
        return comm.rank()

    said = []
    for error in (
        None,
        DataError("no image \udcd6.jpg", code="image_missing"),  # a name in GBK
        KeyError("bug"),
    ):
        try:
            said.append(comm.run_on_all_ranks(lambda error=error: work(error)))
        except (DataError, KeyError, RankError) as failure:
            code, origin = getattr(failure, "code", ""), getattr(failure, "from_rank", None)
            said.append([type(failure).__name__, code, origin, str(failure)])
    try:
        comm.run_on_main(lambda: {1, 2})  # JSON holds no set
    except (TypeError, RankError) as failure:
        said.append(type(failure).__name__)
    # Rank 0 has nothing left to do, but a sleepy rank 1 has not read its answer from the store.
    if comm.rank() == 1:
        vars(store).update(_FIRST_POLL_SECONDS=2.0, _POLL_SECONDS=2.0)
    return [*said, comm.run_on_main(lambda: time.sleep(0.5) or 7)]


@pytest.mark.slow
def test_failure_on_one_rank_fails_all_rank_0_last():
    first, second = run_on_ranks(2, "tests.unit.distributed.test_comm:fail_alone")
    who = f"rank 1 (host {HOST})"
    named = [
        ["DataError", "image_missing", 1, f"{who} failed: no image \udcd6.jpg"],
        ["RankError", "rank_failed", 1, f"{who} failed: 'bug'"],
    ]
    assert first == [0, *named, "TypeError", 7]
    own = [
        ["DataError", "image_missing", None, "no image \udcd6.jpg"],
        ["KeyError", "", None, "'bug'"],
    ]
    assert second == [1, *own, "RankError", 7]


def test_one_process_needs_no_ranks():
    tensor = paddle.to_tensor([2.0])
    assert comm.all_reduce_sum(tensor).tolist() == [2.0]
    assert comm.all_gather(tensor).shape == [1, 1]
    assert comm.run_on_main(lambda: 7) == 7
    layer = paddle.nn.Linear(1, 1)
    assert collectives.wrap(layer) is layer


def test_messages_are_of_so_many_bytes_whatever_the_type():
    for dtype, most in (("float32", 2), ("bfloat16", 4)):
        tensors = [paddle.zeros([256], dtype) for _ in range(8)]
        sizes = [len(message) for message in buckets(tensors, 2048)]
        assert sizes == [most] * (8 // most)


@pytest.mark.slow
def test_rank_ended_by_another_prints_nothing():
    waiting = (
        "import time; from ppdist.distributed import comm; "
        "from ppdist.config.distributed import DistributedConfig; "
        "comm.init('cpu', DistributedConfig()); "
        "print('here', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", waiting],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as rank:  # fmt: skip
        assert rank.stdout.readline() == "here\n"
        rank.terminate()
        assert rank.wait(30) == -signal.SIGTERM
        assert rank.stdout.read() + rank.stderr.read() == ""


def test_storage_is_waited_for_as_long_as_others_bear(monkeypatch):
    assert comm.storage_seconds() == comm.step_storage_seconds() == 900.0
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "4")
    assert comm.step_storage_seconds() == 900.0
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "2")  # gloo gives up after 30 s
    assert (comm.storage_seconds(), comm.step_storage_seconds()) == (900.0, 15.0)
    monkeypatch.setattr(comm.device, "on_accelerator", lambda: True)
    monkeypatch.setattr(comm, "_hang_seconds", 60.0)
    assert comm.step_storage_seconds() == 60.0
