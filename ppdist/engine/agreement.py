"""Work that may fail on one rank: then all of them hear of it, and none waits for the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ppdist import dist
from ppdist.errors import UserError

T = TypeVar("T")


@dataclass
class Agreed(Generic[T]):
    """Of a piece of work that all ranks have done."""

    value: T  # what it returned on this rank
    said_W: list[Any]  # what each rank said of its own


class EvaluationFailed(RuntimeError):
    """Raised on every rank alike, and training is as it was: some rank could not do its part."""


def agreed(work: Callable[[], T], say: Callable[[T], Any] = lambda value: None) -> Agreed[T]:
    """What `work` returned on this rank, if it did on all; every rank calls it.

    Args: say: what the other ranks shall know of what it returned; it must survive JSON.
    Raises: EvaluationFailed, on every rank: it raised on some, not only by users' mistakes.
        UserError, on every rank: by users' mistakes alone.
    """
    value, failure, mine, told = None, None, None, None
    try:
        value = work()
        told = say(value)
    except Exception as error:
        failure = error
        text = f"rank {dist.rank()} (host {dist.host()}): {type(error).__name__}: {error}"
        mine = [isinstance(error, UserError), text]
    said_W = dist.exchange([mine, told])
    failed = [failure for failure, _ in said_W if failure]
    if not failed:
        return Agreed(cast(T, value), [told for _, told in said_W])
    if all(is_users for is_users, _ in failed):
        raise failure or UserError(failed[0][1])
    raise EvaluationFailed("; ".join(text for _, text in failed)) from failure
