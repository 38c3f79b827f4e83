"""What evaluation.json says of which class was taken for which."""

from typing import Any

import numpy as np

MOST_WHOLE = 200  # rows of a matrix that is written field by field
_MOST_CELLS = 20_000


def confusion_table(true_K: np.ndarray, called_K: np.ndarray, size: int) -> dict[str, Any]:
    """Counts what was called what.

    Args:
        true_K, called_K: classes in [0, size).
    Returns: `counts`, int [size][size], rows are true; or, of more than MOST_WHOLE rows, because
        the whole grows with their square: `cells`, (true, called, count) of the 20,000 largest,
        the largest first, and `true_counts`, int [size], the sums of whole rows.
    """
    cells, counts = np.unique(true_K * size + called_K, return_counts=True)
    if size <= MOST_WHOLE:
        whole = np.zeros(size * size, np.int64)
        whole[cells] = counts
        return {"counts": whole.reshape(size, size).tolist()}
    largest = np.argsort(-counts, kind="stable")[:_MOST_CELLS]
    rows = np.stack([cells[largest] // size, cells[largest] % size, counts[largest]], axis=1)
    return {"cells": rows.tolist(), "true_counts": np.bincount(true_K, minlength=size).tolist()}
