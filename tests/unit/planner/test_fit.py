"""Fits find what made the rows; files of measurements become rows, rates and links."""

import json
from dataclasses import replace

import pytest

from ppdist.planner.fit import Row, fit, left_out, read_benchmarks, read_links
from ppdist.planner.predict import Link, slowest_of
from tests.errors import raises


def made(fixed, image, jitter, parallel, shapes):
    return [
        Row(n, b, (fixed + b * image) * (1 + jitter * slowest_of(n)) + parallel * (n > 1), 0.0)
        for n, b in shapes
    ]


SHAPES = ((1, 4), (1, 16), (2, 8), (4, 16), (8, 4))


def test_a_fit_finds_the_numbers_that_made_the_rows():
    found = fit(made(0.005, 0.01, 0.07, 0.012, SHAPES))
    assert found.fixed_seconds == pytest.approx(0.005, rel=1e-3)
    assert found.image_seconds == pytest.approx(0.01, rel=1e-3)
    assert found.jitter == pytest.approx(0.07, abs=1e-4)
    assert found.parallel_seconds == pytest.approx(0.012, rel=1e-2)
    assert all(abs(error) < 1e-3 for error in left_out(made(0.005, 0.01, 0.07, 0.012, SHAPES)))


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


def test_known_communication_is_taken_off_before_the_fit():
    rows = [Row(1, 8, 0.1), replace(Row(2, 8, 0.15), known=0.04)]
    assert fit(rows).parallel_seconds == pytest.approx(0.01)


@pytest.mark.parametrize("rows", [[], [Row(1, 8, 0.0)], [Row(2, 8, 0.1, known=0.2)]])
def test_rows_that_measured_nothing_are_refused(rows):
    with raises("rows_do_not_fit"):
        fit(rows)


# Files


def trained(seconds, images, data=0.0, **more):
    parts = {"data": data, "forward": seconds - data}
    variant = {"step_seconds": seconds, "images_per_step": images, "seconds": parts}
    return {"variants": {"base": variant}, **more}


def write(folder, name, what, result, ranks=1, device="cpu"):
    path = folder / f"{name}.json"
    machine = {"ranks": ranks, "device": device}
    path.write_text(json.dumps({"what": what, "result": result, "machine": machine}))
    return path


def test_benchmark_files_become_rows_and_rates(tmp_path):
    paths = [
        write(tmp_path, "one", "train", trained(0.5, 8, data=0.1, parameters=7_900_000)),
        write(tmp_path, "two", "train", trained(0.6, 16), 2),
        write(tmp_path, "both", "scaling", {
            "1": {"images_per_second": 20.0, "last_round": trained(0.5, 8)},
            "2": {"images_per_second": 32.0, "last_round": trained(0.6, 16)},
            "machine_limit": 0.99,
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
    torn = write(tmp_path, "torn", "train", {"variants": {}})
    with raises("not_a_benchmark", "torn.json"):
        read_benchmarks([torn])
    (tmp_path / "list.json").write_text("[1]")
    with raises("not_json", "list.json"):
        read_benchmarks([tmp_path / "list.json"])
    with raises("not_json", "none.json", "No such file"):
        read_benchmarks([tmp_path / "none.json"])


def test_a_doctor_report_gives_links(tmp_path):
    path = tmp_path / "doctor.json"
    ring = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 3e9}
    pairs = [
        {"hosts": hosts, "latency_seconds": 2e-6, "bytes_per_second": rate}
        for hosts, rate in ((["a", "a"], 8e9), (["b", "b"], 9e9), (["a", "b"], 3e9))
    ]
    for hosts, links, expected in (
        (["a", "a"], pairs[:1], (Link(1e-5, 3e9), None)),
        (["a", "a", "b", "b"], pairs, (Link(2e-6, 8.5e9), Link(1e-5, 3e9))),
        (["a", "b"], pairs[2:], (None, Link(1e-5, 3e9))),
    ):
        path.write_text(json.dumps({**ring, "hosts": hosts, "links": links}))
        assert read_links(path) == expected
    path.write_text(json.dumps({"latency_seconds": None, "bandwidth_bytes_per_second": None}))
    with raises("not_a_doctor_report", "doctor.json"):
        read_links(path)
