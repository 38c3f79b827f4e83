"""Lines of the console as JSON: `log.format: json`, or PPDIST_LOG_FORMAT=json.

One object a line, of `time` (UTC), `source`, `level`, `rank`, `step`, `code` and `message`; what
does not apply is null.  train.log and metrics.jsonl stay as they are.
"""

import json
import logging
import os
import re
from datetime import datetime, timezone

from ppdist.common.job import launched_rank

FORMAT_VARIABLE = "PPDIST_LOG_FORMAT"  # json: every process of the job, from its first line on

# `ppdist: warning: text` of a command, `error: text` of fleetrun.
_PREFIX = re.compile(r"^(?:(?:ppdist|fleetrun): )?(?:(error|warning|note): )?")


class _State:
    """The format of this process's log lines, and the step that they state."""

    chosen = False  # by the configuration
    step: int | None = None


def choose_format(name: str) -> None:
    """Applies `log.format` of a configuration, until the process ends or another is applied."""
    _State.chosen, _State.step = name == "json", None


def is_json() -> bool:
    """Returns True if lines of this process are JSON."""
    return _State.chosen or os.environ.get(FORMAT_VARIABLE) == "json"


def note_step(step: int) -> None:
    """Notes the last optimizer step, from 1, that this rank has finished."""
    _State.step = step


def format_record(record: logging.LogRecord) -> str:
    """Formats a log record; its code is that of `extra={"code": ...}`."""
    level, code = record.levelname.lower(), getattr(record, "code", None)
    return _format(record.created, "ppdist", level, record.getMessage(), code)


def format_text(
    text: str, *, time: float, source: str = "ppdist", code: str = "", fails: bool = False
) -> str:
    """Formats a line of a command or of fleetrun, whose prefix gives the level.

    Args:
        time: seconds since 1970.
        code: code of the error, which the text may contain in brackets at its end.
        fails: True if the line is an error, whatever its prefix.
    """
    text = text.strip()
    match = _PREFIX.match(text)
    assert match is not None  # every part of it is optional
    level = {None: "info", "note": "info"}.get(match[1], match[1])
    message = text[match.end() :].removesuffix(f" [{code}]")
    return _format(time, source, "error" if code or fails else level, message, code)


def code_of(message: str) -> str:
    """Returns the code that `errors.with_code` has appended to a message; "": none."""
    match = re.search(r" \[([a-z]+(?:_[a-z0-9]+)+)\]$", message)
    return match[1] if match else ""


def _format(time: float, source: str, level: str, message: str, code: str | None) -> str:
    moment = datetime.fromtimestamp(time, timezone.utc)
    line = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "source": source,
        "level": level,
        "rank": None if source == "fleetrun" else launched_rank(),
        "step": _State.step,
        "code": code or None,
        "message": message,
    }
    return json.dumps(line, ensure_ascii=False)
