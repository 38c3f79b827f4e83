"""A run in an object store: written on the local disk first, uploaded beside the steps.

    s3://bucket/run/                 what output/s3/bucket/run/ has on rank 0's host
        owner.json                   the process that writes here
        checkpoints/step-00001200/   a checkpoint once its manifest.json is there, which comes last
        checkpoints/last, best       the name of one of them, as text

A thread of rank 0 looks at the local folder every few seconds, uploads what is new and deletes the
checkpoints that are gone.  So it needs no word from whoever writes there, and training never waits
for the store: an outage is a warning, and what is missing follows.  Order in a pass: records, files
of checkpoints, their manifests, `last` and `best`, deletions; so whatever is cut short, the newest
checkpoint with a manifest is whole and has its records.

A store has no locks.  The owner is an object that only one process can create (If-None-Match).  A
second thread renews it; who finds it waits to see whether it changes, and replaces it if it does
not.  No clocks are compared.  A run that finds another owner before an upload has lost its folder,
and stops as if another training had taken it on a disk.
"""

import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ppdist.common import files
from ppdist.common.errors import CheckpointError, ConfigError, StorageError
from ppdist.common.files import draft_of
from ppdist.common.manifest import MANIFEST
from ppdist.common.process import say
from ppdist.common.retry import with_retries
from ppdist.distributed import comm
from ppdist.engine.checkpoint import FILES_OF_A_RUN, newest_step, path_of, point, set_run_aside
from ppdist.storage import stores
from ppdist.storage.stores import explained

_LOGGER = logging.getLogger("ppdist.engine")
_OWNER, _NOTE = "owner.json", "store.json"  # in the store; in the local folder: url, owner's id
_FOLDER = "checkpoints"
_POINTERS = (f"{_FOLDER}/last", f"{_FOLDER}/best")
_STEP = re.compile(r"step-\d+")
_RECIPE = "recipe.yml"
_LOCAL = re.compile(r"\..*|old-\d+|run\.lock|store\.json|owner\.json|checkpoints")  # not uploaded
_LOOK_SECONDS = 5.0
_RECORDS_SECONDS = 60.0  # between uploads of records without a new checkpoint
_RECORDS_SHARE = 10.0  # and they take a tenth of the time at most: metrics.jsonl goes as a whole
_RENEW_SECONDS = 15.0
_SILENT_SECONDS = 60.0  # without a renewal, after which an owner counts as dead
_LONGEST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 30.0, 2.0  # after a failure; at the end
_FINISH_SECONDS = 300.0  # without progress, at the end of a run
_STOP_SECONDS = 10.0  # after a signal or an error: fleetrun kills after 28 s
_LARGE_BYTES = 64 << 20  # records up to this size are read at once: they may grow meanwhile


class Mirror:
    """The copy of a run's folder in a store; threads of rank 0 keep it up to date.

    Every rank has a Mirror; `begin` and `finish` are called only on rank 0.

    Attributes:
        url: address of the run in the store.
        folder: the local folder.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._id, self._renewals = uuid.uuid4().hex, 0
        self._lock = threading.Lock()  # guards the owner object
        self._wake, self._ended = threading.Event(), threading.Event()
        self._ending, self._ending_since = False, 0.0
        self._threads: list[threading.Thread] = []
        self._records: dict[str, tuple[int, int]] = {}  # uploaded: name -> mtime in ns, bytes
        self._records_after = 0.0  # records are not uploaded before this time
        self._manifests: dict[str, bytes] = {}  # of complete checkpoints in the store, by name
        self._files: dict[str, set[str]] = {}  # of all checkpoints there, complete or not
        self._pointers: dict[str, str] = {}
        self._busy_until = 0.0  # a request in progress may take until then
        self._uploaded_at = 0.0  # when the last request succeeded
        self._lost: ConfigError | None = None

    # Begin

    def begin(self, resumes: bool) -> None:
        """Takes ownership of the folder in the store, downloads its run and starts to upload.

        Args: resumes: True if the run may continue one in the store.
        Raises: ConfigError: another training run owns the folder, or it contains a run and this one
            is new.  UserError: the store refuses access.  StorageError: the store cannot be
            reached.
        """
        with explained(self.url):
            if not resumes and (names := _whole_checkpoints(stores.list_below(self.url))):
                raise ConfigError(
                    f"{self.url} has a run already (checkpoints up to {max(names)})",
                    code="output_dir_used",
                    where="output_dir",
                    fix="--resume continues it; or give this run its own folder: "
                    "-o output_dir=s3://...",
                )
            for warning in files.hold(self.folder):
                say(f"ppdist: warning: {warning}")
            self._take()
            try:
                self._bring_here()
            except BaseException:
                self._release()
                raise
        for target in (self._upload_until_end, self._renew_until_end):
            thread = threading.Thread(target=target, name="mirror", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _take(self) -> None:
        """Creates the owner object, replacing that of a dead process if necessary."""
        note = files.read_json(self.folder / _NOTE)
        earlier_id = note.get("owner") if isinstance(note, dict) else None
        files.write_json(self.folder / _NOTE, {"url": self.url, "owner": self._id}, sync=True)
        while True:
            with suppress(FileExistsError):
                stores.write(self._owner_url, self._describe_owner(), only_new=True)
                return
            content = self._read_owner()
            owner_id = _parse_object(content).get("id")
            if owner_id == self._id:  # our own write, whose response was lost
                return
            # An owner that wrote to this local folder, whose lock is now ours, must have died.
            if content and (owner_id is None or owner_id != earlier_id):
                self._watch(content)
            stores.delete(self._owner_url)

    def _watch(self, content: bytes) -> None:
        """Waits until an owner has been silent long enough to count as dead.

        Raises: ConfigError: the owner is alive, or another one has taken its place.
        """
        name = _name_owner(content)
        say(
            f"ppdist: {self.url} belongs to {name}; waiting {_SILENT_SECONDS:.0f} s to see whether "
            "it has died"
        )
        deadline = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, _SILENT_SECONDS / 4))
            comm.alive()
            current = self._read_owner()
            if not current:  # the owner has ended
                return
            if current != content:
                raise ConfigError(
                    f"{self.url}: another training writes there ({_name_owner(current)})",
                    code="output_dir_in_use",
                    where="output_dir",
                    fix="wait for it or stop it, or give this one its own folder: "
                    "-o output_dir=...",
                )

    def _bring_here(self) -> None:
        """Downloads the run, unless the local folder has the same run and is not behind."""
        sizes = stores.list_below(self.url)
        for name in sizes:
            if (parts := name.split("/"))[0] == _FOLDER and len(parts) == 3:
                self._files.setdefault(parts[1], set()).add(parts[2])
        complete = _whole_checkpoints(sizes)
        for name in complete:
            self._manifests[name] = self._fetch(f"{_FOLDER}/{name}/{MANIFEST}")
        if not complete or self._is_ahead(max(complete)):
            return
        if (aside := set_run_aside(self.folder)) is not None:
            say(f"ppdist: {self.url} is newer: moved the run in {self.folder} to {aside}")
        wanted = {
            name: size
            for name, size in sizes.items()
            if name not in _POINTERS and _is_wanted(name.split("/"), complete)
        }
        say(
            f"ppdist: downloading {len(complete)} checkpoints and the records of {self.url} "
            f"({sum(wanted.values()) / 1e6:.0f} MB)"
        )
        _download(self.url, wanted, self.folder)
        records = self._changed_records()
        self._records = {name: mark for name, mark in records.items() if name in wanted}
        for pointer in (name for name in _POINTERS if name in sizes):
            target = self._fetch(pointer).decode(errors="replace").strip()
            if target in complete:
                self._pointers[pointer] = target
                with suppress(OSError):  # a file system without links
                    point(self.folder / pointer, self.folder / _FOLDER / target)

    def _is_ahead(self, newest: str) -> bool:
        """Returns True if the local run is the same as that in the store, and not behind it."""
        folder = self.folder / _FOLDER
        if (step := newest_step(folder)) < int(newest.removeprefix("step-")):
            return False
        local = files.read_json(path_of(folder, step) / "state.json")
        return _run_of(local) == _run_of(
            _parse_object(self._fetch(f"{_FOLDER}/{newest}/state.json"))
        )

    # Owner

    @property
    def _owner_url(self) -> str:
        return f"{self.url}/{_OWNER}"

    def _describe_owner(self) -> bytes:
        note = {"id": self._id, "pid": os.getpid(), "host": socket.gethostname()}
        return json.dumps({**note, "renewals": self._renewals}).encode()

    def _read_owner(self) -> bytes:
        """Reads the owner object; b"" if there is none."""
        with suppress(FileNotFoundError):
            return stores.fetch(self._owner_url, use_cache=False)
        return b""

    def _require_owner(self) -> None:
        """Checks that this run still owns the folder in the store.

        Raises: ConfigError `output_dir_lost`: another training run has taken it.
        """
        with self._lock:
            content = self._read_owner()
            if not content:  # somebody has emptied the folder
                self._records.clear()
                self._manifests.clear()
                with suppress(FileExistsError):
                    stores.write(self._owner_url, self._describe_owner(), only_new=True)
                    return
                content = self._read_owner()
            if _parse_object(content).get("id") != self._id:
                self._lost = ConfigError(
                    f"{self.url}: another training has it now ({_name_owner(content)})",
                    code="output_dir_lost",
                    where="output_dir",
                    fix=f"this one has stopped; what it wrote is in {self.folder}; give each "
                    "training its own folder: -o output_dir=...",
                )
                raise self._lost

    def _renew_until_end(self) -> None:
        """Renews the owner object until the run ends; losing it ends the run."""
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                once(self._require_owner)
                with self._lock:
                    if not self._ended.is_set():
                        self._renewals += 1
                        once(lambda: stores.write(self._owner_url, self._describe_owner()))
            except ConfigError as error:
                files.give_up(self.folder, error)
                return
            except Exception as error:
                _LOGGER.debug("%s: not renewed: %s", self._owner_url, error)  # the upload warns

    def _release(self) -> None:
        """Deletes the owner object, so that the next run does not have to wait."""
        self._ended.set()
        with suppress(Exception):  # otherwise this owner counts as dead in a minute
            once(self._require_owner)
            with self._lock:
                once(lambda: stores.delete(self._owner_url))

    # Upload

    def _upload_until_end(self) -> None:
        """Uploads new files until a pass that began after the call of `finish` succeeds.

        After the end of the run, it gives up if no request succeeds for a while.
        """
        failed_since, pause = 0.0, _LOOK_SECONDS
        while True:
            is_last = self._ending
            try:
                once(self._upload)
            except ConfigError as error:  # another training run owns the folder
                files.give_up(self.folder, error)
                return
            except Exception as error:  # training must outlive the store, and our own bugs
                if not failed_since:
                    failed_since = time.monotonic()
                    _LOGGER.warning(
                        "output_dir: not uploaded: %s; training continues, and %s is uploaded "
                        "once the store answers", error, self.folder,
                    )  # fmt: skip
                if self._ending and time.monotonic() > self._last_moment:
                    return
                longest = _LAST_PAUSE_SECONDS if self._ending else _LONGEST_PAUSE_SECONDS
                pause = min(2 * pause, longest)
            else:
                if failed_since:
                    seconds = time.monotonic() - failed_since
                    _LOGGER.info("%s can be written again, after %.0f s", self.url, seconds)
                failed_since, pause = 0.0, _LOOK_SECONDS
                if is_last:
                    return
            self._wake.wait(pause)
            self._wake.clear()

    def _upload(self) -> None:
        """Makes the store match the local folder.

        Raises: ConfigError: another run owns the folder.  OSError, StorageError.
        """
        # List the checkpoints first, so that the records read below cover all of their steps.
        local = self._read_manifests()
        new = [name for name in sorted(local) if self._manifests.get(name) != local[name]]
        gone = [name for name in self._files if not (self.folder / _FOLDER / name).is_dir()]
        now = time.monotonic()
        is_due = bool(new) or self._ending or now >= self._records_after
        records = self._changed_records() if is_due else {}
        if new or gone or records or self._changed_pointers():
            self._require_owner()
        for name, mark in records.items():
            self._put_record(name)
            self._records[name] = mark
        if is_due:
            seconds = _RECORDS_SHARE * (time.monotonic() - now)
            self._records_after = time.monotonic() + max(_RECORDS_SECONDS, seconds)
        for name in new:
            self._put_checkpoint(name, local[name])
        for pointer, name in self._changed_pointers().items():
            self._request(f"{self.url}/{pointer}", name.encode())
            self._pointers[pointer] = name
        for name in gone:
            self._delete_checkpoint(name)

    def _read_manifests(self) -> dict[str, bytes]:
        """Reads the manifests of the local checkpoints, by name."""
        manifests = {}
        with suppress(FileNotFoundError):
            for path in (self.folder / _FOLDER).iterdir():
                if _STEP.fullmatch(path.name):
                    with suppress(FileNotFoundError):
                        manifests[path.name] = files.bytes_of(path / MANIFEST)
        return manifests

    def _changed_records(self) -> dict[str, tuple[int, int]]:
        """Lists files outside the checkpoints that have changed since they were uploaded."""
        changed = {}
        for parent, folders, names in os.walk(self.folder):
            if Path(parent) == self.folder:
                folders[:] = [name for name in folders if not _LOCAL.fullmatch(name)]
                names = [name for name in names if not _LOCAL.fullmatch(name)]
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                with suppress(FileNotFoundError):
                    status, name = path.lstat(), path.relative_to(self.folder).as_posix()
                    mark = (status.st_mtime_ns, status.st_size)
                    if not path.is_symlink() and self._records.get(name) != mark:
                        changed[name] = mark
        return changed

    def _changed_pointers(self) -> dict[str, str]:
        """Lists links missing or outdated in the store whose checkpoints it already has."""
        changed = {}
        for pointer in _POINTERS:
            with suppress(OSError):
                name = os.readlink(self.folder / pointer)
                if name in self._manifests and self._pointers.get(pointer) != name:
                    changed[pointer] = name
        return changed

    def _put_record(self, name: str) -> None:
        path, url = self.folder / name, f"{self.url}/{name}"
        with suppress(FileNotFoundError):  # the file was moved meanwhile
            if path.stat().st_size > _LARGE_BYTES:
                self._request(url, path)
            else:
                self._request(url, files.bytes_of(path))

    def _put_checkpoint(self, name: str, manifest: bytes) -> None:
        """Uploads a checkpoint, manifest last; one deleted meanwhile is left incomplete."""
        folder, url = self.folder / _FOLDER / name, f"{self.url}/{_FOLDER}/{name}"
        if self._manifests.pop(name, None) is not None:  # the step was trained again
            stores.delete(f"{url}/{MANIFEST}")
        try:
            for path in sorted(folder.iterdir()):
                if path.name != MANIFEST:
                    self._files.setdefault(name, set()).add(path.name)
                    self._request(f"{url}/{path.name}", path)
            if files.bytes_of(folder / MANIFEST) != manifest:
                return
        except OSError:
            if folder.is_dir():
                raise
            return
        self._require_owner()
        self._files[name].add(MANIFEST)
        self._request(f"{url}/{MANIFEST}", manifest)
        self._manifests[name] = manifest
        _LOGGER.debug("uploaded %s", url)

    def _delete_checkpoint(self, name: str) -> None:
        self._manifests.pop(name, None)
        for file in sorted(self._files[name], key=lambda file: file != MANIFEST):
            stores.delete(f"{self.url}/{_FOLDER}/{name}/{file}")
        del self._files[name]

    def _request(self, url: str, content: bytes | Path) -> None:
        """Uploads bytes or a file."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        self._busy_until = time.monotonic() + stores.request_seconds(size)
        if isinstance(content, Path):
            stores.upload(content, url)
        else:
            stores.write(url, content)
        self._uploaded_at = time.monotonic()

    def _fetch(self, name: str) -> bytes:
        return stores.fetch(f"{self.url}/{name}", use_cache=False)

    # End

    def finish(self, *, briefly: bool = False) -> str:
        """Waits until the store has everything, and releases the folder.

        Args: briefly: wait only a few seconds, because the process may be killed soon; else wait as
            long as requests succeed.
        Returns: names of what the store lacks, as text; "" if nothing is missing.
        Raises: ConfigError: another training run owns the folder.
        """
        if not self._threads:
            return ""
        uploading, self._ending_since = self._threads[0], time.monotonic()
        self._ending = True
        self._wake.set()
        while uploading.is_alive():
            last_moment = max(self._last_moment, self._busy_until) + _LOOK_SECONDS
            if briefly:
                last_moment = self._ending_since + _STOP_SECONDS
            if time.monotonic() > last_moment:
                break
            uploading.join(0.5)
            comm.alive()
        missing = "" if self._lost else self._name_missing()
        if not uploading.is_alive():
            self._release()
        self._ended.set()
        self._threads.clear()
        if self._lost is not None:
            raise self._lost
        return missing

    @property
    def _last_moment(self) -> float:
        return max(self._ending_since, self._uploaded_at) + _FINISH_SECONDS

    def _name_missing(self) -> str:
        local = self._read_manifests()
        names = [name for name in local if self._manifests.get(name) != local[name]]
        names = [f"{_FOLDER}/{name}" for name in sorted(names, reverse=True)]
        names += sorted(self._changed_records())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3])}{more}"


def upload_rest(mirror: Mirror, status: int) -> None:
    """Uploads the remaining files of a run that has ended; only rank 0 calls it.

    Args: status: exit code of the run.
    Raises: CheckpointError: the run is complete, but its upload is not.
    """
    missing = mirror.finish(briefly=status != 0)
    if not missing:
        say(f"ppdist: {mirror.url} has everything of {mirror.folder}")
        return
    message = f"the store lacks {missing}; all of it is in {mirror.folder}"
    if status:  # a signal: the next attempt continues from what is there
        say(f"ppdist: warning: {mirror.url}: {message}")
        return
    raise CheckpointError(
        f"the training is complete, but {message}",
        code="upload_incomplete",
        where=mirror.url,
        fix=f"ppdist train --resume {mirror.folder} uploads it, or copy it with the store's tools",
    )


@contextmanager
def description_of(url: str) -> Iterator[Path]:
    """Yields a temporary folder with the files of a run in a store that `config_of_run` reads.

    Raises: CheckpointError: the run has no checkpoint.  UserError, StorageError.
    """
    with tempfile.TemporaryDirectory() as scratch, explained(url):
        sizes = stores.list_below(url)
        newest = max(_whole_checkpoints(sizes), default=None)
        if newest is None:
            raise CheckpointError(
                "found no checkpoint of a run",
                code="checkpoint_missing",
                where=f"--resume {url}",
                fix="give the output_dir of a training: s3://BUCKET/FOLDER",
            )
        folder = f"{_FOLDER}/{newest}"
        names = (f"{folder}/config.yml", f"{folder}/state.json", "metrics.jsonl")
        _download(url, {name: sizes[name] for name in names if name in sizes}, Path(scratch))
        point(Path(scratch, _FOLDER, "last"), Path(scratch, folder))
        yield Path(scratch)


def once(call: Callable[[], None]) -> None:
    """Calls `call` without waiting for an unavailable store.  Raises: as `call`; StorageError."""
    with_retries(call, pause=_raise, quiet=True)


def _raise(_: float, error: StorageError) -> NoReturn:
    raise error


def _whole_checkpoints(names: Mapping[str, int]) -> list[str]:
    """Lists the names of checkpoints with a manifest, such as `step-00001200`, oldest first."""
    parts = (name.split("/") for name in names)
    return sorted(
        part[1]
        for part in parts
        if len(part) == 3 and part[::2] == [_FOLDER, MANIFEST] and _STEP.fullmatch(part[1])
    )


def _is_wanted(parts: list[str], complete: list[str]) -> bool:
    """Returns True if an object in the store is a file of the run to resume."""
    if parts[0] == _FOLDER:
        return len(parts) == 3 and parts[1] in complete
    return parts[0] in FILES_OF_A_RUN or parts == [_RECIPE]


def _download(url: str, sizes: Mapping[str, int], folder: Path) -> None:
    """Downloads objects below `url` to `folder`; checkpoints appear there only once complete."""
    drafts: dict[Path, Path] = {}
    for name, size in sorted(sizes.items()):
        path = folder / name
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        if _STEP.fullmatch(path.parent.name):
            draft = drafts.setdefault(path.parent, draft_of(path.parent))
            draft.mkdir(exist_ok=True)
            stores.download(f"{url}/{name}", draft / path.name, size)
        else:
            path.parent.mkdir(exist_ok=True)
            draft = draft_of(path)
            stores.download(f"{url}/{name}", draft, size)
            draft.replace(path)
        comm.alive()
    for path, draft in drafts.items():
        draft.rename(path)


def _run_of(state: object) -> object:
    """Returns the run's random id from the content of a state.json; None if it has none."""
    run = state.get("run") if isinstance(state, dict) else None
    return run.get("id") if isinstance(run, dict) else None


def _parse_object(content: bytes) -> dict[str, object]:
    with suppress(ValueError):
        owner = json.loads(content)
        if isinstance(owner, dict):
            return owner
    return {}


def _name_owner(content: bytes) -> str:
    owner = _parse_object(content)
    return f"process {owner.get('pid', '?')} on host {owner.get('host', '?')}"
