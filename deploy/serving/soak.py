"""Asks a running server without a pause: are answers, metrics and memory as they should be?

    python deploy/serving/soak.py --images DIR --clients 4 --minutes 10

Prints JSON and exits with 1 if an answer was wrong, the memory grew or was never told, or the
server counted other answers than the clients.  An image must get what it got when it was first
sent, or a 503 that says when to retry; some of the requests are broken images on purpose, which
must be refused with a status of 400 to 499.  Nobody else may ask meanwhile.  Only Python's own
library is needed.
"""

import argparse
import http.client
import json
import math
import multiprocessing
import os
import random
import re
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_REPLY_SECONDS = 120  # a bound against hanging, and for a server that starts
_THRESHOLD = 0.5
# Runtimes add up in another order for each size of a batch, so an image's answers differ a little.
_SCORE, _PIXELS = 0.002, 0.5
_PER_PROCESS = 10  # clients: with more, they measure how long they wait for each other
_BUSY, _RETRY_SECONDS = 503, 1.0  # the server's Retry-After
_QUANTILES = (50, 90, 99)  # percent
_BUCKET = re.compile(r"^ppdist_serving_request_seconds_bucket\{(.+)\} (\S+)$", re.MULTILINE)
Histogram = dict[int, dict[float, float]]  # status -> upper bound in seconds -> answers up to it


@dataclass
class Seen:
    """What one client saw, or all of them."""

    took: dict[int, list[float]] = field(default_factory=dict)  # status -> milliseconds of each
    refused: int = 0  # broken images, as they should be
    objects: int = 0
    first: dict[bytes, list[Any]] = field(default_factory=dict)  # image -> what it got first
    errors: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MB)

    def add(self, other: "Seen") -> None:
        """Adds what another client saw."""
        for status, times in other.took.items():
            self.took.setdefault(status, []).extend(times)
        self.refused += other.refused
        self.objects += other.objects
        self.errors.update(other.errors)
        for image, found in other.first.items():
            self.compare(image, found)

    def compare(self, image: bytes, found: list[Any]) -> None:
        """Counts an error if an image got something else before."""
        if not alike(self.first.setdefault(image, found), found):
            self.errors["image: not the answer it got at first"] += 1


class Client:
    """One connection that is kept, and opened anew after an error."""

    def __init__(self, url: str, token: str | None) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=_REPLY_SECONDS)
            self._connection.request(method, path, body, self._headers)
            reply = self._connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if reply.will_close:
            self.close()
        return reply.status, content

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def wait_until_ready(client: Client) -> None:
    """Until a server that answers has its model, which is refused work and no error; or a while."""
    end = time.monotonic() + _REPLY_SECONDS
    try:
        while client.ask("GET", "/ready")[0] == 503 and time.monotonic() < end:
            time.sleep(0.2)
    except (OSError, http.client.HTTPException):
        pass  # nobody there: the clients will count it
    client.close()


def broken(image: bytes, rng: random.Random) -> bytes:
    """A body that is no image: cut short, noise, text, or a PNG that claims 4 billion pixels."""
    kind = rng.randrange(4)
    if kind == 0:
        return image[: rng.randrange(len(image) // 2)]
    if kind == 1:
        return rng.randbytes(rng.randrange(1, 5000))
    if kind == 2:
        return b"<!DOCTYPE html><p>not an image</p>"
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xff\xff\0\0\xff\xff\x08\2\0\0\0" + bytes(50)


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two answers name the same; what is barely above the threshold may be in one only."""

    def has(answer: list[Any], found: dict[str, Any]) -> bool:
        return any(
            found["class"] == candidate["class"]
            and abs(found["score"] - candidate["score"]) <= _SCORE
            and all(
                abs(a - b) <= _PIXELS
                for a, b in zip(found.get("box", ()), candidate.get("box", ()), strict=True)
            )
            for candidate in answer
        )

    return all(
        has(there, found)
        for here, there in ((one, other), (other, one))
        for found in here
        if found["score"] > _THRESHOLD + _SCORE
    )


def ask_on(
    client: Client, images: list[bytes], share: float, seed: int, end: float, seen: Seen
) -> None:
    """One client until `end` (time.monotonic)."""
    rng = random.Random(seed)
    time.sleep(rng.random())  # not all at the same moment
    while time.monotonic() < end:
        image, is_broken = rng.choice(images), rng.random() < share
        body = broken(image, rng) if is_broken else image
        started = time.monotonic()
        try:
            status, content = client.ask("POST", f"/detect?threshold={_THRESHOLD}", body)
        except (OSError, http.client.HTTPException) as error:
            seen.errors[f"no answer: {type(error).__name__}"] += 1
            time.sleep(0.2)
            continue
        milliseconds = 1000 * (time.monotonic() - started)
        seen.took.setdefault(status, []).append(milliseconds)
        if is_broken and 400 <= status < 500:
            seen.refused += 1
        elif not is_broken and status == 200:
            note(image, content, seen)
        elif status != _BUSY:
            seen.errors[f"{'broken image' if is_broken else 'image'}: status {status}"] += 1
        if status == _BUSY:
            pause = _RETRY_SECONDS * rng.uniform(1, 2)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
    client.close()


def ask_together(
    url: str, token: str | None, images: list[bytes], share: float, seeds: range, end: float
) -> Seen:
    """One client for each seed, in threads of this process."""
    each = [Seen() for _ in seeds]
    threads = [
        threading.Thread(target=ask_on, args=(Client(url, token), images, share, seed, end, seen))
        for seed, seen in zip(seeds, each)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = Seen()
    for seen in each:
        together.add(seen)
    return together


def note(image: bytes, content: bytes, seen: Seen) -> None:
    """Counts what an answer holds, and whether it is that of before."""
    try:
        answer = json.loads(content)
        found = answer["classes"] if "classes" in answer else answer["objects"]
        seen.compare(image, found)
        seen.objects += len(found)
    except (ValueError, TypeError, KeyError) as error:
        seen.errors[f"image: an answer that cannot be read: {type(error).__name__}"] += 1


def watch_memory(client: Client, started: float, end: float, seen: Seen) -> None:
    """The server's resident memory, from its own metrics, every second."""
    while time.monotonic() < end:
        try:
            _, content = client.ask("GET", "/metrics")
        except (OSError, http.client.HTTPException):
            content = b""
        match = re.search(rb"^process_resident_memory_bytes (\S+)$", content, re.MULTILINE)
        if match:
            seen.memory.append((time.monotonic() - started, float(match[1]) / 2**20))
        time.sleep(1)


def histogram_of(client: Client) -> Histogram:
    """The server's seconds by status; empty where nobody answers."""
    try:
        _, content = client.ask("GET", "/metrics")
    except (OSError, http.client.HTTPException):
        return {}
    found: Histogram = {}
    for labels, count in _BUCKET.findall(content.decode("utf-8", "replace")):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(int(of["status"]), {})[float(of["le"])] = float(count)
    return found


def quantile(milliseconds: list[float], percent: int) -> float:
    """Smallest value that so many percent do not exceed."""
    ranked = sorted(milliseconds)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def latency(seen: Seen, before: Histogram, after: Histogram) -> dict[str, Any]:
    """What the clients measured, beside the bucket of the server's histogram.

    `agrees`: the server counted as many answers, and each quantile of the clients is in its bucket
    or a neighbour of it.  Clients also measure the network, and waits on busy machines.
    """
    found: dict[str, Any] = {}
    for status, times in sorted(seen.took.items()):
        earlier, bounds = before.get(status, {}), sorted(after.get(status, {}))
        counts = [after[status][bound] - earlier.get(bound, 0.0) for bound in bounds]
        row: dict[str, Any] = {"count": len(times), "server_count": counts[-1] if counts else 0}
        agrees = row["count"] == row["server_count"]
        for percent in _QUANTILES:
            row[f"p{percent}_ms"] = value = quantile(times, percent)
            if counts and counts[-1]:
                rank = math.ceil(counts[-1] * percent / 100)
                theirs = bisect_left(counts, rank)
                row[f"server_p{percent}_ms_at_most"] = 1000 * bounds[theirs]
                agrees = agrees and abs(bisect_left(bounds, value / 1000) - theirs) <= 1
        found[f"{status}"] = {**row, "agrees": agrees}
    return found


def growth(memory: list[tuple[float, float]]) -> dict[str, float]:
    """Whether memory grows for good: its median in the last quarter against the second quarter.

    The first quarter is left out: allocators take what they then reuse.
    """
    if len(memory) < 8:
        return {}
    quarter = len(memory) // 4
    second, last = memory[quarter : 2 * quarter], memory[-quarter:]
    level = [median(mb for _, mb in part) for part in (second, last)]
    minutes = (median(at for at, _ in last) - median(at for at, _ in second)) / 60
    return {
        "first_mb": memory[0][1],
        "second_quarter_mb": level[0],
        "last_quarter_mb": level[1],
        "most_mb": max(mb for _, mb in memory),
        "growth_mb": level[1] - level[0],
        "growth_mb_per_minute": (level[1] - level[0]) / minutes,
    }


def report(seen: Seen, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    times = seen.took.get(200, [])
    return {
        "minutes": seconds / 60,
        "clients": arguments.clients,
        "answered": len(times),
        "objects": seen.objects,
        "broken_refused": seen.refused,
        "errors": dict(seen.errors),
        "images_per_second": len(times) / seconds,
        "slowest_ms": max(times, default=0.0),
        "memory": growth(seen.memory),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    add("--images", required=True, type=Path, metavar="DIR", help="images to send")
    add("--clients", type=int, default=4, help="that ask at once (default: 4)")
    add("--minutes", type=float, default=10.0, help="default: 10")
    add("--broken", type=float, default=0.1, help="share of broken images, 0..1 (default: 0.1)")
    add("--most-growth", type=float, default=20.0, metavar="MB", help="allowed (default: 20)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    token = os.environ.get("PPDIST_SERVING_TOKEN")
    files = sorted(arguments.images.iterdir()) if arguments.images.is_dir() else []
    images = [file.read_bytes() for file in files if file.suffix.lower() in _SUFFIXES]
    if not images:
        print(f"soak: error: {arguments.images}: no images there", file=sys.stderr)
        return 2
    watching = Client(arguments.url, token)
    wait_until_ready(watching)
    before = histogram_of(watching)
    seen, started = Seen(), time.monotonic()
    end = started + 60 * arguments.minutes
    count = arguments.clients
    groups = [range(at, min(at + _PER_PROCESS, count)) for at in range(0, count, _PER_PROCESS)]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(groups), context) as processes:
        whole = (arguments.url, token, images, arguments.broken)
        parts = [processes.submit(ask_together, *whole, seeds, end) for seeds in groups]
        watch_memory(watching, started, end, seen)
        for part in parts:
            seen.add(part.result())
    watching.close()
    result = report(seen, arguments, time.monotonic() - started)
    result["latency"] = latency(seen, before, histogram_of(watching))
    print(json.dumps(result, indent=2))
    grew = growth(seen.memory).get("growth_mb", 0.0) > arguments.most_growth
    differs = any(row["count"] != row["server_count"] for row in result["latency"].values())
    return 1 if seen.errors or 200 not in seen.took or not seen.memory or grew or differs else 0


if __name__ == "__main__":
    sys.exit(main())
