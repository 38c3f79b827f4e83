"""Work that may fail on one rank: then all of them hear of it, and none waits for the others."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

from ppdist import dist
from ppdist.errors import CodedError, Failure, UserError, failure_of

T = TypeVar("T")


@dataclass
class Agreed(Generic[T]):
    """Of a piece of work that all ranks have done."""

    value: T  # what it returned on this rank
    said_W: list[Any]  # what each rank said of its own


class EvaluationFailed(CodedError, RuntimeError):
    """Raised on every rank alike, and training is as it was: some rank could not do its part."""

    kind = "evaluation"


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
        heard = failure_of(error).of_rank(dist.rank(), dist.host())
        mine = [isinstance(error, UserError), text, asdict(heard)]
    said_W = dist.exchange([mine, told])
    failed = [failure for failure, _ in said_W if failure]
    if not failed:
        return Agreed(cast(T, value), [told for _, told in said_W])
    first = Failure(**failed[0][2])
    if all(is_users for is_users, _, _ in failed):
        raise failure or first.error()
    ended = EvaluationFailed("; ".join(text for _, text, _ in failed), code="evaluation_failed")
    ended.from_rank = None if failure else first.from_rank
    raise ended from failure
