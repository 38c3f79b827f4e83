"""Metrics endpoint of this host for Prometheus: `fleetrun --metrics_port 9410`.

A process of its own beside the ranks, which fleetrun starts and ends.  It only reads (metrics.py),
so neither a port that is taken, nor a package that is missing, nor a driver that hangs reaches the
job.  It lives as long as fleetrun: restarts of the ranks are numbers to it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

if __name__ == "__main__":  # by its path: nothing in the folder where the user is hides a module
    _own, _root = Path(__file__).resolve().parent, str(Path(__file__).resolve().parents[2])
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _own]
    if _root not in sys.path:  # a checkout that was never installed
        sys.path.insert(0, _root)

from ppdist.common.process import STOP_SIGNALS, ends_with_this
from ppdist.launch.metrics import METRICS, CardsReader, Measures, Sample
from ppdist.launch.watchdog import say

_CLIENT_SECONDS = 10.0  # in which a client has to ask, and to take the answer
_LOOK_SECONDS = 1.0
_CARDS_SECONDS = 3.0  # in which a driver answers; Prometheus waits 10 s for all numbers
_END_SECONDS = 5.0


@contextmanager
def exporting(folder: Path, endpoint: tuple[str, int] | None) -> Iterator[None]:
    """Answers Prometheus for as long as the block runs, or says once why it cannot.

    Args:
        folder: the private one of fleetrun.
        endpoint: address and port; None: nobody asks.
    """
    if endpoint is None:
        yield
        return
    command = [sys.executable, __file__, str(folder), *map(str, endpoint)]
    process = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the ranks
            preexec_fn=ends_with_this(signal.SIGKILL),
        )
    except OSError as error:
        _give_up(f"no process could be started ({error})")
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold it
                process.wait(_END_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Serves until fleetrun, the parent, is gone.

    Args: arguments: folder, address and port, as of `exporting`.
    """
    folder, address, port = Path(arguments[0]), arguments[1], int(arguments[2])
    for number in STOP_SIGNALS:  # schedulers send them to all processes of a job, which may go on
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    try:
        server = open_server(address, port, Measures(folder, Cards(_say), _say))
    except ImportError:
        _give_up("the package prometheus-client is missing: pip install 'ppdist[monitoring]'")
        return 1
    except (OSError, OverflowError) as error:
        _give_up(f"{address}:{port} cannot be opened ({error}): choose another one")
        return 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.getppid() == parent and folder.is_dir():
        time.sleep(_LOOK_SECONDS)
    return 0


def open_server(address: str, port: int, measures: Measures) -> WSGIServer:
    """A server that answers each GET with all numbers.

    Raises: ImportError: prometheus-client is missing.  OSError: the port cannot be opened.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(measures))
    return make_server(address, port, make_wsgi_app(registry), _Server, _Handler)


def families(samples: Sequence[Sample]) -> Iterator[Any]:
    """The samples as prometheus-client wants them: those of a name together."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in METRICS.items():
        found = [(labels, value) for each, labels, value in samples if each == name]
        if not found:
            continue
        keys = list(found[0][0])
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=keys)
        for labels, value in found:
            family.add_metric([labels[key] for key in keys], value)
        yield family


def read_cards(labels: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Name, card and value of what NVIDIA's driver says of these cards; what it cannot is left out.

    Args: labels: physical ids, as nvidia-smi shows them, or UUIDs.
    """
    if not labels:
        return
    try:
        import pynvml
    except ImportError:
        return
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for label in labels:
            with suppress(pynvml.NVMLError):
                yield from _of_card(pynvml, label)


class Cards:
    """`read_cards`, where a driver that hangs costs nothing but the numbers of the cards."""

    def __init__(self, say: Callable[[str], None], read: CardsReader = read_cards) -> None:
        self._say, self._read = say, read
        self._asking: threading.Thread | None = None  # one at a time: it may hang for ever
        self._found: list[tuple[str, str, float]] = []
        self._error: Exception | None = None
        self._said = False

    def __call__(self, labels: Sequence[str]) -> list[tuple[str, str, float]]:
        """Nothing while the driver does not answer, which is said once."""
        if not labels:
            return []
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, args=(labels,), daemon=True)
            self._asking.start()
            self._asking.join(_CARDS_SECONDS)
        if self._asking.is_alive():
            if not self._said:
                self._said = True
                self._say("the cards' driver does not answer; until it does they have no numbers")
            return []
        if self._error is not None:
            raise self._error
        return self._found

    def _ask(self, labels: Sequence[str]) -> None:
        self._error = None
        try:
            self._found = list(self._read(labels))
        except Exception as error:
            self._error = error


def _of_card(nvml: Any, label: str) -> Iterator[tuple[str, str, float]]:
    by_number = label.isdigit()
    find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
    card = find(int(label) if by_number else label)
    asked: dict[str, Callable[[], float]] = {
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(card).used,
        "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(card).total,
        "utilisation_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
        "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
            card, nvml.NVML_TEMPERATURE_GPU
        ),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
    }
    for name, ask in asked.items():
        with suppress(nvml.NVMLError):  # a slice of a card, for one, has no temperature
            yield f"ppdist_gpu_{name}", label, float(ask())


class _Collector:
    """What prometheus-client asks at each scrape."""

    def __init__(self, measures: Measures) -> None:
        self._measures, self._lock = measures, threading.Lock()

    def collect(self) -> list[Any]:
        with self._lock:  # two may ask at a time
            return list(families(self._measures.samples()))


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *values: Any) -> None:
        """Scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # of clients that are not yet answered, so that silent ones fill none

    def __init__(self, place: tuple[str, int], handler: Any) -> None:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)  # 4 or 6
        self.address_family = found[0][0]
        super().__init__(place, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or speaks nonsense, is none of the user's business."""


def _say(text: str) -> None:
    say(f"--metrics_port: {text}")


def _give_up(why: str) -> None:
    _say(f"{why}; the run goes on without it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
