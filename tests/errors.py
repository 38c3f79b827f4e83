"""How tests expect errors: by their code, and by what no other text of that code has."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ppdist.common.errors import CodedError


@contextmanager
def raises(code: str, *facts: str) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """An error of this code, whose text holds these facts: a place, a value, a name.

    docs/errors.md holds the sentences themselves, and a test compares it with the source.
    """
    with pytest.raises(CodedError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    for fact in facts:
        assert fact in str(caught.value)
