"""The sound of a fitted codec is understood by an outside recogniser; tools/parity/intelligibility.py has the table."""

from __future__ import annotations

import pytest

from erniekit.codecs.residual_kmeans import ResidualKMeansConfig, fit_residual_kmeans
from tools.parity.intelligibility import MAY_GROW, Recogniser, errors, of_levels, spoken

pytestmark = [pytest.mark.parity, pytest.mark.slow]


def test_the_fitted_codec_is_understood_nearly_as_well_as_the_original():
    """Held-out voices and phrases; one level of few codes is not, so the measure can tell."""
    fits, tests = spoken(fit=150, held_out=10)
    codec = fit_residual_kmeans((said.sound for said in fits), ResidualKMeansConfig())
    recogniser = Recogniser()
    original = errors(recogniser, tests, lambda sound: sound)
    assert original.words.sum() > 120 and original.rate < 0.25
    found = errors(recogniser, tests, lambda sound: codec.decode(codec.encode(sound)))
    assert found.rate <= MAY_GROW * original.rate
    coarse = fit_residual_kmeans((said.sound for said in fits[:20]), ResidualKMeansConfig(levels=1, codebook_size=8))
    some = tests[:6]
    spoilt = errors(recogniser, some, lambda sound: of_levels(coarse, 1, 8).decode(coarse.encode(sound)))
    assert spoilt.rate > 2 * original.rate
