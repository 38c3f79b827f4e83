"""Files and requests as no honest program writes them: do our readers always say what is wrong?

    python -m tests.faults.fuzz --minutes 10 --seed 1          all targets, one after the other
    python -m tests.faults.fuzz --seed 1 --only weights:1234   one case again, with its traceback

Each case is a function of (seed, target, index).  It is read in a child process, which may take
5 s of processor time, 30 s by the clock and 2 GiB more of memory.  A reader gives a result, or
refuses with an error that has a code.  All else is a finding: another exception, the end of the
child, a case without an end, and code of the file that ran.  The files of a finding are kept.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppdist.common.child import ends_with_this
from ppdist.common.errors import CodedError

CPU_SECONDS = 5.0  # of a case: what takes more hangs
CLOCK_SECONDS = 30.0  # and what takes more without computing; other processes may use the machine
MEMORY_BYTES = 2 << 30  # of a child, besides what it starts with
_PREPARE_SECONDS = 120.0  # for a child to get ready, such as to start a server
_CASES_OF_A_CHILD = 500  # then another: what one case leaves behind meets few others
_MOST_FINDINGS = 20  # of a target, which then ends: most often they are one
CANARY = "ran"  # a file in the case's folder that code of the file would make
# What Python does only when it runs what a file says; see the table of audit events.
_CODE = {
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.startfile",
    "subprocess.Popen", "pickle.find_class", "ctypes.dlopen", "shutil.rmtree", "os.putenv",
}  # fmt: skip
_shown_code: list[str] = []

Files = Mapping[str, bytes]  # by the name below the case's folder


class Target(NamedTuple):
    """What is tried.

    make: the files of a case.  read: what our readers do with them in that folder; it returns a
    word for what came of it, or raises.  prepare: writes what all cases need, once in each child.
    """

    name: str
    make: Callable[[np.random.Generator], Files]
    read: Callable[[Path, Files], str]
    prepare: Callable[[Path], None] = lambda folder: None


@dataclass
class Tally:
    """What came of a target's cases."""

    target: str
    cases: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    slowest: int = 0
    findings: list[tuple[int, str, str]] = field(default_factory=list)  # case, kind, text

    def add(self, index: int, end: str, seconds: float) -> None:
        self.cases += 1
        self.ends[end] += 1
        if seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest = seconds, index

    def __str__(self) -> str:
        refused = {end: n for end, n in self.ends.most_common() if end.startswith("refused ")}
        codes = ", ".join(f"{end.partition(' ')[2]} {n}" for end, n in refused.items())
        others = {end: n for end, n in self.ends.most_common() if end not in refused}
        kinds = Counter(kind for _, kind, _ in self.findings)
        found = ", ".join(f"{kinds[kind]} {kind}" for kind in FINDINGS)
        return (
            f"{self.target}: {self.cases} cases; "
            f"{', '.join(f'{n} {end}' for end, n in others.items()) or '0 accepted'}; "
            f"{sum(refused.values())} refused ({codes}); "
            f"slowest {self.slowest_seconds:.2f} s (case {self.slowest}); {found}"
        )


FINDINGS = ("crashes", "hangs", "other errors", "ran code")


def rng_of(seed: int, target: str, index: int) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(target.encode()), index))


def fuzz(
    target: Target, seed: int, *, cases: int | None = None, seconds: float | None = None,
    keep: Path | None = None,
) -> Tally:  # fmt: skip
    """Tries so many cases, or as many as the time allows.

    Args: keep: a folder for the files of findings.
    """
    tally, end = Tally(target.name), time.monotonic() + (seconds or 1e9)
    while (cases is None or tally.cases < cases) and time.monotonic() < end:
        if len(tally.findings) >= _MOST_FINDINGS:
            break
        last = tally.cases + _CASES_OF_A_CHILD
        before = len(tally.findings)
        _try(target, seed, range(tally.cases, min(last, cases or last)), end, tally)
        for index, kind, text in tally.findings[before:]:
            if keep is not None:
                folder = keep / f"{target.name}-{index}"
                _write(folder, target.make(rng_of(seed, target.name, index)))
                (folder / "finding.txt").write_text(f"{kind}\n{text}\n")
    return tally


def _try(target: Target, seed: int, indices: range, end: float, tally: Tally) -> None:
    """Lets one child read cases up to the first that it does not survive."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        log = Path(folder) / "log"
        process = context.Process(
            target=_child,
            args=(target, seed, indices, end, Path(folder), theirs, ends_with_this(signal.SIGKILL)),
        )
        process.start()
        theirs.close()
        index = indices[0]
        try:
            if ours.poll(_PREPARE_SECONDS):
                ours.recv()
            for index in indices:
                hangs = not ours.poll(CLOCK_SECONDS)
                if hangs:
                    tally.add(index, "found", CLOCK_SECONDS)
                    tally.findings.append((index, "hangs", f"no end after {CLOCK_SECONDS:g} s"))
                    return
                found = ours.recv()
                if found is None:
                    return
                kind, text, seconds = found
                tally.add(index, "found" if kind else text, seconds)
                if kind:
                    tally.findings.append((index, kind, text))
                if len(tally.findings) >= _MOST_FINDINGS:
                    return
        except EOFError:
            process.join()
            kind = "hangs" if process.exitcode == -signal.SIGPROF else "crashes"
            said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            tally.add(index, "found", CPU_SECONDS if kind == "hangs" else 0.0)
            tally.findings.append((index, kind, f"the child ended: {process.exitcode}\n{said}"))
        finally:
            process.kill()
            process.join()
            ours.close()


def _child(
    target: Target, seed: int, indices: range, end: float, folder: Path, pipe: Connection,
    ask_to_end: Callable[[], None],
) -> None:  # fmt: skip
    ask_to_end()
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _bound_memory()
    place = folder / "case"
    place.mkdir()
    os.chdir(place)
    target.prepare(place)
    sys.addaudithook(_notice_code)
    pipe.send(None)
    for index in indices:
        if time.monotonic() > end:
            pipe.send(None)
            break
        files = target.make(rng_of(seed, target.name, index))
        _write(place, files)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        kind, text = read(target, place, files)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send((kind, text, time.monotonic() - began))
        for name in files:
            (place / name).unlink(missing_ok=True)
        os.truncate(log, 0)
    pipe.close()


def read(target: Target, folder: Path, files: Files) -> tuple[str, str]:
    """(kind of finding, what was said); where all is as it should be ("", how it ended)."""
    _shown_code.clear()
    try:
        kind, text = "", target.read(folder, files)
    except CodedError as error:
        kind, text = "", f"refused {error.code}"
        if _had_no_memory(error):
            kind, text = "other errors", f"more than {MEMORY_BYTES} bytes: {error!s:.200}"
    except BaseException as error:
        first = ascii(f"{type(error).__name__}: {error}")[1:-1][:200]
        kind, text = "other errors", f"{first}\n{traceback.format_exc(limit=-12)[-6000:]}"
    if _shown_code or (folder / CANARY).exists():
        kind, text = "ran code", ", ".join(_shown_code) or "the canary is there"
        (folder / CANARY).unlink(missing_ok=True)
    return kind, text


def _had_no_memory(error: BaseException | None) -> bool:
    """Whether that is what led to a refusal; OpenCV has a code for it."""
    while error is not None:
        if isinstance(error, MemoryError) or "nsufficient memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _notice_code(event: str, arguments: tuple[object, ...]) -> None:
    if event in _CODE:
        _shown_code.append(f"{event} {arguments!r:.200}")


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES,) * 2)


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # to empty one that is there costs forty times as much
        file.write_bytes(content)


def main(words: Sequence[str] | None = None) -> int:
    """Returns: exit status: 0 nothing found, 1 findings."""
    from tests.faults.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="in all (default: 10)")
    add("--seed", type=int, default=1)
    add("--target", nargs="+", choices=[*TARGETS], default=[*TARGETS], metavar="NAME",
        help=f"default: all of {' '.join(TARGETS)}")  # fmt: skip
    add("--only", metavar="TARGET:INDEX", help="this case alone, in this process")
    add("--keep", type=Path, default=Path("output/fuzz"), help="folder for files of findings")
    options = parser.parse_args(words)
    if options.only:
        name, _, index = options.only.partition(":")
        return _once(TARGETS[name], options.seed, int(index), options.keep)
    shutil.rmtree(options.keep, ignore_errors=True)
    seconds, tallies = 60 * options.minutes / len(options.target), []
    for name in options.target:
        tallies.append(fuzz(TARGETS[name], options.seed, seconds=seconds, keep=options.keep))
        print(tallies[-1], flush=True)
        for case, kind, text in tallies[-1].findings:
            again = f"--seed {options.seed} --only {name}:{case}"
            print(f"  {kind}: {text.partition(chr(10))[0]:.200}  ({again})", flush=True)
    found = sum(len(tally.findings) for tally in tallies)
    cases = sum(tally.cases for tally in tallies)
    print(f"seed {options.seed}: {cases} cases in {options.minutes:g} minutes; {found} findings")
    if found:
        print(f"their files: {options.keep}")
    return 1 if found else 0


def _once(target: Target, seed: int, index: int, keep: Path) -> int:
    folder = keep / f"{target.name}-{index}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder = folder.resolve()
    files = target.make(rng_of(seed, target.name, index))
    os.chdir(folder)
    target.prepare(folder)
    _write(folder, files)
    print(f"files: {folder}")
    sys.addaudithook(_notice_code)
    began = time.monotonic()
    kind, text = read(target, folder, files)
    print(f"{kind or 'as it should be'}: {text}\n{time.monotonic() - began:.2f} s")
    return 1 if kind else 0


if __name__ == "__main__":
    sys.exit(main())
