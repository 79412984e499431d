from __future__ import annotations

import math

import pytest

from erniekit.data.conversation import check_probabilities
from erniekit.errors import DataError


def test_probabilities_become_numbers():
    assert check_probabilities([0, 2.5, "1"]) == [0.0, 2.5, 1.0]


@pytest.mark.parametrize(
    "values, message",
    [
        ([0.5, math.nan], "data probabilities 0.5, nan: expected numbers from 0 upwards, got nan"),
        ([0.5, math.inf], "got inf"),
        ([0.5, -1], "got -1"),
        (["half"], "got half"),
        ([0, 0.0], "expected at least one above 0"),
        ([1e308, 1e308], "expected numbers whose sum is finite, got infinity"),
        ([], "expected at least one above 0"),
    ],
)
def test_probabilities_that_cannot_be_used(values, message):
    with pytest.raises(DataError, match=message):
        check_probabilities(values)
