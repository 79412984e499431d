"""Models that listen on every kind of layout: losses, norms and weights are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from erniekit.build.layout import workload
from erniekit.distributed.planning.memory import tensor_bytes, training_memory
from erniekit.model.architectures.model_config import ModelConfig
from tests.config.samples import load
from tests.distributed.cases import audio
from tests.distributed.ranks import run_ranks
from tests.model.tiny_audio import VOXTRAL

pytestmark = pytest.mark.distributed

CASES: dict[str, dict[str, Any]] = {
    "voxtral": {"family": "voxtral", "audio_lr_ratio": 0.5, "weight_decay": 0.1},
    "qwen2_audio": {"family": "qwen2_audio"},
    "frozen encoder": {"family": "voxtral", "freeze_config": "freeze_audio"},
    "projector alone": {"family": "qwen2_audio", "freeze_config": "freeze_audio freeze_llm"},
    "recompute": {"family": "voxtral", "recompute": True},
    "adapters": {"family": "voxtral", "lora": True, "lora_target_modules": "audio_tower multi_modal_projector q_proj"},
    "adapters of the decoder": {"family": "qwen2_audio", "lora": True, "recompute": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_parallel_degree": 2},
    "tp2 + sp": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_degree": 2},
    "sharding1": {"sharding_parallel_degree": 2, "sharding": "stage1"},
    "sharding2": {"sharding_parallel_degree": 2, "sharding": "stage2"},
    "sharding3": {"sharding_parallel_degree": 2, "sharding": "stage3"},
}


TENSOR, PIPELINE = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
ON_FOUR: dict[str, dict[str, Any]] = {
    "tp2 x pp2 + sp": {**TENSOR, **PIPELINE, "sequence_parallel": True},
    "tp2 x sharding1": {**TENSOR, **LAYOUTS["sharding1"]},
    "pp2 x dp2": {**PIPELINE},
}
SHORT = dict.fromkeys(("tp2 + sp", "pp2", "sharding3"), ("voxtral", "frozen encoder"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of what one process computes, once for all layouts."""
    return str(tmp_path_factory.mktemp("alone"))


def check(layout: str, cases: tuple[str, ...], results: str) -> None:
    chosen = {name: CASES[name] for name in cases}
    world, degrees = (2, LAYOUTS[layout]) if layout in LAYOUTS else (4, ON_FOUR[layout])
    job = {"world": world, "degrees": degrees, "cases": chosen, "results": results}
    for found in run_ranks(audio.compare_all, world, timeout=300, **job):
        assert found.keys() == chosen.keys()
        for name, differences in found.items():
            assert max(differences["loss"], differences["weight"]) < 1e-9, (name, differences)
            assert differences["moved"] > 0, name


@pytest.mark.parametrize("layout", SHORT)
def test_a_layout_gives_the_numbers_of_one_process(layout: str, results: str) -> None:
    check(layout, SHORT[layout], results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [each if each == "tp2 + sp" else pytest.param(each, marks=pytest.mark.exhaustive) for each in LAYOUTS]
)
def test_every_other_way_of_training_on_every_layout(layout: str, results: str) -> None:
    check(layout, tuple(name for name in CASES if name not in SHORT.get(layout, ())), results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ON_FOUR)
def test_layouts_of_four_ranks(layout: str, results: str) -> None:
    check(layout, tuple(CASES), results)


SHAPE: dict[str, Any] = {
    **VOXTRAL,
    "text_config": {**VOXTRAL["text_config"], "hidden_size": 64},
    "audio_config": {
        **VOXTRAL["audio_config"], "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_mel_bins": 32, "max_source_positions": 200,
    },
}  # fmt: skip
WINDOWS = 4


WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "recompute": {"recompute": True},
    "frozen": {"freeze_config": "freeze_audio"},
}


@pytest.mark.slow
def test_what_an_encoder_takes_is_what_is_estimated() -> None:
    """Recomputed layers keep their input alone, and a frozen encoder keeps nothing."""
    peaks, model = {}, ModelConfig.from_json(SHAPE)
    for name, values in WAYS.items():
        (peaks[name],) = run_ranks(audio.peak_of_training, 1, shape=SHAPE, windows=WINDOWS, **values)
        work = replace(workload(load(**values), model), batch_size=1, max_seq_len=audio.row_length(WINDOWS))
        estimate = tensor_bytes(training_memory(model, work))
        assert 0.7 < estimate / peaks[name] < 1.4, (name, estimate, peaks[name])
    assert peaks["recompute"] < 0.6 * peaks["all"] and peaks["frozen"] < 0.5 * peaks["all"], peaks
