"""A training whose images lie in an object store that is slow, refuses and cuts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.convert import convert
from tests.faults.object_store import KEY, SECRET, FaultProxy, environment, object_store, upload
from tests.faults.scenario import FaultScenario, first_difference

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.slow


@pytest.fixture
def store() -> Iterator[FaultProxy]:
    with object_store() as proxy:
        yield proxy


@pytest.mark.parametrize("form, workers", [("files", 0), ("files", 1), ("shards", 1)])
def test_training_on_a_sick_store_equals_one_on_files(
    form: str,
    workers: int,
    scenario: FaultScenario,
    undisturbed: Path,
    store: FaultProxy,
    tmp_path: Path,
    record_property,
) -> None:
    folder = scenario.folder / "data"
    changes = []
    if form == "shards":
        splits = {
            name: SplitConfig(annotations=f"annotations/instances_{name}.json")
            for name in ("train", "val")
        }
        config = DataConfig(root=str(folder), **splits)
        for name in splits:
            raw = read_raw(config, name, ignore_issue)
            convert(raw, "coco", tmp_path / "s", images="copy", split=name, shard_bytes=30_000)
            changes.append(f"data.{name}.images=images/{name}")
        folder = tmp_path / "s"
    root = upload(store, folder, form)
    store.faults = [503, "cut", "reset", 1.0, 503, 500]
    overrides = [f"data.root={root}", f"data.workers={workers}"]
    variables = {**environment(store), "XDG_CACHE_HOME": f"{tmp_path}/c"}
    name = f"store-{form}-{workers}"
    with scenario.job(name, overrides=[*overrides, *changes], variables=variables) as job:
        assert job.wait() == 0, job.text
    assert job.steps == list(range(1, scenario.steps + 1)), job.text
    assert first_difference(undisturbed, job.output_dir) == ""
    assert set(store.struck) == {"503", "cut", "reset", "1.0", "500"}
    assert SECRET not in job.text and KEY not in job.text and "Signature" not in job.text
    assert "cannot be used" not in job.text
    record_property("figure", f"{sum(store.struck.values())} faults, 0 steps made again")
