"""Fits find what made the rows; files of measurements become rows, rates and links."""

import json

import pytest

from ppdist.lab.planner.fit import Row, fit, read_benchmarks, read_link
from ppdist.lab.planner.model import Link, slowest_of
from tests.errors import raises


def made(fixed, image, jitter, parallel, shapes):
    return [
        Row(n, b, (fixed + b * image) * (1 + jitter * slowest_of(n)) + parallel * (n > 1))
        for n, b in shapes
    ]


SHAPES = ((1, 4), (1, 16), (2, 8), (4, 16), (8, 4))


def test_a_fit_finds_the_numbers_that_made_the_rows():
    found = fit(made(0.005, 0.01, 0.07, 0.012, SHAPES))
    assert found.fixed_seconds == pytest.approx(0.005, rel=1e-3)
    assert found.image_seconds == pytest.approx(0.01, rel=1e-3)
    assert found.jitter == pytest.approx(0.07, abs=1e-4)
    assert found.parallel_seconds == pytest.approx(0.012, rel=1e-2)


def test_a_fit_leaves_out_what_its_rows_cannot_tell():
    names = {shapes: fit(made(0.0, 0.01, 0.1, 0.01, shapes)).parameters for shapes in (
        ((1, 8),), ((1, 8), (2, 8)), ((1, 8), (1, 16)), ((1, 8), (2, 8), (4, 8)), ((2, 8), (4, 8)),
    )}  # fmt: skip
    assert [*names.values()] == [
        ("image",), ("image", "parallel"), ("image", "fixed"), ("image", "parallel", "jitter"),
        ("image", "jitter"),
    ]  # fmt: skip


def test_no_fitted_number_is_below_zero():
    falling = [Row(1, 8, 0.1), Row(1, 16, 0.3), Row(2, 8, 0.05), Row(4, 8, 0.04)]
    found = fit(falling)
    assert min(found.fixed_seconds, found.image_seconds, found.jitter, found.parallel_seconds) >= 0


@pytest.mark.parametrize("rows", [[], [Row(1, 8, 0.0)], [Row(1, 0, 0.1)]])
def test_rows_that_measured_nothing_are_refused(rows):
    with raises("rows_do_not_fit"):
        fit(rows)


# Files


def trained(seconds, images, data=0.0):
    parts = {"data": data, "forward": seconds - data}
    return {"step_seconds": seconds, "images_per_step": images, "seconds": parts,
            "parameters": 7_900_000}  # fmt: skip


def write(folder, name, what, result, ranks=1, device="cpu"):
    path = folder / f"{name}.json"
    machine = {"ranks": ranks, "device": device}
    path.write_text(json.dumps({"what": what, "result": result, "machine": machine}))
    return path


def test_benchmark_files_become_rows_and_rates(tmp_path):
    paths = [
        write(tmp_path, "one", "train", trained(0.5, 8, data=0.1)),
        write(tmp_path, "two", "train", trained(0.6, 16), 2),
        write(tmp_path, "both", "scaling", {
            "1": {"images_per_second": 20.0, "last_round": trained(0.5, 8)},
            "2": {"images_per_second": 32.0, "last_round": trained(0.6, 16)},
        }),
        write(tmp_path, "loader", "loader", {"images_per_second": 90.0}),
    ]  # fmt: skip
    found = read_benchmarks(paths)
    assert found.rows == [Row(1, 8, 0.4), Row(2, 8, 0.6), Row(1, 8, 0.4), Row(2, 8, 0.5)]
    assert found.parameters == 7_900_000 and found.card_input == 90
    assert found.on_cpu
    gpu = write(tmp_path, "gpu", "train", trained(0.5, 8), 2, "gpu:0")
    assert read_benchmarks([gpu]).rows == [Row(2, 4, 0.5)] and not read_benchmarks([gpu]).on_cpu


def test_files_that_are_no_benchmark_are_named(tmp_path):
    wrong = write(tmp_path, "eval", "eval", {})
    with raises("not_a_benchmark", "eval.json", "'eval'"):
        read_benchmarks([wrong])
    torn = write(tmp_path, "torn", "train", {"images_per_step": 8})
    with raises("not_a_benchmark", "torn.json"):
        read_benchmarks([torn])
    (tmp_path / "list.json").write_text("[1]")
    with raises("not_json", "list.json"):
        read_benchmarks([tmp_path / "list.json"])
    with raises("not_json", "none.json", "No such file"):
        read_benchmarks([tmp_path / "none.json"])


def test_a_doctor_report_gives_the_link_between_hosts(tmp_path):
    path = tmp_path / "doctor.json"
    ring = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 3e9}
    path.write_text(json.dumps({**ring, "hosts": ["a", "a", "b", "b"]}))
    assert read_link(path) == Link(1e-5, 3e9)
    for other in ({**ring, "hosts": ["a", "a"]}, {"hosts": ["a", "b"], "latency_seconds": None}):
        path.write_text(json.dumps(other))
        with raises("not_a_doctor_report", "doctor.json"):
            read_link(path)
