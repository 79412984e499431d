"""Rounding to 8-bit floats against ml_dtypes, to the bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import paddle
import pytest

from erniekit.model.quantization.float8 import DTYPES, FP8_MAX, Float8, encode

from ..model.quantization.test_float8 import SHAPES, samples

pytestmark = pytest.mark.parity
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("form", SHAPES)
def test_codes_are_those_of_ml_dtypes(form: str) -> None:
    x = samples(form)
    found = encode(paddle.to_tensor(x), form, paddle.to_tensor(FP8_MAX[form]))
    expected = x.clip(-FP8_MAX[form], FP8_MAX[form]).astype(TYPES[form])
    np.testing.assert_array_equal(found.codes.view("uint8").numpy(), expected.view(np.uint8))


@pytest.mark.parametrize("form", SHAPES)
def test_all_codes_stand_for_the_same_and_are_met_again(form: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(TYPES[form]).astype(np.float32)
    found = Float8(paddle.to_tensor(codes).view(DTYPES[form]), paddle.to_tensor(1.0)).decoded().numpy()
    np.testing.assert_array_equal(found, values)
    again = encode(paddle.to_tensor(values), form, paddle.to_tensor(FP8_MAX[form])).codes.view("uint8").numpy()
    finite = np.isfinite(values)
    np.testing.assert_array_equal(again[finite], codes[finite])
    assert np.isnan(again.view(TYPES[form]).astype(np.float32)[np.isnan(values)]).all()
    # infinity, which e5m2 has, becomes the largest code, as in casts that saturate
    np.testing.assert_array_equal(np.abs(again.view(TYPES[form]).astype(np.float32)[np.isinf(values)]), FP8_MAX[form])
