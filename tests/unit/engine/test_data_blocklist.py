"""Images that turn out bad in training: all ranks count the same ones, and stop together."""

from pathlib import Path

import pytest

from ppdist.common.errors import DataError
from ppdist.config.distributed import DistributedConfig
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine import data
from ppdist.engine.build import build_training
from tests.distributed import run_on_ranks
from tests.unit.engine.runs import records
from tests.unit.engine.tiny import FASTEST, tiny_config

UNCHECKED = (
    "train.batch_size_per_card=2", "train.epochs=2", "log.every_steps=1",
    "data.check_images=none", "optimizer.reference_batch_size=4",
)  # fmt: skip


def write_shapes(folder: Path, damaged: int) -> list[str]:
    """Ten training images, the first of them cut short; returns their names."""
    make_shapes(folder, train=10, val=2, size=64, seed=0)
    files = sorted((folder / "images" / "train").iterdir())[:damaged]
    for file in files:
        file.write_bytes(file.read_bytes()[:-100])
    return [file.name for file in files]


def train(folder: Path, output_dir: Path, *overrides: str) -> tuple[str, int]:
    """How a run ended ("" where it did not fail), and how many bad images it knew."""
    comm.init("cpu", DistributedConfig())
    config = tiny_config(folder, [*UNCHECKED, *overrides], FASTEST)
    try:
        experiment = build_training(config, output_dir=output_dir, evaluate=False, command=["test"])
    except DataError as error:
        return f"before: {error}", 0
    with experiment.log:
        try:
            experiment.trainer.fit()
        except DataError as error:
            return str(error), len(experiment.trainer.state.run.bad_images)
    return "", len(experiment.trainer.state.run.bad_images)


def on_a_rank(argument):
    """Each rank has its data at a place of its own, as on hosts that mount them differently."""
    folder = Path(argument) / str(comm.rank())
    message, known = train(folder, Path(argument) / "run")
    return message.replace(str(folder), "ROOT"), known


def two_roots(folder: Path, damaged: int) -> list[str]:
    write_shapes(folder / "0", damaged)
    return write_shapes(folder / "1", damaged)


def test_two_ranks_stop_with_same_blocklist_at_limit(tmp_path):
    names = two_roots(tmp_path, damaged=2)  # in an epoch one rank may meet one, one the other
    first, second = run_on_ranks(2, f"{__name__}:on_a_rank", str(tmp_path))
    assert first == second
    message, known = first
    assert known == 2 and all(name in message for name in names)
    assert "2 of 10 images" in message
    assert "--fix" in message


@pytest.mark.slow
def test_image_at_different_host_paths_counts_once(tmp_path):
    two_roots(tmp_path, damaged=1)
    assert run_on_ranks(2, f"{__name__}:on_a_rank", str(tmp_path)) == [["", 1], ["", 1]]


def test_bad_images_up_to_limit_are_replaced(tmp_path, record_property, monkeypatch):
    monkeypatch.setattr(data, "BAD_SHARE", 0.3)
    write_shapes(tmp_path, damaged=3)
    assert train(tmp_path, tmp_path / "run") == ("", 3)
    assert any(record.get("bad_images") == 3 for record in records(tmp_path / "run"))
    record_property("figure", "3 of 3 replaced and counted")


@pytest.mark.parametrize("how", ["header", "decode"])
def test_too_many_bad_images_stop_before_first_step(how, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    names = write_shapes(tmp_path, damaged=2)
    message, _ = train(tmp_path, tmp_path / "run", f"data.check_images={how}")
    assert message.startswith("before: ") and all(name in message for name in names)
    assert not (tmp_path / "run").exists()


def test_sampling_by_difficulty_asks_for_evaluations(tmp_path):
    write_shapes(tmp_path, damaged=0)
    config = tiny_config(tmp_path, [*UNCHECKED, "data.sampling.name=difficulty"])
    with pytest.raises(ValueError, match="needs the scores of evaluations; start with --eval"):
        build_training(config, output_dir=tmp_path / "run", evaluate=False, command=["test"])


def test_pasting_objects_asks_for_outlines(tmp_path):
    write_shapes(tmp_path, damaged=0)
    message, _ = train(tmp_path, tmp_path / "run", "data.augment.copy_paste=0.5")
    assert "data.augment.copy_paste: 0.5" in message
