"""Streaming reader of a JSON object of long lists.

Annotations as large as COCO's are half a gigabyte of JSON, and several gigabytes of Python objects.
This reader passes the file through a buffer of a megabyte and yields its elements as one list.
"""

import codecs
import gc
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ppdist.distributed.progress import Progress
from ppdist.storage.files import open_file

_LOGGER = logging.getLogger("ppdist.data")
_PIECE = 1 << 20  # bytes that are parsed at a time
_LONGEST = 1 << 28  # bytes of one list element, or of a value that is not a list
_CUT = 64  # characters before the buffer's end, where the cut may cause an error
_SPACE = re.compile(rb"[ \t\n\r]*")
_BLANKS = re.compile(r"[ \t\n\r]*")
_MOST_DIGITS = 4000
_BOM = b"\xef\xbb\xbf"


class NotJson(ValueError):
    """The text is not a JSON object; the message says where."""


@contextmanager
def scanning(file: Path, text: BinaryIO | None = None) -> Iterator["Scanner"]:
    """Opens a file to scan, with garbage collection off.

    Millions of dicts come and go, none of them in a reference cycle: nothing to collect.

    Args: text: read instead of the file.
    Raises: OSError.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        with text or open_file(file) as opened:
            megabytes = opened.seek(0, os.SEEK_END) / 1e6
            opened.seek(0)
            yield Scanner(opened, Progress(_LOGGER, f"reading {file}", megabytes, "MB"))
    finally:
        if was:
            gc.enable()


class Scanner:
    """Reads a JSON object whose values are mostly long lists.

    Attributes: windows: whether Windows line ends were seen so far.
    """

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._held = b""  # read, but not parsed yet
        self._ended = False
        self._line, self._column = 1, 1  # of the first held byte
        self._decode = json.JSONDecoder(parse_int=_whole).raw_decode
        self.windows = False

    def items(self) -> Iterator[tuple[str, Any, bool]]:
        """Yields (key, next elements of its list, True) or (key, value, False).

        An empty list yields one empty piece.
        Raises: NotJson; UnicodeDecodeError: not UTF-8; RecursionError.
        """
        self._more(_PIECE)
        self._held = self._held.removeprefix(_BOM)
        if self._held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise self._wrong("UTF-16 text; save it as UTF-8")
        self._expect(b"{", "Expecting an object")
        if self._next() == b"}":
            self._drop(1)
        else:
            while True:
                if self._next() != b'"':
                    raise self._wrong("Expecting property name enclosed in double quotes")
                key = self._value()
                self._expect(b":", "Expecting ':' delimiter")
                if self._next() == b"[":
                    self._drop(1)
                    yield from ((key, entries, True) for entries in self._elements())
                else:
                    yield key, self._value(), False
                if self._next() == b"}":
                    break
                self._expect(b",", "Expecting ',' delimiter")
            self._drop(1)
        if self._next():
            raise self._wrong("Extra data")

    def _more(self, count: int) -> None:
        """Reads until `count` bytes are held, or the file ends."""
        parts, held = [self._held], len(self._held)
        while held < count and not self._ended:
            block = self._file.read(max(_PIECE, count - held))
            self._ended = not block
            self._progress.add(len(block) / 1e6)
            self.windows = self.windows or (b"\r" in block and b"\r\n" in block)
            parts.append(block)
            held += len(block)
        if len(parts) > 1:
            self._held = b"".join(parts)

    def _drop(self, count: int) -> None:
        """Drops the first `count` held bytes, which were parsed."""
        line = self._held.rfind(b"\n", 0, count)
        if line < 0:
            self._column += count
        else:
            self._line += self._held.count(b"\n", 0, count)
            self._column = count - line
        self._held = self._held[count:]

    def _wrong(self, what: str, before: str = "") -> NotJson:
        """Error at a place, `before` held characters from the next byte."""
        self._drop(len(before.encode()))
        return NotJson(f"{what}: line {self._line} column {self._column}")

    def _next(self) -> bytes:
        """Next byte that is not blank, still held; b"": the end."""
        while True:
            self._drop(_SPACE.match(self._held).end())  # type: ignore[union-attr]
            if self._held or self._ended:
                return self._held[:1]
            self._more(_PIECE)

    def _expect(self, mark: bytes, what: str) -> None:
        if self._next() != mark:
            raise self._wrong(what)
        self._drop(1)

    def _value(self) -> Any:
        """Parses a key, or a top-level value other than a list."""
        self._next()
        wanted = 1 << 12
        while True:
            self._more(wanted)
            text = _whole_characters(self._held[:wanted])
            try:
                value, end = self._decode(text)
                # A number may continue beyond the held bytes.
                if _BLANKS.match(text, end).end() < len(text):  # type: ignore[union-attr]
                    self._drop(len(text[:end].encode()))
                    return value
                wrong = "Expecting ',' delimiter", end
            except json.JSONDecodeError as error:
                wrong = error.msg, error.pos
            wanted = self._wider(wanted, text, *wrong)

    def _wider(self, wanted: int, text: str, what: str, place: int) -> int:
        """How many bytes to try next.  Raises: NotJson: more would not help."""
        string = what.startswith("Unterminated string")  # reported at its start
        cut = wanted <= len(self._held) and (string or place > len(text) - _CUT)
        if not cut or wanted > _LONGEST:
            raise self._wrong(what if not cut else "A longer value than is read", text[:place])
        return wanted * 4

    def _elements(self) -> Iterator[list[Any]]:
        """Yields the elements of the opened list, some at a time."""
        if self._next() == b"]":
            self._drop(1)
            yield []
            return
        wanted = _PIECE
        while True:
            self._more(wanted)
            # Most elements end like this.  It is the end of an element, and not of an object inside
            # one, if the piece parses as a list once it has brackets.
            cut = self._held.rfind(b"},", 0, wanted) + 1
            if cut:
                with suppress(ValueError):
                    entries = orjson.loads(b"[%b]" % self._held[:cut])
                    self._drop(cut + 1)
                    wanted = _PIECE
                    yield entries
                    continue
            text = _whole_characters(self._held[:wanted])
            entries, used, ended, wrong = self._one_by_one(text)
            if used:
                self._drop(len(text[:used].encode()))
                wanted = _PIECE
                yield entries
                if ended:
                    return
            else:
                wanted = self._wider(wanted, text, *wrong)

    def _one_by_one(self, text: str) -> tuple[list[Any], int, bool, tuple[str, int]]:
        """Parses the elements at the beginning of a text, one by one.

        Returns: the elements; how many characters they take; whether the list ends there; what is
            wrong with the next one, and where.
        """
        entries: list[Any] = []
        place, used = 0, 0
        while True:
            place = _BLANKS.match(text, place).end()  # type: ignore[union-attr]
            try:
                entry, place = self._decode(text, place)
            except json.JSONDecodeError as error:
                return entries, used, False, (error.msg, error.pos)
            place = _BLANKS.match(text, place).end()  # type: ignore[union-attr]
            mark = text[place : place + 1]
            if mark not in (",", "]"):
                return entries, used, False, ("Expecting ',' delimiter", place)
            place += 1
            entries.append(entry)
            used = place
            if mark == "]":
                return entries, used, True, ("", 0)


def _whole(digits: str) -> int | float:
    """An integer; infinite beyond 4000 digits, because Python refuses more than 4300."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _whole_characters(content: bytes) -> str:
    """Decodes UTF-8, without an incomplete last character.

    Raises: UnicodeDecodeError: not UTF-8.
    """
    return codecs.getincrementaldecoder("utf-8")().decode(content)
