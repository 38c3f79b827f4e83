"""What the next attempt of a job learns from those that failed."""

from collections import Counter

from ppdist.errors import RESTART_VARIABLE, SKIP_STEP_VARIABLE
from ppdist.launch.outcome import Outcome

_LONGEST_PAUSE_SECONDS = 60.0
_POISON_FAILURES = 2


class Restarts:
    """How often a job was restarted, how long to wait, and which steps to leave out.

    Attributes:
        attempt: 0 at first.
        skip: steps that failed twice: something in their images ends the ranks.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.skip: tuple[int, ...] = ()
        self._failures: Counter[int] = Counter()  # by step
        self._furthest = 0  # step that was reached
        self._in_vain = 0  # failures since an attempt got further than all before it

    def learn(self, outcome: Outcome) -> None:
        """An attempt has failed; the next begins."""
        self.attempt += 1
        step = outcome.step or 0
        reached = max(step, outcome.reached)
        self._in_vain = 1 if reached > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, reached)
        for passed in [each for each in self._failures if each < step]:
            del self._failures[passed]
        if step:
            self._failures[step] += 1
            if self._failures[step] >= _POISON_FAILURES:
                self.skip = tuple(sorted({*self.skip, step}))

    def agree(self, attempt: int, skip: tuple[int, ...]) -> None:
        """What all hosts agreed on when they met."""
        self.attempt, self.skip = attempt, skip

    @property
    def pause(self) -> float:
        """Seconds until the next attempt: 1, 2, 4, ..., anew when one got further; 0 at first."""
        if self._in_vain == 0:
            return 0.0
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(self._in_vain - 1, 10))

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks of this attempt find in their environment."""
        found = {}
        if self.attempt:
            found[RESTART_VARIABLE] = str(self.attempt)
        if self.skip:
            found[SKIP_STEP_VARIABLE] = ",".join(str(step) for step in self.skip)
        return found
