"""Sums through the memory of a host, on real ranks and against what sockets give."""

import mmap
import os
import signal
import threading
import time

import numpy as np
import paddle
import pytest

from ppdist.common.errors import RankError, failure_of
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import collectives, comm, heartbeat
from ppdist.distributed.shm_allreduce import SharedMemoryAllReduce
from ppdist.launch.outcome import RankEnd
from tests.distributed import run_on_ranks


def sums(argument):
    """Sums of tensors of odd sizes that do not fit one message, against the sum by sockets."""
    comm.init("cpu", DistributedConfig(bucket_mb=1))
    assert (collectives.routes.memory is not None) == argument["memory"]
    draw = np.random.default_rng(comm.rank())
    shapes = [(3,), (700, 1001), (1,), (5, 7), (400_000,)]
    ours = [paddle.to_tensor(draw.normal(size=shape).astype("float32")) for shape in shapes]
    transposed = paddle.to_tensor(draw.normal(size=(30, 50)).astype("float32")).t()
    ours.append(transposed)
    theirs, means = ([tensor.clone() for tensor in ours] for _ in range(2))
    small = comm.all_reduce_sum(paddle.to_tensor([1.0 + comm.rank(), float("nan")])).tolist()
    collectives.sum_tensors(ours)
    collectives.mean_tensors(means)
    collectives.mean_tensors([])
    for tensor in theirs:
        paddle.distributed.all_reduce(tensor)
    rows = comm.all_gather(paddle.to_tensor([[1.0 + comm.rank(), -0.0]]).t())
    assert rows.shape == [comm.world_size(), 2, 1]
    return {
        "rows": rows.tolist(),
        "small": small[0],
        "nan": small[1] != small[1],
        "mean": max(float((a / comm.world_size() - b).abs().max()) for a, b in zip(ours, means)),
        "error": max(float((a - b).abs().max()) for a, b in zip(ours, theirs)),
        "sum": [np.ascontiguousarray(tensor.numpy()).tobytes().hex()[-64:] for tensor in ours],
    }


def test_shm_sum_of_two_ranks_equals_sockets():
    first, second = run_on_ranks(
        2, "tests.unit.distributed.test_shm_allreduce:sums", {"memory": True}, hosts=1
    )
    assert first == second
    assert first["rows"] == [[[1.0], [-0.0]], [[2.0], [-0.0]]]
    assert first["small"] == 3.0 and first["nan"] and first["error"] == first["mean"] == 0.0


@pytest.mark.slow
def test_two_hosts_sum_in_memory_then_between_hosts():
    results = run_on_ranks(
        4, "tests.unit.distributed.test_shm_allreduce:sums", {"memory": True}, hosts=2
    )
    assert all(result == results[0] for result in results)
    assert results[0]["small"] == 10.0 and results[0]["error"] < 2e-6
    assert results[0]["mean"] == 0.0


def late(argument):
    """Rank 1 comes late, then too late, then not at all."""
    comm.init("cpu", DistributedConfig())
    me, said, one = comm.rank(), [], paddle.to_tensor([1.0])
    began, heard = time.monotonic(), []
    signal.signal(signal.SIGALRM, lambda number, frame: heard.append(time.monotonic() - began))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    time.sleep(2.0 * me)
    said.append(comm.all_reduce_sum(one).tolist())
    said.append(heard[0] < 1.5)
    collectives.routes.memory._timeout = 60.0 if me else 0.5
    comm.barrier()
    time.sleep(2.0 * me)
    for _ in range(2):  # rank 0 meets a rank that is late, then rank 1 one that has ended
        try:
            comm.all_reduce_sum(one)
        except RankError as error:
            said.append(f"{error.code}: {error}")
            break
    return [*said, os.getpid()]


@pytest.mark.slow
def test_wait_hears_signals_and_names_missing_rank():
    (*first, pid_0), (*second, pid_1) = run_on_ranks(
        2, "tests.unit.distributed.test_shm_allreduce:late", hosts=1
    )
    assert first[:2] == second[:2] == [[2.0], True]
    for text, code, named in ((first[2], "rank_timeout", pid_1), (second[2], "lost_rank", pid_0)):
        assert text.startswith(f"{code}: ") and f"(process {named} " in text


def test_awaited_rank_is_named_before_socket_timeout(monkeypatch):
    monkeypatch.setattr("ppdist.distributed.shm_allreduce._BETWEEN_HOSTS_SECONDS", 0.15)
    me = os.getpid()

    def wait(arrived):
        """What the first of two ranks is told when the other has arrived so often."""
        size = 3 * 64 + 3 * 64
        memory = SharedMemoryAllReduce(
            mmap.mmap(-1, size), rank=2, processes={2: me, 3: me}, message_bytes=64,
            timeout_seconds=0.4,
        )  # fmt: skip
        for cell, fact in enumerate((arrived, heartbeat.step(), 0, 2)):  # a sum of two values
            memory._counters[8 + cell] = fact
        values = np.ones(2, np.float32)
        with pytest.raises(RankError) as told:
            memory.sum([(values.ctypes.data, 2)], lambda sums_F: None)
        return str(told.value)

    assert "0.15 s" in wait(0) and "rank 3" in wait(0)
    # While the first rank of a host waits for other hosts, nobody of its own blames it.
    assert "0.4 s" in wait(2) and "rank 3" in wait(2)


def test_launcher_blames_late_rank_not_lost_rank():
    lost = failure_of(RankError("", code="lost_rank"))
    slow = failure_of(RankError("", code="rank_timeout"))
    assert RankEnd(1, 1, 1, lost, 0.0).is_consequence
    late = RankEnd(0, 0, 1, slow, 0.0)
    assert late.waited_for_peer and not late.is_consequence


def apart(argument):
    """Rank 1 leaves out a sum, or takes part in another one; then both wait at the same place."""
    comm.init("cpu", DistributedConfig())
    one, two = paddle.to_tensor([1.0]), paddle.to_tensor([1.0, 2.0])
    said = []
    for name in argument:
        comm.barrier()
        heartbeat.beat("step", 7)
        collectives.routes.memory._counters[8 * comm.rank()] = (
            collectives.routes.memory._arrivals
        ) = 100 * len(said)
        comm.barrier()
        try:
            if name == "left out" and comm.rank() == 1:
                heartbeat.beat("step", 8)  # the same sum, of the next step
                comm.all_reduce_sum(one)
            elif name == "another" and comm.rank() == 1:
                comm.all_gather(two)
            else:
                comm.all_reduce_sum(one)
        except RankError as error:
            assert error.code == "collectives_differ"
            said.append(str(error))
    return said


def test_ranks_in_different_collectives_report_which(record_property):
    began = time.monotonic()
    first, second = run_on_ranks(
        2, "tests.unit.distributed.test_shm_allreduce:apart", ["left out", "another"], hosts=1
    )
    record_property("seconds with the start of the ranks", round(time.monotonic() - began, 1))
    assert "of step 9" in first[0] and "of step 8" in first[0]
    assert "of step 9" in second[0] and "of step 8" in second[0]
    assert "a gather" in first[1]


def refuse(argument):
    """The first rank of the host has no memory to share."""
    if comm.rank() == 0:
        os.memfd_create = lambda name: os.open("/", os.O_RDONLY)  # nothing can be reserved there
    comm.init("cpu", DistributedConfig())
    return [
        collectives.routes.memory is None,
        comm.all_reduce_sum(paddle.to_tensor([1.0])).tolist(),
    ]


def test_unshareable_memory_falls_back_to_sockets():
    assert (
        run_on_ranks(2, "tests.unit.distributed.test_shm_allreduce:refuse", hosts=1)
        == [[True, [2.0]]] * 2
    )


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_summed_in_rank_order(monkeypatch, ranks, across):
    monkeypatch.setattr("ppdist.distributed.shm_allreduce._CHUNK_VALUES", 13)
    draw = np.random.default_rng(0)
    arrays = [[draw.normal(size=size).astype(np.float32) for size in (3, 100, 1, 70)]
              for _ in range(ranks)]  # fmt: skip
    expected = []
    for parts in zip(*arrays):
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        expected.append((total + np.float32(across)) * np.float32(1 / 3))
    memory = mmap.mmap(-1, (1 + ranks) * 64 + (ranks + 1) * 256)  # messages of 64 values
    processes = dict.fromkeys(range(ranks), os.getpid())
    failed = []

    def work(rank):
        try:
            own = SharedMemoryAllReduce(
                memory, rank=rank, processes=processes, message_bytes=256, timeout_seconds=20
            )
            places = [(each.ctypes.data, each.size) for each in arrays[rank]]
            own.sum(
                places, (lambda sums_F: np.add(sums_F, 1, out=sums_F)) if across else None, 1 / 3
            )
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for values in arrays:
        assert all(np.array_equal(a, b) for a, b in zip(values, expected))
