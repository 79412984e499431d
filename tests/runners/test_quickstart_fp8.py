"""The quickstart through 8-bit floats is as good as in float32: the margin that docs/quantization.md states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.runners.train import run_training

ROOT = Path(__file__).parents[2]
MARGIN = 0.005  # of the held-out tokens


@pytest.mark.slow
@pytest.mark.exhaustive
def test_accuracy_is_within_the_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths of the shipped file count from here

    def accuracy(algorithm: str) -> float:
        output = tmp_path / algorithm
        overrides = [f"weight_quantize_algo={algorithm}", f"output_dir={output}", "save_strategy=no", "report_to=none"]
        run_training(Config.load(Path("examples/configs/quickstart/sft.yaml"), overrides, verb="train"))
        return json.loads((output / "eval_results.json").read_text())["eval_token_accuracy"]

    plain = accuracy("none")
    assert plain > 0.98
    assert accuracy("fp8_linear") == pytest.approx(plain, abs=MARGIN)
