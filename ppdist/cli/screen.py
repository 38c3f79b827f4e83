"""Output of a dry run: on a terminal it fits 30 lines, in a pipe or file it is whole."""

import math
import shutil
import sys
from collections.abc import Iterable, Sequence

from ppdist.common.console import Opening, shorten_words

_LINES = 30
_TABLE_LINES = 12  # for decisions
_DATA_LINES = 4  # for kinds of problems in the data
# Decisions that may share one line, the least interesting first.
_SECONDARY = (
    "checkpoint.every_epochs",
    "train.phases_for_epochs",
    "schedule.warmup_least_steps",
    "schedule.warmup_epochs",
    "optimizer.layer_decay",
    "train.multi_scale",
)
_OVERRIDE = "-o"  # the reason of what the user typed

Decision = tuple[str, str, str]  # what was decided, its value or "" if it has none, the reason


class Screen:
    """Prints lines; on a terminal, it shortens or leaves out some so that all of them fit."""

    def __init__(self) -> None:
        """Measures the terminal, if stdout is one."""
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        self._left = _LINES

    def print_decisions(self, rows: Sequence[Decision]) -> None:
        """Prints a table of decisions, one line each."""
        rows = rows if self._width is None else _fold_rows(rows, _TABLE_LINES)
        name_width = max((len(name) for name, value, _ in rows if value), default=0)
        self.print_short(
            f"{name:{name_width}}  {value:10}  {reason}" if value else f"{name}: {reason}"
            for name, value, reason in rows
        )

    def print_short(self, texts: Iterable[str]) -> None:
        """Prints texts, each of which may be cut to one line."""
        self.print([self._cut(text) for text in texts])

    def print_problems(self, texts: Sequence[str], command: str) -> None:
        """Prints the kinds of problems in the data, and the command that shows them in full.

        Args: texts: `warning: ...` or `note: ...` each, the most severe first.
        """
        hidden = ""
        if self._width is not None:
            opening = Opening(self._width, left=_DATA_LINES)
            lines = [opening.shorten(self._cut(text), text[:4] != "note") for text in texts]
            texts, hidden = [line for line in lines if line], opening.describe_withheld()
        if texts:
            self.print([*texts, f"{hidden or 'in full'}: `{command}`"])

    def print_end(self, warnings: Iterable[str], lines: Sequence[str]) -> None:
        """Prints the warnings of the run, for which the rest of the screen is left, then lines."""
        texts = [f"warning: {warning}" for warning in warnings]
        if self._width is not None:
            opening = Opening(self._width, left=max(2, self._left - self._count(lines) - 1))
            shortened = [opening.shorten(text) for text in texts]
            if shortened != texts:
                hidden = opening.describe_withheld() or "shortened"
                texts = [*filter(None, shortened), f"{hidden}: the same with `| cat` shows all"]
        self.print([*texts, *lines])

    def print(self, lines: Sequence[str]) -> None:
        """Prints lines as they are."""
        if lines:
            print(*lines, sep="\n")
        self._left -= self._count(lines)

    def _cut(self, text: str) -> str:
        if self._width is None or len(text) <= self._width:
            return text
        return shorten_words(text, self._width)

    def _count(self, texts: Sequence[str]) -> int:
        """Counts the lines of the terminal that texts take."""
        width = self._width or sys.maxsize
        return sum(max(1, math.ceil(len(text) / width)) for text in texts)


def _fold_rows(rows: Sequence[Decision], limit: int) -> Sequence[Decision]:
    """Joins the least interesting decisions into one row if there are more than `limit`."""
    ranks = {name: rank for rank, name in enumerate(_SECONDARY)}
    foldable = [row for row in rows if row[0] in ranks or row[2] == _OVERRIDE]
    foldable.sort(key=lambda row: ranks.get(row[0], len(ranks)))
    folded = foldable[: len(rows) - limit + 1] if len(rows) > limit else []
    if len(folded) < 2:
        return rows
    values = ", ".join(f"{name} {value}" for name, value, _ in folded)
    return [*(row for row in rows if row not in folded), ("also set", "", values)]
