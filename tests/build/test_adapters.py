"""What of a configuration decides which adapters a run trains, and what they start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build import adapters
from erniekit.config import Config
from erniekit.errors import CheckpointError, ConfigurationError
from erniekit.hub.object_store import ObjectFolder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.config import LoraSettings

LORA: dict[str, Any] = {"lora": True, "continue_training": True}


@pytest.mark.parametrize(
    ("values", "field", "seen"),
    [
        ({"lora_rank": 4}, "rank", 4),
        ({"lora_rank": 4}, "alpha", 8.0),
        ({"lora_alpha": 3}, "alpha", 3.0),
        ({"rslora": True}, "alpha", 4.0),
        ({"rslora": True}, "rslora", True),
        ({"lora_dropout": 0.25}, "dropout", 0.25),
        ({"dora": True}, "dora", True),
        ({"lora_init": "pissa"}, "init", "pissa"),
        ({"lora_target_modules": ["q_proj"]}, "target_modules", ("q_proj",)),
    ],
    ids=str,
)
def test_settings_of_new_adapters(
    values: dict[str, Any], field: str, seen: Any, make_config: Callable[..., Config]
) -> None:
    assert getattr(adapters.lora_settings(make_config(**LORA, **values)), field) == seen


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_where_adapters_come_from(make_config: Callable[..., Config], adapter_folder: Path, tmp_path: Path) -> None:
    weights, here = str(tmp_path), str(adapter_folder)
    assert adapters.initial_adapters(make_config(**LORA)) is None
    assert adapters.initial_adapters(make_config(**LORA, init_from_checkpoint=weights)) is None
    assert adapters.initial_adapters(make_config(**LORA, init_from_checkpoint=here)) == adapter_folder
    assert adapters.initial_adapters(make_config(**LORA, lora_path=here)) == adapter_folder
    assert adapters.initial_adapters(make_config(lora_path=here)) is None
    with pytest.raises(ConfigurationError, match="holds adapters, but lora is false"):
        adapters.initial_adapters(make_config(continue_training=True, init_from_checkpoint=here))


def test_a_checkpoint_holds_what_the_run_trains(
    make_config: Callable[..., Config], adapter_folder: Path, tmp_path: Path, tiny_model: Path
) -> None:
    model = ModelConfig.from_folder(tiny_model)
    assert adapters.adapter_plan(make_config(), model) is None
    assert adapters.adapter_plan(make_config(), model, tmp_path) is None
    with pytest.raises(CheckpointError) as refused:
        adapters.adapter_plan(make_config(), model, adapter_folder)
    assert "it has adapters, but this run trains all weights.\n  Write lora: true as" in str(refused.value)
    with pytest.raises(CheckpointError) as refused:
        adapters.adapter_plan(make_config(**LORA), model, tmp_path)
    assert "it has a full model, but this run trains adapters.\n  Write lora: false as" in str(refused.value)


def test_adapters_name_the_base_that_they_were_trained_on(
    make_config: Callable[..., Config], adapter_folder: Path, tmp_path: Path, tiny_model: Path
) -> None:
    assert adapters.base_name(make_config(**LORA)) == str(tiny_model.resolve())
    assert adapters.base_name(make_config(**LORA, init_from_checkpoint=str(tmp_path))) == str(tmp_path.resolve())
    assert adapters.base_name(make_config(**LORA, init_from_checkpoint=str(adapter_folder))) == str(tiny_model)
    assert adapters.base_name(make_config(**LORA, model_name_or_path="a/hub")) == "a/hub"
    assert adapters.base_name(make_config(**LORA, model_name_or_path="s3://b/model")) == "s3://b/model"
    fetched = make_config(**LORA, init_from_checkpoint="s3://b/start").with_paths(
        {"init_from_checkpoint": str(tmp_path)}
    )
    assert adapters.base_name(fetched) == "s3://b/start", "not where it is on this machine"


def test_adapters_know_those_that_they_began_with(
    store: ObjectFolder, adapter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    assert adapters.parent_adapters(run) is None
    store.write("first/adapter_config.json", b"{}")
    for start in (str(adapter_folder), f"{store.url}/first"):
        (run / "training_config.yaml").write_text(f"lora_path: {start}\n")
        found = adapters.parent_adapters(run)
        assert found is not None and (found / "adapter_config.json").is_file()
    (run / "training_config.yaml").write_text(f"lora_path: {tmp_path}\n")
    assert adapters.parent_adapters(run) is None


def test_settings_that_differ_from_stored_adapters_are_refused(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr(adapters, "is_adapter_folder", lambda folder: str(folder) == "stored")
    monkeypatch.setattr(adapters, "_stored_settings", lambda folder, model: stored)
    model = ModelConfig.from_folder(tiny_model)
    stored: LoraSettings = adapters.lora_settings(make_config(**LORA))
    plan = adapters.adapter_plan(make_config(**LORA, lora_path="stored", lora_dropout=0.5), model)
    assert plan is not None and plan.folder == Path("stored") and plan.settings.dropout == 0.5
    with pytest.raises(ConfigurationError, match="`lora_rank`: the adapters in stored have 8, not 4"):
        adapters.adapter_plan(make_config(**LORA, lora_path="stored", lora_rank=4), model)
