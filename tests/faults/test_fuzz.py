"""A short pass of the fuzzer, and that it notices what it is for."""

import os
import pickle
import signal
import time

import pytest

from ppdist.common.errors import DataError
from tests.faults import fuzz as module
from tests.faults.fuzz import CANARY, Target, fuzz
from tests.faults.fuzz_targets import TARGETS

SEED = 30
CASES = {
    "images": 200, "annotations": 200, "configs": 40, "weights": 250, "checkpoints": 40,
    "http": 100, "lines": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files_are_read_or_refused(name, tmp_path, record_property) -> None:
    tally = fuzz(TARGETS[name], SEED, cases=CASES[name], keep=tmp_path)
    print(tally)
    record_property("figure", f"{name}: {tally.cases} cases, {len(tally.findings)} findings")
    assert tally.findings == []
    assert tally.cases == CASES[name]
    accepted = sum(n for end, n in tally.ends.items() if end.startswith("accepted"))
    assert CASES[name] / 20 < accepted < CASES[name]  # some get all the way, and some do not
    if name == "images":
        kinds = ("png", "apng", "jpg", "webp", "tif", "bmp")
        assert {f"accepted {kind}" for kind in kinds} <= {*tally.ends}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_minute_of_changed_files_ends_no_reader(name, tmp_path) -> None:
    tally = fuzz(TARGETS[name], SEED + 1, seconds=60 / len(TARGETS), keep=tmp_path)
    print(tally)
    assert tally.findings == []


def endless() -> None:
    while True:
        pass


class Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def refuse() -> str:
    raise DataError("no", code="image_empty")


READERS = {
    "a result": (lambda: "accepted", ""),
    "a refusal": (refuse, ""),
    "another error": (lambda: {}["world"], "other errors"),
    "the end of the process": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "crashes"),
    "a case without an end": (endless, "hangs"),
    "a case that waits": (lambda: time.sleep(60), "hangs"),
    "too much memory": (lambda: bytes(3 << 30) and "accepted", "other errors"),
    "a command": (lambda: os.system("true") and "accepted", "ran code"),
    "a pickle": (lambda: pickle.loads(pickle.dumps(Calls(f"touch {CANARY}"))), "ran code"),
    "its canary": (lambda: open(CANARY, "w").close(), "ran code"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_bad_end_is_found_and_kept(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "CPU_SECONDS", 0.2)
    if name == "a case that waits":
        monkeypatch.setattr(module, "CLOCK_SECONDS", 1.0)
    end, kind = READERS[name]

    def read(folder, files):
        assert (folder / "file").read_bytes() == files["file"]
        return end() if files["file"] == b"1" else "accepted"

    def make(rng):
        return {"file": b"%d" % rng.integers(2)}

    tally = fuzz(Target("t", make, read), SEED, cases=4, keep=tmp_path)
    bad = [index for index, _, _ in tally.findings]
    ones = [i for i in range(4) if module.rng_of(SEED, "t", i).integers(2)]
    assert ones and len(ones) < 4 and tally.cases == 4
    assert [found for _, found, _ in tally.findings] == [kind] * len(bad) and kind in str(tally)
    assert bad == (ones if kind else [])
    for index in bad:
        assert (tmp_path / f"t-{index}" / "file").read_bytes() == b"1"


def test_a_case_is_its_seed_target_and_number() -> None:
    for name, target in TARGETS.items():
        first, again, other = (
            [target.make(module.rng_of(seed, name, index)) for index in range(5)]
            for seed in (1, 1, 2)
        )
        assert first == again != other
