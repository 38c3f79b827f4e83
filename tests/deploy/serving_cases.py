"""A service of deploy/serving inside this process, and how tests ask it."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.deploy.fake_model import SERVING, FakeModel, encoded, picture

for package in (
    "fastapi",
    "httptools",
    "httpx",
    "python_multipart",
    "prometheus_client",
    "uvicorn",
):
    pytest.importorskip(package)
import httpx  # noqa: E402

sys.path[:0] = [str(SERVING), str(SERVING.parent / "python")]
from access_log import TERMINAL, Lines  # noqa: E402, F401
from server import make_app  # noqa: E402
from service import Limits, Service  # noqa: E402

PNG = encoded(picture())
JPEG = encoded(picture(), ".jpg")
WAIT = 60.0  # a bound against hanging, seconds


@contextmanager
def served(
    model: FakeModel | None = None,
    token: str | None = None,
    log: Callable[[str], None] = lambda line: None,
    **limits: float,
) -> Iterator[tuple[Service, Callable[..., httpx.AsyncClient]]]:
    """A service that is ready, and what makes clients of it."""
    model = model or FakeModel()
    service = Service(lambda: model, Limits(**limits))  # type: ignore[arg-type]
    service.batcher.start()
    try:
        wait_until(lambda: service.batcher.model is not None)
        app = make_app(service, token, log)

        def client() -> httpx.AsyncClient:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            return httpx.AsyncClient(transport=transport, base_url="http://here")

        yield service, client
    finally:
        service.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def ask(client: Callable[..., httpx.AsyncClient], method: str, path: str, **options):
    async def one() -> httpx.Response:
        async with client() as session:
            return await session.request(method, path, **options)

    return asyncio.run(one())


def ask_together(client: Callable[..., httpx.AsyncClient], bodies: list[bytes]):
    async def all_of_them() -> list[httpx.Response]:
        async with client() as session:
            return await asyncio.gather(*(session.post("/detect", content=body) for body in bodies))

    return asyncio.run(all_of_them())
