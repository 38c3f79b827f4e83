"""The ranks' meetings at the store: their connections wait with nothing."""

import os
import socket
import subprocess
import time
from contextlib import suppress

import pytest

from ppdist.common.errors import RankError
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm, store
from tests.distributed import run_on_ranks


def delayed(_):
    """Of each TCP connection of a rank that has met the others, whether it holds messages back."""
    comm.init("cpu", DistributedConfig())
    comm.barrier()
    found = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket
            connection = socket.socket(fileno=os.dup(int(file)))
            if connection.family == socket.AF_UNIX:
                continue
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    comm.barrier()
    return found


def test_store_small_messages_do_not_wait_for_large():
    of_rank_0, of_rank_1 = run_on_ranks(2, "tests.unit.distributed.test_store_barriers:delayed")
    assert len(of_rank_0) >= 3 and of_rank_1  # rank 0 serves itself and the other
    assert not any(of_rank_0) and not any(of_rank_1)


def stopped(_):
    """Both ranks are stopped while rank 1 waits for an answer of the store, which rank 0 holds."""
    comm.init("cpu", DistributedConfig())
    processes = comm.all_gather_object(os.getpid())
    if comm.rank() == 0:
        signals = [("STOP", each) for each in processes], [("CONT", each) for each in processes]
        sent = [*signals[0], *signals[1], *signals[0], *signals[1][::-1]]
        script = "; ".join(f"kill -{name} {process}; sleep 0.3" for name, process in sent)
        subprocess.run(["sh", "-c", script], check=True)
    return comm.all_gather_object("here")


@pytest.mark.slow
def test_training_paused_in_barrier_continues():
    assert (
        run_on_ranks(2, "tests.unit.distributed.test_store_barriers:stopped")
        == [["here", "here"]] * 2
    )


def work_long(_):
    """Rank 0 works for three times the timeout and shows life, then as long without a sign."""
    store.set_timeout(0.5)

    def work(lives):
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            time.sleep(0.05)
            if lives:
                store.alive()
        return time.monotonic() - began

    said = [store.run_on_main(lambda: work(True))]
    if comm.is_main():
        work(True)
    store.barrier()
    began = time.monotonic()
    try:
        store.run_on_main(lambda: work(False))
    except RankError as error:
        said += [error.code, time.monotonic() - began]
    return said


@pytest.mark.slow
def test_rank_that_shows_life_is_waited_for_and_hung_one_not():
    of_rank_0, of_rank_1 = run_on_ranks(2, "tests.unit.distributed.test_store_barriers:work_long")
    assert of_rank_0 == of_rank_1[:1] and of_rank_0[0] >= 1.5
    code, waited = of_rank_1[1:]
    assert code == "rank_timeout" and 0.5 <= waited < 1.2
