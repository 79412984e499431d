"""What we save opens in the package omnivoice with equal logits; it needs transformers 5, an environment of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from erniekit.model.code_layers import code_logits
from erniekit.model.weights import save_model_folder
from tests.model.omnivoice_cases import BASES, LEVELS
from tests.model.test_recorded_omnivoice import hidden_and_labels, seeded_model
from tests.parity.test_transformers5 import PYTHON_5, ROOT

pytestmark = pytest.mark.parity


PACKAGES = PYTHON_5.parents[1].glob("lib/python3*/site-packages/omnivoice")


@pytest.mark.skipif(not any(PACKAGES), reason=f"{PYTHON_5} has no omnivoice 0.2.1")
@pytest.mark.parametrize("base", BASES)
def test_the_package_opens_what_we_save(base: str, tmp_path: Path) -> None:
    decoder = seeded_model(base)
    hidden, _ = hidden_and_labels(decoder)
    ours = np.stack([code_logits(decoder, hidden[0], level).numpy() for level in range(LEVELS)], axis=1)
    save_model_folder(decoder, tmp_path / "ours", ())
    tool, output = ROOT / "tools/parity/record_omnivoice.py", tmp_path / "logits.npy"
    command = [str(PYTHON_5), str(tool), "--open", str(tmp_path / "ours"), "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    np.testing.assert_allclose(np.load(output), ours, atol=1e-5 * np.abs(ours).max())
