"""Rows and objects of all ranks, which may arrive minutes apart."""

import json
from typing import Any

import numpy as np
import paddle

from ppdist.distributed.collectives import all_gather
from ppdist.distributed.ranks import world_size
from ppdist.distributed.store import barrier


def all_gather_rows(rows_RK: np.ndarray) -> np.ndarray:
    """Concatenates the rows of all ranks in rank order.  Collective.

    The row counts R may differ between ranks, or be zero; K must be equal.  Ranks may arrive
    minutes apart.
    """
    if world_size() == 1:
        return rows_RK
    barrier()
    counts_W = all_gather(paddle.to_tensor([len(rows_RK)], dtype="int64")).numpy().ravel()
    padded = np.zeros((max(1, int(counts_W.max())), rows_RK.shape[1]), rows_RK.dtype)
    padded[: len(rows_RK)] = rows_RK
    gathered_WRK = all_gather(paddle.to_tensor(padded)).numpy()
    return np.concatenate([part[:count] for part, count in zip(gathered_WRK, counts_W)])


def all_gather_large_object(value: Any) -> list[Any]:
    """Gathers a JSON-serializable object from every rank, in rank order.  Collective.

    Ranks may arrive minutes apart.
    """
    line = f"{json.dumps(value)}\n".encode()
    bytes_R1 = all_gather_rows(np.frombuffer(line, np.uint8).reshape(-1, 1))
    return [json.loads(text) for text in bytes_R1.tobytes().decode().splitlines()]
