"""Tokens are drawn as NumPy draws them in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erniekit.native import library

pytestmark = pytest.mark.usefixtures("native_path")


def draw(
    logits_RV: np.ndarray, temperatures_R: np.ndarray, divisors_R: np.ndarray, shares_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = logits_RV.shape
    tokens_R, logps_R = np.empty(rows, np.int64), np.empty(rows)
    arrays = [logits_RV.astype(np.float32), temperatures_R.astype(np.float64), divisors_R.astype(np.float32), shares_R]
    kernel = library.function("draw_tokens", "llpppppp")
    kernel(rows, columns, *(array.ctypes.data for array in [*arrays, tokens_R, logps_R]))
    return tokens_R, logps_R


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tokens_and_logarithms_are_those_of_numpy(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 7, 63, 64, 65, 200, 1031]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=data.draw(st.sampled_from([0.1, 3.0, 200.0])), size=(rows, columns)).astype(np.float32)
    if columns > 1:
        logits[rng.random(logits.shape) < 0.2] = -np.inf
        logits[:, rng.integers(columns)] = 1.0
    temperatures = rng.choice([0.3, 1.0, 1.7], rows)
    divisors = np.where(rng.random(rows) < 0.5, temperatures, 1.0).astype(np.float32)
    shares = rng.random(rows)
    tokens, logps = draw(logits, temperatures, divisors, shares)
    for row in range(rows):
        weights = np.exp((logits[row].astype(np.float64) - logits[row].max()) / temperatures[row])
        sums = np.cumsum(weights)
        place = shares[row] * sums[-1]
        near = 1e-12 * sums[-1]  # where sums round to either side
        assert weights[tokens[row]] > 0
        assert sums[tokens[row]] >= place - near and sums[tokens[row]] - weights[tokens[row]] <= place + near
        shown = (logits[row] / divisors[row]).astype(np.float64)
        expected = shown[tokens[row]] - shown.max() - np.log(np.exp(shown - shown.max()).sum())
        assert logps[row] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("share", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_a_row_have_a_probability(share: float) -> None:
    logits = np.full((1, 150), -np.inf)
    logits[0, [3, 80, 120]] = [0.0, 1.0, 2.0]
    tokens, _ = draw(logits, np.ones(1), np.ones(1), np.array([share]))
    assert tokens[0] == (3 if share == 0.0 else 120)


def test_rows_that_are_not_finite_give_a_token() -> None:
    logits = np.zeros((3, 70))
    logits[0, 5], logits[1, 6], logits[2] = np.nan, np.inf, -np.inf
    tokens, _ = draw(logits, np.ones(3), np.ones(3), np.full(3, 0.5))
    assert ((tokens >= 0) & (tokens < 70)).all()


def test_nothing_is_compiled_for_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.function_if_open("draw_tokens", "llpppppp") is not None
    library._open.cache_clear()
    monkeypatch.setattr(library, "_library", lambda path: pytest.fail("opened"))
    assert library.function_if_open("draw_tokens", "llpppppp") is None
