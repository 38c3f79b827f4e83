"""What was found about one model, as lines of a table."""

from dataclasses import dataclass, field

from tests.reference.parity.measure import GROUPS, Measurement

NAME_WIDTH, CELL_WIDTH = 16, 15


@dataclass
class ModelReport:
    """All measurements of one reference.

    Attributes:
        error: why the comparison stopped or never started; "" if it did not.
        unread: arrays of the file that nothing was compared with.
    """

    name: str
    measurements: list[Measurement] = field(default_factory=list)
    error: str = ""
    unread: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[Measurement]:
        """What is further off than its tolerance, the worst first."""
        return sorted((m for m in self.measurements if not m.passed), key=lambda m: -m.strain)

    @property
    def passed(self) -> bool:
        return self.verdict == "PASS"

    @property
    def verdict(self) -> str:
        """ERROR: not understood; FAIL: a number is off; INCOMPLETE: not all was compared."""
        if self.error:
            return "ERROR"
        if self.missed:
            return "FAIL"
        return "INCOMPLETE" if self.unread or not self.measurements else "PASS"

    def lines(self) -> list[str]:
        """The row of the table, and a line for everything that is wrong."""
        cells = [self.cell(group).ljust(CELL_WIDTH) for group in GROUPS]
        result = [f"{self.name:<{NAME_WIDTH}} {' '.join(cells)} {self.verdict}"]
        if self.error:
            result.append(f"  {self.error}")
        for m in self.missed:
            detail = f" ({m.detail})" if m.detail else ""
            result.append(
                f"  {m.group}: {m.name}: off by {m.error:.3g}, allowed {m.tolerance:.3g}{detail}"
            )
        if self.unread:
            result.append(f"  not compared: {', '.join(self.unread)}")
        return result

    def cell(self, group: str) -> str:
        """The measurement of a group that is nearest to its tolerance, or furthest past it."""
        found = [m for m in self.measurements if m.group == group]
        if not found:
            return "-"
        worst = max(found, key=lambda m: m.strain)
        if worst.tolerance > 0:
            return f"{worst.error:.1e}/{worst.tolerance:.0e}"
        return "equal" if worst.passed else f"{worst.error:.0f} differ"


def header() -> str:
    """The first line of the table: error / tolerance, of the worst of each group."""
    return f"{'model':<{NAME_WIDTH}} {' '.join(group.ljust(CELL_WIDTH) for group in GROUPS)}"
