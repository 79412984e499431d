"""What of a configuration reaches the device, the model and its objectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import model
from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.model.native import path_in_use
from erniekit.model.recompute import Recompute
from erniekit.native import library


def test_the_device_is_the_one_that_is_asked_for(make_config: Callable[..., Config], monkeypatch: Any) -> None:
    monkeypatch.setattr("erniekit.model.device.use_device", lambda asked: asked)
    monkeypatch.setattr(model, "choose_kernels", lambda config: None)
    assert model.select_device(make_config(device="cpu")) == "cpu"
    assert model.select_device(make_config(device="gpu:1")) == "gpu:1"


@pytest.mark.proves("cpu_kernels")
def test_the_kernels_of_a_cpu_are_those_asked_for(
    make_config: Callable[..., Config], monkeypatch: Any, logged: list[str]
) -> None:
    monkeypatch.setattr(library, "_wanted", "auto")
    model.select_device(make_config(device="cpu", cpu_kernels="paddle"))
    assert library.kernels().path == "paddle" and logged.pop().endswith("; kernels: paddle (cpu_kernels: paddle)")
    best = library.use("auto")
    model.select_device(make_config(device="cpu"))
    assert library.kernels() == best and logged.pop().endswith(f"; kernels: {best.path} ({best.reason})")
    monkeypatch.setattr(library, "processor_paths", lambda: ["avx2"])
    library._open.cache_clear()
    with pytest.raises(ConfigurationError, match="cpu_kernels: avx512: this processor lacks some"):
        model.select_device(make_config(device="cpu", cpu_kernels="avx512"))


def test_they_have_no_effect_on_a_gpu(make_config: Callable[..., Config], monkeypatch: Any, logged: list[str]) -> None:
    monkeypatch.setattr("erniekit.model.device.use_device", lambda asked: "gpu:0")
    monkeypatch.setattr("paddle.get_device", lambda: "gpu:0")
    monkeypatch.setattr(library, "use", lambda wanted: pytest.fail("a GPU needs no library"))
    model.select_device(make_config(device="gpu", cpu_kernels="avx2"))
    assert logged == ["device: gpu:0", "`cpu_kernels: avx2` (config.yaml:2) has no effect on a GPU"]
    assert path_in_use() == "paddle"


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({"seed": 7}, "seed", 7),
        ({"hidden_dropout_prob": 0.25}, "hidden_dropout", 0.25),
        ({"attention_probs_dropout_prob": 0.25}, "attention_dropout", 0.25),
        ({}, "recompute", None),
        ({"recompute": True}, "recompute", Recompute(False, 0, "full")),
        ({"recompute": True, "recompute_use_reentrant": True}, "recompute", Recompute(True, 0, "full")),
        ({"recompute": True, "no_recompute_layers": 1}, "recompute", Recompute(False, 1, "full")),
        ({"recompute": True, "recompute_granularity": "core_attn"}, "recompute", Recompute(False, 0, "core_attn")),
        ({}, "cleared", False),
        ({"moe_use_aux_free": False}, "cleared", True),
        ({"tensor_parallel_output": False}, "parallel_output", False),
        ({"tensor_parallel_output": True}, "parallel_output", True),
    ],
    ids=str,
)
def test_what_the_model_is_built_with(
    values: dict[str, Any], argument: str, seen: Any, make_config: Callable[..., Config], monkeypatch: Any
) -> None:
    told: dict[str, Any] = {"cleared": False}
    head = SimpleNamespace()
    built = SimpleNamespace(pipeline_stage=SimpleNamespace(last=True), head=head)
    monkeypatch.setattr("erniekit.model.builder.build_model", lambda *parts, **named: told.update(named) or built)
    monkeypatch.setattr("erniekit.model.moe.router.clear_correction_bias", lambda model: told.update(cleared=True))
    monkeypatch.setattr(model, "apply_mixed_precision", lambda *parts: None)
    model.open_model(make_config(**values), None)
    assert (told | vars(head))[argument] == seen


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"continue_training": True}, "model"),
        ({"continue_training": True, "init_from_checkpoint": "weights"}, "weights"),
    ],
    ids=str,
)
def test_where_the_weights_of_a_run_come_from(
    values: dict[str, Any], expected: str | None, make_config: Callable[..., Config], monkeypatch: Any
) -> None:
    monkeypatch.setattr(model, "model_folder", lambda config, weights: Path("model"))
    assert model.initial_weights(make_config(**values)) == (Path(expected) if expected else None)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"use_fused_head_and_loss_fn": True}, "fused_head"),
        ({"use_sparse_head_and_loss_fn": True}, "sparse_head"),
        ({"use_flash_attention": False}, "dense_mask"),
    ],
    ids=str,
)
def test_settings_of_the_head(values: dict[str, Any], name: str, make_config: Callable[..., Config]) -> None:
    plain, changed = model.head_settings(make_config()), model.head_settings(make_config(**values))
    assert changed == plain | {name: not plain[name]}


def test_the_dense_mask_is_compared_with_the_memory(make_config: Callable[..., Config], monkeypatch: Any) -> None:
    told: list[int] = []
    monkeypatch.setattr(model, "dense_mask_size", lambda config, *datasets: 7)
    monkeypatch.setattr(model, "check_dense_mask", lambda *told_to: told.extend(told_to))
    model.announce_dense_mask(make_config())
    assert told == []
    model.announce_dense_mask(make_config(use_flash_attention=False, max_seq_len=64))
    assert told == [7, 64]
