"""The HTTP service of deploy/serving: answers, batches, limits, who may ask."""

import asyncio
import fcntl
import io
import json
import os
import re
import termios
import threading
import time
from array import array
from collections.abc import AsyncIterator

import numpy as np
import pytest
from PIL import Image

from tests.deploy.fake_model import BOX, FakeModel, encoded, picture
from tests.deploy.serving_cases import (  # fmt: skip
    JPEG,
    PNG,
    TERMINAL,
    WAIT,
    Limits,
    Lines,
    Service,
    ask,
    ask_together,
    httpx,
    make_app,
    served,
    wait_until,
)

# --- answers ------------------------------------------------------------------------------------


def test_answer_has_size_classes_and_pixel_boxes():
    with served() as (_, client):
        answer = ask(client, "POST", "/detect", content=PNG)
    assert answer.status_code == 200
    assert answer.json() == {
        "width": 120,
        "height": 80,
        "model": FakeModel().identity,
        "objects": [
            {"class": "thing", "category_id": 1, "score": 0.9, "box": [float(v) for v in BOX]}
        ],
    }


def test_form_and_plain_bytes_give_same_answer():
    with served() as (_, client):
        answers = [
            ask(client, "POST", "/detect", content=PNG),
            ask(client, "POST", "/detect", content=PNG,
                headers={"content-type": "application/x-www-form-urlencoded"}),
            ask(client, "POST", "/detect", files={"image": ("a.png", PNG, "image/png")}),
            ask(client, "POST", "/detect", data={"note": "x"}, files={"f": ("../../a", PNG)}),
        ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.text for answer in answers}) == 1


def test_rotated_image_is_answered_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter to the right
    file = io.BytesIO()
    Image.fromarray(np.rot90(picture())).save(file, "JPEG", quality=95, exif=exif)
    with served() as (_, client):
        answer = ask(client, "POST", "/detect", content=file.getvalue()).json()
    assert (answer["width"], answer["height"]) == (120, 80)
    assert answer["objects"][0]["box"] == pytest.approx(BOX, abs=2)


def test_the_threshold_of_the_request_counts():
    with served() as (_, client):
        counts = {
            threshold: len(
                ask(client, "POST", f"/detect?threshold={threshold}", content=PNG).json()["objects"]
            )
            for threshold in ("0", "0.3", "0.31", "0.95")
        }
        wrong = [
            ask(client, "POST", f"/detect?threshold={text}", content=PNG)
            for text in ("2", "-1", "nan", "much", "")
        ]
        counted = ask(client, "GET", "/metrics").text
    # 0.3 as float32 is a little more than 0.3.
    assert counts == {"0": 2, "0.3": 2, "0.31": 1, "0.95": 0}
    assert {answer.status_code for answer in wrong} == {400}
    assert 'request_seconds_count{status="400"} 5.0' in counted
    assert all("threshold" in answer.json()["error"] for answer in wrong)


def test_a_classifier_names_its_surest_classes():
    with served(FakeModel("classify")) as (_, client):
        answer = ask(client, "POST", "/detect", content=PNG).json()
    assert [one["score"] for one in answer["classes"]] == [0.75, 0.25]
    assert answer["classes"][1] == {"class": "thing", "category_id": 1, "score": 0.25}


# --- batches, limits, time ----------------------------------------------------------------------


def test_requests_of_one_moment_share_batches():
    model = FakeModel(seconds=0.05)
    with served(model, most_batch=4, most_delay=1.0) as (service, client):
        answers = ask_together(client, [PNG] * 12)
        assert [answer.status_code for answer in answers] == [200] * 12
        (counted,) = service.counts.images.collect()
        assert {
            sample.name: sample.value for sample in counted.samples if sample.name.endswith("_sum")
        } == {"ppdist_serving_batch_images_sum": 12}
    assert sum(model.batches) == 12
    assert max(model.batches) == 4 and len(model.batches) <= 6


def test_the_model_gets_only_batches_of_sizes_it_has_seen():
    """A runtime that compiles a model for each size compiles none amid requests."""
    model = FakeModel()
    with served(model, most_batch=24, most_delay=1.0, most_waiting=100) as (_, client):
        for count in (1, 3, 7, 23, 31):
            answers = ask_together(client, [PNG] * count)
            assert [answer.status_code for answer in answers] == [200] * count
    assert model.warm == [24, 16, 8, 4, 2, 1]
    assert sum(model.batches) == 65 and set(model.batches) <= set(model.warm)


def test_a_request_alone_waits_for_no_others():
    with served(most_delay=WAIT) as (_, client):
        started = time.monotonic()
        assert ask(client, "POST", "/detect", content=PNG).status_code == 200
    assert time.monotonic() - started < WAIT / 2


def test_an_image_that_breaks_the_model_fails_alone():
    broken = encoded(np.zeros((17, 17, 3), np.uint8))
    unlucky = encoded(np.zeros((13, 13, 3), np.uint8))
    model = FakeModel()
    with served(model, most_delay=1.0) as (service, client):
        answers = ask_together(client, [PNG, broken, JPEG, unlucky])
        assert service.find_problem() is None
    assert [answer.status_code for answer in answers] == [200, 500, 200, 422]
    assert answers[1].json().keys() == {"error"}
    assert max(model.batches) > 1


def test_requests_over_capacity_are_told_to_retry():
    model = FakeModel(seconds=0.2)
    with served(model, most_waiting=3, most_batch=1) as (_, client):
        answers = ask_together(client, [PNG] * 8)
        later = ask(client, "POST", "/detect", content=PNG)
    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == [200] * 3 + [503] * 5
    refused = answers[statuses.index(503)]
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"].startswith("3 requests")
    assert later.status_code == 200


def test_a_body_that_does_not_come_ends_in_408():
    async def slow() -> AsyncIterator[bytes]:
        yield PNG[:20]
        await asyncio.sleep(WAIT)

    with served(seconds=0.3) as (service, client):
        answer = ask(client, "POST", "/detect", content=slow())
        assert service.under_way == 0
    assert answer.status_code == 408 and "too long" in answer.json()["error"]


def test_a_body_that_trickles_ends_in_408(monkeypatch):
    monkeypatch.setattr("service._GRACE_SECONDS", 0.1)
    sent = []

    async def trickle() -> AsyncIterator[bytes]:
        while True:  # each byte in time for a bound on pauses
            sent.append(1)
            yield b"x"
            await asyncio.sleep(0.01)

    with served(least_rate=1000) as (service, client):
        answer = ask(client, "POST", "/detect", content=trickle())
        assert service.under_way == 0
    assert answer.status_code == 408 and "1000 bytes" in answer.json()["error"]
    assert len(sent) < 100


def test_slow_model_gives_504_without_blocking():
    model = FakeModel(seconds=1.0)
    with served(model, seconds=0.3, most_batch=1) as (service, client):
        answers = ask_together(client, [PNG] * 4)
        assert {answer.status_code for answer in answers} == {504}
        wait_until(lambda: service.find_problem() is not None)
        assert "computing one batch" in ask(client, "GET", "/health").json()["reason"]
        wait_until(lambda: service.find_problem() is None)
        model.seconds = 0.0
        assert ask(client, "POST", "/detect", content=PNG).status_code == 200
    assert model.batches == [1, 1]  # what was given up is not computed


def test_slow_decoder_is_reported_without_blocking(monkeypatch):
    go_on = threading.Event()

    def stuck(content: bytes, most_pixels: int) -> np.ndarray:
        assert content != PNG or go_on.wait(WAIT)
        return picture()

    monkeypatch.setattr("service.decode", stuck)
    try:
        with served(seconds=0.3) as (service, client):
            answers = ask_together(client, [PNG, JPEG])
            assert [answer.status_code for answer in answers] == [504, 200]
            wait_until(lambda: service.find_problem() is not None)
            assert "decoded" in (service.find_problem() or "")
            go_on.set()
            wait_until(lambda: service.find_problem() is None)
    finally:
        go_on.set()


def test_alive_while_loading_and_ready_when_warm():
    go_on = threading.Event()
    model = FakeModel()

    def load() -> FakeModel:
        assert go_on.wait(WAIT)
        return model

    service = Service(load, Limits(most_batch=3))
    app = make_app(service)

    def client() -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")

    service.batcher.start()
    try:
        assert ask(client, "GET", "/health").status_code == 200
        assert ask(client, "GET", "/ready").json() == {"ready": False, "model": None}
        refused = ask(client, "POST", "/detect", content=PNG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        go_on.set()
        wait_until(lambda: ask(client, "GET", "/ready").status_code == 200)
        assert ask(client, "POST", "/detect", content=PNG).status_code == 200
    finally:
        go_on.set()
        service.stop()
    assert ask(client, "GET", "/ready").status_code == 503
    assert "thread of the model" in ask(client, "GET", "/health").json()["reason"]


# --- who may ask, and what is told --------------------------------------------------------------


def test_the_token_is_asked_for_where_there_is_one():
    with served(token="s3cret") as (_, client):

        def status(path: str, method: str = "GET", **headers: str) -> int:
            content = PNG if method == "POST" else None
            return ask(client, method, path, headers=headers, content=content).status_code

        wrong = ["", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cre", "Bearer s3cretx"]
        for given in wrong:
            assert status("/detect", "POST", Authorization=given) == 401
            assert status("/detect?threshold=x", "POST", Authorization=given) == 401
            assert status("/metrics", Authorization=given) == 401
        foreign = ask(
            client, "POST", "/detect", headers=[(b"authorization", b"Bearer \xff\xe9")], content=PNG
        )
        assert foreign.status_code == 401 and foreign.headers["www-authenticate"] == "Bearer"
        assert status("/detect", "POST", Authorization="Bearer s3cret") == 200
        assert status("/metrics", Authorization="bearer s3cret") == 200
        assert [status(path) for path in ("/docs", "/health", "/ready")] == [200] * 3


def test_the_metrics_are_what_prometheus_reads():
    from prometheus_client.parser import text_string_to_metric_families

    with served() as (_, client):
        ask(client, "POST", "/detect", content=PNG)
        ask(client, "POST", "/detect", content=b"text")
        text = ask(client, "GET", "/metrics").text
    values = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["ppdist_serving_request_seconds_count", ("200",)] == 1
    assert values["ppdist_serving_request_seconds_count", ("415",)] == 1
    assert values["ppdist_serving_ready", ()] == 1
    assert values["ppdist_serving_model_info", ("fake", "ab" * 32)] == 1
    assert values["ppdist_serving_requests_under_way", ()] == 0
    assert values["ppdist_serving_images_waiting", ()] == 0
    assert values["ppdist_serving_batch_images_count", ()] == 1
    assert values["process_resident_memory_bytes", ()] > 10**7


def test_each_request_is_named_traced_and_logged_once():
    lines: list[str] = []
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    sent = [
        ({"X-Request-ID": "job-7", "traceparent": trace}, "job-7", trace),
        ({"X-Request-ID": 'a"b\x7f', "traceparent": trace.replace("4", "g")}, None, None),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, None, None),
    ]
    with served(log=lines.append) as (_, client):
        for headers, name, trace_back in sent:
            answer = ask(client, "POST", "/detect?threshold=0.5", content=PNG, headers=headers)
            line = json.loads(lines.pop())
            given = answer.headers["x-request-id"]
            assert given == name if name else re.fullmatch("[0-9a-f]{32}", given)
            assert answer.headers.get("traceparent") == line["traceparent"] == trace_back
            assert (line["request_id"], line["method"]) == (given, "POST")
            assert (line["path"], line["status"]) == ("/detect", 200)
            assert line["bytes_sent"] == len(answer.content) and 0 < line["seconds"] < WAIT
        assert ask(client, "POST", "/detect", content=b"x").headers["x-request-id"]
        assert json.loads(lines.pop())["status"] == 415
        for method in ("GET", "HEAD"):  # probes are no news
            assert ask(client, method, "/health").status_code == 200
            assert ask(client, method, "/ready").status_code == 200
        assert lines == []


def unread(pipe: int) -> int:
    """Bytes in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def test_access_log_drops_lines_and_says_so_where_nobody_reads(monkeypatch):
    reads, writes = os.pipe()
    monkeypatch.setattr(TERMINAL, "_most_bytes", 50_000)
    with os.fdopen(reads) as reader, os.fdopen(writes, "w") as stream:
        lines = Lines(stream)
        for number in range(3000):  # more than a pipe holds, and that
            lines(f"{number:0100}")
            if number == 300:
                wait_until(lambda: TERMINAL.waiting == 0)
            if number == 700:  # from here on nothing leaves the queue, so the last line is lost
                wait_until(lambda: unread(reads) > 60_000)
        lines.close(0.01)
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.extend(iter(reader.readline, "last\n")))
        thread.start()
        wait_until(lambda: TERMINAL.waiting == 0)
        lines("after")
        lines("last")
        thread.join(WAIT)
    lost = [json.loads(line)["lines_lost"] for line in seen if line.startswith("{")]
    assert seen[-1] == "after\n" and seen[-2].startswith("{")
    assert sum(lost) == 3000 - (len(seen) - len(lost) - 1) > 1000


def test_api_describes_every_route():
    with served() as (_, client):
        described = ask(client, "GET", "/openapi.json").json()
        page = ask(client, "GET", "/docs")  # with words for where Swagger's CDN is not reached
        assert page.status_code == 200 and '<a href="openapi.json">' in page.text
    assert set(described["paths"]) == {"/detect", "/health", "/ready", "/metrics"}
    taken = described["paths"]["/detect"]["post"]
    assert set(taken["requestBody"]["content"]) == {"image/*", "multipart/form-data"}
    assert [each["name"] for each in taken["parameters"]] == ["threshold"]


def test_other_paths_methods_and_origins_are_refused():
    origin = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    with served() as (_, client):
        answers = [
            ask(client, "GET", "/detect"),
            ask(client, "OPTIONS", "/detect", headers=origin),
            ask(client, "GET", "/redoc"),
            ask(client, "POST", "/detect", content=PNG, headers=origin),
        ]
    assert [answer.status_code for answer in answers] == [405, 405, 404, 200]
    assert all("error" in answer.json() for answer in answers[:-1])
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
