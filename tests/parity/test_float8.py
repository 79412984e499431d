"""Rounding to 8-bit floats against ml_dtypes, to the bit."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.quantization.float8 import LARGEST, encode

from ..model.quantization.test_float8 import SHAPES, samples

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.parity
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("form", SHAPES)
def test_codes_are_those_of_ml_dtypes(form: str) -> None:
    x = samples(form)
    found = encode(paddle.to_tensor(x), form, paddle.to_tensor(LARGEST[form]))
    expected = x.clip(-LARGEST[form], LARGEST[form]).astype(TYPES[form])
    np.testing.assert_array_equal(found.codes.view("uint8").numpy(), expected.view(np.uint8))
