"""Numbers on the command lines of the data tools."""

import argparse

import pytest

from ppdist.common.arguments import at_least, time_in


def test_whole_numbers_from_the_least_on_are_taken():
    assert [at_least(0)(text) for text in ("0", "7", "+3")] == [0, 7, 3]
    assert at_least(-2)("-2") == -2


@pytest.mark.parametrize("text", ["-1", "1.5", "", "x", "1e3", "-"])
def test_other_texts_are_refused_with_what_is_expected(text):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        at_least(0)(text)
    assert repr(text) in str(refused.value)


def test_a_time_is_a_number_above_0():
    assert time_in("seconds")("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="a number of seconds above 0, found"):
            time_in("seconds")(text)
