"""Serves an exported model over HTTP: python deploy/serving/server.py --model DIR

    curl --data-binary @image.jpg http://127.0.0.1:8000/detect

POST /detect gives boxes as JSON, GET /docs a page to try it; /health, /ready and /metrics are for
operators.  README.md beside this file has the details.
"""

import argparse
import asyncio
import hmac
import math
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# These signals are blocked, and received by a thread that waits for them.  So handlers that a
# runtime installs do not matter (importing Paddle replaces SIGTERM's with one that ends the
# process). It is done before the imports below: threads inherit the mask, and importing NumPy
# starts some.
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

import uvicorn  # noqa: E402
from fastapi import FastAPI, Request  # noqa: E402
from fastapi.openapi.docs import get_swagger_ui_html  # noqa: E402
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse  # noqa: E402
from prometheus_client import generate_latest  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402
from starlette.types import ASGIApp  # noqa: E402
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: E402

HERE = Path(__file__).resolve().parent
# An installed copy may keep the two folders elsewhere, but side by side.
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

from access_log import AccessLog, Lines  # noqa: E402
from batching import Model  # noqa: E402
from service import Limits, Service  # noqa: E402
from uploads import Refused  # noqa: E402

TOKEN = "PPDIST_SERVING_TOKEN"
_RETRY_AFTER = "1"  # second
_LAST_SECONDS = 0.5  # grace for requests on connections that were accepted just before the end
_LOG_SECONDS = 2.0  # for the reader of stdout to take the last lines
_OTHER_FILES = 64  # open files besides connections
_MOST_HEAD_BYTES = 64 * 1024  # of headers, or of chunks' extensions and trailers
_MOST_REQUEST_HEADERS = 100
_MOST_PIPELINED = 8  # requests on one connection that may wait behind another
# Every chunk costs Python time, so a body of one-byte chunks would take all of it.
_FREE_CHUNKS, _LEAST_MEAN_CHUNK = 100, 256  # bytes
_LOCAL = ("127.0.0.1", "::1", "localhost")

_DESCRIPTION = "Objects in images, by a model that ppdist has exported."
_DETECT = {  # describes the body, which `detect` reads itself, and the response
    "summary": "The objects of an image",
    "parameters": [
        {
            "name": "threshold",
            "in": "query",
            "description": "least score of an object; default: --threshold",
            "schema": {"type": "number", "minimum": 0, "maximum": 1},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "string", "format": "binary"}},
                }
            },
        },
    },
    "responses": {
        "200": {
            "description": "objects, best first; box: left, top, right, bottom in pixels of the "
            "upright image.  A classifier answers `classes` instead.",
            "content": {
                "application/json": {
                    "example": {
                        "width": 640,
                        "height": 480,
                        "model": {"name": "cells", "sha256": "9f86d081..."},
                        "objects": [
                            {
                                "class": "RBC",
                                "category_id": 1,
                                "score": 0.91234,
                                "box": [12.5, 30.25, 101.0, 118.75],
                            }
                        ],
                    }
                }
            },
        }
    },
}


# /docs loads Swagger UI from a CDN, which replaces this text.
_SWAGGER = '<div id="swagger-ui">'
_WITHOUT_SWAGGER = (
    "<p>This page is Swagger UI from cdn.jsdelivr.net. Where that is not reached, read "
    '<a href="openapi.json">openapi.json</a> and deploy/serving/README.md.</p>'
)


def make_app(
    service: Service, token: str | None = None, log: Callable[[str], None] = lambda line: None
) -> ASGIApp:
    """Builds the application with its routes.

    Nothing in a request can name a file or an address to open.

    Args:
        token: required by /detect and /metrics; the other routes show nothing worth hiding.
        log: takes the line of each request; must not block.
    """
    app = FastAPI(title="ppdist serving", description=_DESCRIPTION, docs_url=None, redoc_url=None)

    def require_token(request: Request) -> None:
        kind, _, given_token = request.headers.get("authorization", "").partition(" ")
        # A comparison in constant time tells nothing about how much of a guess was right.
        matches = token is None or hmac.compare_digest(
            given_token.strip().encode("latin-1"), token.encode()
        )
        if token is not None and (kind.lower() != "bearer" or not matches):
            raise Refused(401, "send the header: Authorization: Bearer TOKEN")

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        page = get_swagger_ui_html(openapi_url="openapi.json", title=app.title)
        return HTMLResponse(page.body.decode().replace(_SWAGGER, _SWAGGER + _WITHOUT_SWAGGER))

    @app.post("/detect", openapi_extra=_DETECT)
    async def detect(request: Request) -> JSONResponse:
        started, status = request.scope.get("came", time.perf_counter()), 500
        try:
            require_token(request)
            answer = await service.answer(
                request, _read_threshold(request, service.limits.threshold)
            )
            status = 200
            return JSONResponse(answer)
        except Refused as refused:
            status = refused.status
            return _refusal(refused)
        except ClientDisconnect:
            status = 499  # nginx's code for a client that has gone
            return JSONResponse({"error": "the client left"}, status)
        finally:
            seconds = time.perf_counter() - started
            service.counts.seconds.labels(str(status)).observe(seconds)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="200 while the process can still answer; 503: restart it")
    async def health() -> JSONResponse:
        problem = service.find_problem()
        return JSONResponse({"alive": problem is None, "reason": problem}, 503 if problem else 200)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", summary="200 once the model is loaded and warm")
    async def ready() -> JSONResponse:
        model = service.identity()
        is_ready = model is not None
        return JSONResponse({"ready": is_ready, "model": model}, 200 if is_ready else 503)

    @app.get("/metrics", summary="For Prometheus")
    async def metrics(request: Request) -> PlainTextResponse:
        require_token(request)
        service.counts.model.info(service.identity() or {})
        return PlainTextResponse(
            generate_latest(service.counts.registry), media_type="text/plain; version=0.0.4"
        )

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse("docs")

    _describe_errors(app)
    return AccessLog(app, log)


def _read_threshold(request: Request, default: float | None) -> float | None:
    """Reads the requested threshold; here and not by FastAPI.

    FastAPI would refuse an invalid one before the token is checked, and without counting it.
    """
    text = request.query_params.get("threshold")
    if text is None:
        return default
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold <= 1:
        raise Refused(400, "threshold: expected a number of 0..1")
    return threshold


def _refusal(refused: Refused) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": _RETRY_AFTER}}
    return JSONResponse({"error": refused.text}, refused.status, headers.get(refused.status))


def _describe_errors(app: FastAPI) -> None:
    """Makes every response except success {"error": "..."}."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def other(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed; its log says more"}, 500)


def _make_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Makes a class for HTTP on one connection, which closes when its client exceeds a limit.

    uvicorn alone waits forever for a request, and for a client to read its answers.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    max_connections = limits.most_connections
    if files != resource.RLIM_INFINITY:
        max_connections = max(1, min(max_connections, files - _OTHER_FILES))

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.head_bytes = self.chunks = self.body_bytes = 0
            self.in_body = False  # a request's headers were read, but not its end
            self.reading = self.loop.call_later(limits.header_seconds, transport.abort)
            self.writing: asyncio.TimerHandle | None = None
            if len(self.connections) > max_connections:
                self.loop.call_soon(transport.abort)  # not now: it starts reading first

        def allow(self, seconds: float) -> None:
            """Sets the deadline; then aborts, because a mere close waits for the client to read."""
            self.reading.cancel()
            self.reading = self.loop.call_later(seconds, self.transport.abort)

        def data_received(self, data: bytes) -> None:
            # The parser and uvicorn keep headers and trailers of any length.
            self.head_bytes += len(data)
            super().data_received(data)
            if self.head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The headers are too long.")

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(self.headers) > _MOST_REQUEST_HEADERS:
                raise ValueError("too many headers")  # uvicorn answers it as a broken request

        def on_headers_complete(self) -> None:
            head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if head > _MOST_HEAD_BYTES:  # they may have come at once
                raise ValueError("too long headers")
            self.head_bytes = self.chunks = self.body_bytes = 0
            if len(self.pipeline) == _MOST_PIPELINED:
                raise ValueError("too many requests at once")
            self.scope["came"] = time.perf_counter()  # the loop may handle it much later
            super().on_headers_complete()
            self.in_body = True
            if not self.pipeline:
                self.allow(limits.seconds + limits.write_seconds)

        def on_chunk_header(self) -> None:
            self.chunks += 1
            if self.chunks > _FREE_CHUNKS and self.body_bytes < self.chunks * _LEAST_MEAN_CHUNK:
                raise ValueError("too small chunks")

        def on_body(self, body: bytes) -> None:
            self.head_bytes = 0
            self.body_bytes += len(body)
            super().on_body(body)

        def on_response_complete(self) -> None:
            # Before super, which starts the request that waits behind this one.
            request_seconds = limits.seconds + limits.write_seconds
            self.allow(request_seconds if self.pipeline else limits.header_seconds)
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.writing is not None:
                self.writing.cancel()

        def on_message_complete(self) -> None:
            self.in_body = False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            # Only in place of the broken request's answer: elsewhere it would look like the answer
            # to another request.
            cycle = self.cycle
            is_waiting = cycle is not None and not cycle.response_complete
            has_begun = is_waiting and cycle.response_started
            if is_waiting == self.in_body and not has_begun and not self.pipeline:
                super().send_400_response(msg)
            self.transport.close()
            self.pipeline.clear()
            if is_waiting:
                cycle.disconnected = True
                cycle.message_event.set()

        def _unsupported_upgrade_warning(self) -> None:
            # Answered as a plain request; the bytes after it are not HTTP.
            self.cycle.keep_alive = False

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.reading.cancel()
            if self.writing is not None:
                self.writing.cancel()

    return Protocol


class _Server(uvicorn.Server):
    """A server that answers all requests that it accepted, even those still unread at the end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        closing = [*state.default_headers, (b"connection", b"close")]
        state.default_headers = closing  # asks keep-alive clients to send no more requests
        for connection in state.connections:
            if connection.cycle is not None:
                connection.cycle.default_headers = closing
        await asyncio.sleep(_LAST_SECONDS)
        await super().shutdown(sockets)


def serve(
    load: Callable[[], Model],
    limits: Limits,
    host: str,
    port: int,
    token: str | None = None,
    logs_requests: bool = True,
) -> int:
    """Serves until SIGTERM or SIGINT; then answers what it accepted, and nothing new.

    Returns: exit status: 0 stopped; 2 the address is not free or the model cannot be loaded, for a
        reason that the user can fix; 1 anything else.
    """
    try:  # uvicorn would exit the process while threads run
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        # asyncio sets it only for a socket with a protocol, which these lack; without it the body
        # of an answer waits 40 ms for the client's ACK of the headers.  Connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        print(f"serving: error: --host {host} --port {port}: {error}", file=sys.stderr)
        return 2
    address = f"[{host}]" if ":" in host else host
    print(f"serving: http://{address}:{listener.getsockname()[1]}/  (the API: /docs)", flush=True)
    service, lines = Service(load, limits), Lines()
    server = _Server(
        uvicorn.Config(
            make_app(service, token, lines) if logs_requests else make_app(service, token),
            access_log=False,  # our access log is for machines, and blocks no request
            log_level="error",  # a warning per broken request would let strangers fill the disk
            server_header=False,
            http=_make_protocol(limits),
            ws="none",
            proxy_headers=False,  # addresses of clients are not used
            lifespan="off",  # nothing to do, and old versions log a traceback
            headers=[("X-Content-Type-Options", "nosniff")],
            timeout_graceful_shutdown=int(limits.seconds) + 2,
        )
    )

    def end() -> None:
        server.should_exit = True

    def end_at_signal() -> None:
        while True:
            is_impatient = signal.sigwait(_SIGNALS) == signal.SIGINT and server.should_exit
            server.should_exit, server.force_exit = True, is_impatient

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=end_at_signal, name="signals", daemon=True).start()
    service.batcher.start(ended=end)
    try:
        server.run(sockets=[listener])
    finally:
        service.stop()
        lines.close(_LOG_SECONDS)
    failure = service.batcher.failure
    if failure is None:
        return 0
    if isinstance(failure, ValueError | OSError):
        print(f"serving: error: {failure}", file=sys.stderr)
        return 2
    traceback.print_exception(failure)
    return 1


def parse() -> argparse.Namespace:
    usual = Limits()
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="what `ppdist export` made")
    add("--backend", choices=("auto", "onnx", "openvino", "paddle"), default="auto",
        help="default: the fastest installed one that the export was checked in")  # fmt: skip
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--int8", action="store_true", help="the quantised ONNX model of the export")
    add("--bfloat16", action="store_true",
        help="OpenVINO computes in it, where the processor can; less exact")  # fmt: skip
    add("--threads", type=int, default=1, help="of the model on the CPU (default: 1)")
    add("--host", default="127.0.0.1", help="0.0.0.0: all interfaces (default: 127.0.0.1)")
    add("--port", type=int, default=8000)
    add("--token-file", type=Path, help=f"holds the bearer token; or set {TOKEN} (default: none)")
    add("--no-access-log", dest="access_log", action="store_false",
        help="no JSON line for each request on stdout")  # fmt: skip
    add("--threshold", type=float,
        help="lowest score of a box, 0..1 (default: that of the best F1, where infer.yml says it, "
        "else 0.25)")  # fmt: skip
    named = {
        "most-batch": "images the model gets at once",
        "most-delay": "seconds that an image waits for others",
        "most-waiting": "requests under way at once",
        "most-bytes": "of an image as it is sent",
        "most-pixels": "of an image",
        "seconds": "for a request",
        "least-rate": "bytes a second of an image that is being sent; 0: any",
        "header-seconds": "for a connection to begin a request",
        "write-seconds": "for a client to read an answer",
        "most-connections": "at once",
        "decoders": "threads that decode images",
    }
    for name, text in named.items():
        default = getattr(usual, name.replace("-", "_"))
        add(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default:,})")
    return parser.parse_args()


def read_limits(arguments: argparse.Namespace) -> Limits:
    limits = Limits(**{name: getattr(arguments, name) for name in Limits.__dataclass_fields__})
    for name, value in vars(limits).items():
        if value is None:
            continue
        is_in_range = value >= 0 if name in ("most_delay", "threshold", "least_rate") else value > 0
        if not is_in_range or not math.isfinite(value) or (name == "threshold" and value > 1):
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: out of range")
    return limits


def read_token(file: Path | None) -> str | None:
    """Reads the token from the file or the environment; None: no token is required."""
    where, token = (
        (f"the environment's {TOKEN}", os.environ.get(TOKEN))
        if file is None
        else (str(file), file.read_text(encoding="utf-8").strip())
    )
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{where}: expected one word of printable ASCII")
    return token


def main() -> int:
    arguments = parse()
    warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's, about itself
    try:
        limits, token = read_limits(arguments), read_token(arguments.token_file)
    except (ValueError, OSError) as error:
        print(f"serving: error: {error}", file=sys.stderr)
        return 2
    if token is None and arguments.host not in _LOCAL:
        print(f"serving: warning: no token: whoever reaches {arguments.host} may ask",
              file=sys.stderr)  # fmt: skip

    def load() -> Model:
        from ppdist_runtime.predictor import Predictor

        predictor = Predictor(
            arguments.model,
            arguments.backend,
            threads=arguments.threads,
            device=arguments.device,
            int8=arguments.int8,
            bfloat16=arguments.bfloat16,
        )
        print(f"serving: the model runs in {predictor.runtime}", file=sys.stderr, flush=True)
        if predictor.doubt:
            print(f"serving: warning: {predictor.doubt}", file=sys.stderr, flush=True)
        return predictor

    return serve(load, limits, arguments.host, arguments.port, token, arguments.access_log)


def leave(status: int) -> NoReturn:
    """Exits now; Python itself would wait for a busy decoder, however long it takes."""
    # Each line on stdout was flushed.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
