"""Digests of a host's code, configuration and data, compared before a returning host joins.

Rank 0 notes the digests of its run with the job.  The returning host computes its own in a child
process (`ppdist train ... --digests FILE`) without joining, before other hosts stop for it.
"""

import json
from pathlib import Path

from ppdist.common import addresses
from ppdist.common.files import digest_of_text, replace_file
from ppdist.common.job import DIGESTS_NOTE, write_note
from ppdist.common.retry import unavailable
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.types import DetectionSet
from ppdist.engine.data import fingerprint, read_unshared
from ppdist.engine.preflight import digests_of_code, flat_config, inputs_of, versions
from ppdist.storage.files import STORAGE

Digests = dict[str, str]  # by part, such as `config data.root`


def note_digests(
    config: ExperimentConfig, train_set: DetectionSet, val_set: DetectionSet | None
) -> None:
    """Records, on rank 0's host, the digests of a run that continues without lost hosts.

    Args: config: the configuration as the user wrote it, before anything was resolved.
    """
    write_note(DIGESTS_NOTE, _compute_digests(config, train_set, val_set))


def write_digests(file: Path, config: ExperimentConfig, *, evaluate: bool, fitted: bool) -> None:
    """Writes the digests of this host.

    Args:
        evaluate: read the validation set, too.
        fitted: True if the configuration depends on the number of ranks; it is then left out of the
            digests.
    Raises: UserError: the data cannot be read; StorageError: an input is not available on this
        host.
    """
    # First, so that a missing mount is reported as such, not as missing annotations.
    for path in inputs_of(config, evaluate=evaluate):
        if not addresses.is_remote(path) and not STORAGE.can_be_read(path):
            raise unavailable("cannot be read on this host", f"{path}")
    train_set, val_set = read_unshared(config.data, config.model.num_classes, evaluate)
    digests = _compute_digests(config, train_set, val_set)
    if fitted:
        digests = {name: digests[name] for name in digests if not name.startswith("config ")}
    replace_file(file, json.dumps(digests).encode())


def _compute_digests(
    config: ExperimentConfig, train_set: DetectionSet, val_set: DetectionSet | None
) -> Digests:
    parts = {"version": versions(), "code": digests_of_code(), "config": flat_config(config)}
    facts = {
        f"{part} {name}": value for part, items in parts.items() for name, value in items.items()
    }
    for name, dataset in (("data.train", train_set), ("data.val", val_set)):
        if dataset is not None:
            facts[f"data {name}"] = fingerprint(dataset, config.data.root)
    return {name: digest_of_text(value) for name, value in facts.items()}
