"""Which values of a configuration reach the plans of training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import data
from erniekit.build.data import evaluates, evaluation_dataset, evaluation_plan
from erniekit.build.model import open_tokenizer
from erniekit.build.step_count import cached_step_count
from erniekit.config import Config
from erniekit.data.media import log_mel
from erniekit.data.media.audio_batch import window_states
from erniekit.data.media.clip import AudioInputs
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH
from erniekit.distributed.topology import Topology
from erniekit.errors import UserError
from erniekit.model import processor_files
from erniekit.model.architectures.architecture import EncoderInput
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from tests.model.tiny import tiny_config
from tests.model.tiny_audio import VOXTRAL


@pytest.mark.proves("evaluation_strategy", "do_eval")
@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, True), ({"evaluation_strategy": "no"}, False), ({"do_eval": False}, False)],
)
def test_whether_a_run_evaluates(
    values: dict[str, Any], expected: bool, make_config: Callable[..., Config], records: Any
) -> None:
    asked = {"do_eval": True, "eval_dataset_path": str(records), "evaluation_strategy": "epoch"}
    assert evaluates(make_config(**{**asked, **values})) is expected


@pytest.mark.proves("packing", "greedy_intokens", "buffer_size", "max_seq_len", "per_device_eval_batch_size")
@pytest.mark.parametrize(
    "values",
    [
        {"packing": False},
        {"greedy_intokens": False},
        {"buffer_size": 5},
        {"max_seq_len": 64},
        {"per_device_eval_batch_size": 3},
        {"packing": False, "batch_tokens": 256},
    ],
    ids=str,
)
def test_rows_of_evaluation_are_formed_as_asked(
    values: dict[str, Any], make_config: Callable[..., Config], records: Any
) -> None:
    def batches(**parameters: Any) -> list[Any]:
        config = make_config(do_eval=True, eval_dataset_path=str(records), **parameters)
        plan = evaluation_plan(config, evaluation_dataset(config, *open_tokenizer(config)))
        return [batch.samples for step in range(plan.steps_in_epoch(0)) for batch in plan.micro_batches(step)]

    assert batches(**values) != batches(packing=values.get("packing", True) or "batch_tokens" not in values)


def test_what_the_encoder_of_a_model_takes(make_config: Callable[..., Config], monkeypatch: Any) -> None:
    config = make_config()
    assert data.audio_of_model(config) is None
    listens = EncoderInput(7, 8, 20, 5, lambda frames: frames)
    family = ARCHITECTURES[ModelConfig.from_folder(Path(config.basic.model_name_or_path)).model_type]
    monkeypatch.setitem(ARCHITECTURES, family.model_type, replace(family, audio=lambda config: listens))
    inputs = data.audio_of_model(config)
    assert inputs is not None and inputs == AudioInputs(*listens)
    assert (inputs.placeholder_id, inputs.mel_bins, inputs.window_frames, inputs.window_tokens) == (7, 8, 20, 5)
    tokenizer, template = open_tokenizer(config)
    assert data.training_dataset(config, tokenizer, template).audio == inputs
    assert data.data_fingerprint_of(config, tokenizer, template).audio
    data.count_steps(config, data.training_plan(config, data.training_dataset(config, tokenizer, template)))
    assert cached_step_count(config) is None  # the lengths of recordings may change


@pytest.mark.parametrize("family", ["voxtral", "qwen2_audio"])
def test_the_families_say_how_many_tokens_a_recording_has(family: str) -> None:
    inputs = data.audio_inputs(tiny_config(model_type=family))
    assert inputs is not None
    for length in (1, 160, 161, 3840, 3841, 10_000):
        assert inputs.clip_tokens(length) == len(window_states(length, inputs))
    assert inputs.clip_tokens(10_000) > inputs.clip_tokens(3840) > 0
    assert data.audio_inputs(tiny_config()) is None


def test_data_can_be_read_with_a_tokenizer_alone(make_config: Callable[..., Config], tmp_path: Path) -> None:
    for content in (None, {"model_type": "unknown"}):
        if content is not None:
            (tmp_path / "config.json").write_text(json.dumps(content))
        assert data.audio_of_model(make_config(model_name_or_path=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("values", "limit", "seen"),
    [
        ({"max_seq_len": 64}, "max_seq_len", 64),
        ({"over_length_policy": "error"}, "over_length", "error"),
        ({"stage": "DPO", "max_prompt_len": 50}, "max_prompt_len", 50),
        ({"stage": "DPO", "offset_alpha": 0.5}, "needs_scores", True),
        ({"stage": "DPO"}, "needs_scores", False),
        ({"split_multi_turn": True}, "split_multi_turn", True),
        ({"on_bad_record": "skip"}, "on_bad_record", "skip"),
    ],
    ids=str,
)
def test_limits_of_a_record(values: dict[str, Any], limit: str, seen: Any, make_config: Callable[..., Config]) -> None:
    assert data.sample_limits(make_config(**values))[limit] == seen


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"stage": "DPO"}, 40),
        ({"stage": "RM"}, 40),
        ({"stage": "KTO"}, 40),
        ({"stage": "SFT"}, None),
        ({"stage": "DPO", "max_seq_len": 41}, 40),
        ({"stage": "DPO", "max_seq_len": 40}, None),
    ],
    ids=str,
)
def test_the_length_beyond_which_pairs_have_their_prompt_twice(
    values: dict[str, Any], window: int | None, make_config: Callable[..., Config], windowed_model: Path
) -> None:
    config = make_config(model_name_or_path=str(windowed_model), **values)
    assert data.sample_limits(config)["pair_window"] == data.pair_window(config) == window
    assert data.pair_window(make_config(**values)) is None


def test_the_window_of_a_reference_counts_too(
    make_config: Callable[..., Config], windowed_model: Path, tmp_path: Path
) -> None:
    config = make_config(stage="DPO", ref_model_name_or_path=str(windowed_model))
    assert data.pair_window(config) == 40
    assert data.pair_window(make_config(stage="DPO", model_name_or_path=str(tmp_path))) is None


def test_keys_of_the_model_are_ignored_on_request(
    make_config: Callable[..., Config], windowed_model: Path, tmp_path: Path
) -> None:
    known = json.loads((windowed_model / "config.json").read_text())
    folders = [tmp_path / name for name in ("text", "audio")]
    for folder, content in zip(folders, (known, VOXTRAL), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content | {"some_new_scaling": 2.0}))
    text, audio = ({"stage": "DPO", "model_name_or_path": str(folder)} for folder in folders)
    for reads, values in ((data.pair_window, text), (data.audio_of_model, audio)):
        with pytest.raises(UserError, match="some_new_scaling"):
            reads(make_config(**values))
        assert reads(make_config(**values, ignore_config_keys=["some_new_scaling"])) is not None


def test_held_out_records_have_files_of_their_own_or_are_split_off(
    make_config: Callable[..., Config], records: Path
) -> None:
    assert not data.has_evaluation_data(make_config())
    for values in ({"eval_dataset_path": str(records)}, {"eval_split": 0.1}):
        assert data.has_evaluation_data(make_config(**values))


BY_LENGTH = {"packing": False, "batch_tokens": 256}
GROUPS = {"batch_tokens": 256, "max_batch_samples": 0, "shortest": 1, "longest": None}


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({}, {}),
        (BY_LENGTH, GROUPS),
        (BY_LENGTH | {"max_batch_samples": 3}, GROUPS | {"max_batch_samples": 3}),
        (BY_LENGTH | {"min_sample_len": 4}, GROUPS | {"shortest": 4}),
        (BY_LENGTH | {"max_sample_len": 99}, GROUPS | {"longest": 99}),
    ],
    ids=str,
)
def test_batches_by_length(values: dict[str, Any], groups: dict[str, Any], make_config: Callable[..., Config]) -> None:
    assert data._length_groups(make_config(**values)) == groups


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({"max_seq_len": 64}, "max_seq_len", 64),
        ({"packing": False}, "packing", False),
        ({"greedy_intokens": False}, "greedy", False),
        ({"buffer_size": 5}, "window", 5),
        ({"per_device_train_batch_size": 3}, "batch_size", 3),
        ({"gradient_accumulation_steps": 3}, "accumulation", 3),
        ({"seed": 7}, "seed", 7),
        ({"random_shuffle": False}, "shuffle", False),
        ({"mix_strategy": "random"}, "strategy", "random"),
        ({"num_samples_each_epoch": 20}, "num_samples_each_epoch", 20),
        ({"num_samples_each_epoch": 20}, "repeat_samples", True),
        ({}, "repeat_samples", False),
        ({"curriculum": "length"}, "sorted_first", True),
    ],
    ids=str,
)
def test_what_the_plan_of_training_is_told(
    values: dict[str, Any],
    argument: str,
    seen: Any,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "StepPlan", lambda dataset, **named: named)
    told: Any = data.training_plan(make_config(**values), SimpleNamespace(packed=None))  # type: ignore[arg-type]
    assert told[argument] == seen


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({"max_seq_len": 64}, "max_seq_len", 64),
        ({"per_device_train_batch_size": 3}, "batch_size", 3),
        ({"gradient_accumulation_steps": 3}, "accumulation", 3),
    ],
    ids=str,
)
def test_packed_data_keeps_its_rows(
    values: dict[str, Any],
    argument: str,
    seen: Any,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "StepPlan", lambda dataset, **named: named)
    packed = SimpleNamespace(packed=SimpleNamespace(packs=[[0]], batch_tokens=0))
    told: Any = data.training_plan(make_config(**values), packed)  # type: ignore[arg-type]
    assert told[argument] == seen


def test_where_packed_data_lies_and_what_it_must_hold(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data, "open_packed_dataset", lambda folder, fingerprint, **named: named | {"folder": folder})
    common = {"stage": "DPO", "train_dataset_type": "packed", "train_dataset_path": str(tmp_path)}
    told: Any = data.training_dataset(make_config(**common), *open_tokenizer(make_config()))
    assert (told["folder"], told["max_seq_len"], told["needs_scores"]) == (tmp_path, 128, False)
    told = data.training_dataset(make_config(**common, offset_alpha=0.5), *open_tokenizer(make_config()))
    assert told["needs_scores"]


@pytest.mark.parametrize(("values", "steps"), [({}, 4), ({"max_steps": None, "num_train_epochs": 3}, 30)])
def test_how_long_a_run_is(values: dict[str, Any], steps: int, make_config: Callable[..., Config]) -> None:
    plan: Any = SimpleNamespace(total_steps=lambda limit, epochs: limit if limit > 0 else 10 * epochs)
    assert data.count_steps(make_config(**values), plan, note=False) == steps


LONG = {"max_steps": None, "num_train_epochs": 3}


@pytest.mark.parametrize(
    ("values", "told", "untold"),
    [
        ({}, "limit 4, 1 epochs", "never"),
        (LONG, "limit -1, 3 epochs", "never"),
        (LONG | {"warmup_steps": 30}, "so learning_rate is never reached", "limit 4"),
        (LONG | {"warmup_steps": 30, "lr_scheduler_type": "constant"}, "limit -1", "never"),
        ({"warmup_steps": 30}, "limit 4", "never"),
    ],
    ids=str,
)
def test_what_is_told_of_the_plan(
    values: dict[str, Any],
    told: str,
    untold: str,
    make_config: Callable[..., Config],
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = SimpleNamespace(
        total_steps=lambda limit, epochs: limit if limit > 0 else 10 * epochs,
        describe=lambda limit, epochs: f"limit {limit}, {epochs} epochs",
        dp_world_size=1,
        dataset=SimpleNamespace(audio=None, varies=False),
    )
    monkeypatch.setattr(data, "training_plan", lambda *parts: plan)
    config = make_config(dataloader_num_workers=3, **values)
    local: Any = data.LocalData(SimpleNamespace(report=""), None)  # type: ignore[arg-type]
    run = data.plan_run_data(config, local, SINGLE_PROCESS_MESH)
    assert run.workers == 3
    said = "\n".join(logged)
    assert told in said and untold not in said


def test_who_reads_the_files(make_config: Callable[..., Config]) -> None:
    topology, central = Topology(tensor=2), make_config(tensor_parallel_degree=2, distributed_dataloader=True)
    assert [data.reads_data(make_config(), topology, rank) for rank in (0, 1)] == [True, True]
    assert [data.reads_data(central, topology, rank) for rank in (0, 1)] == [True, False]


def test_what_others_read_is_broadcast(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    mesh: Any = SimpleNamespace(
        topology=Topology(),
        dp_rank=0,
        group=lambda *axes: asked.append("group") or "group",
        is_first=lambda *axes: True,
    )
    monkeypatch.setattr("erniekit.distributed.broadcast.broadcast_arrays", lambda *parts: parts[:2])
    monkeypatch.setattr(data, "serialize_index", lambda dataset: ([], []))
    own: Any = SimpleNamespace()
    for central, groups in ((False, 0), (True, 2)):
        config = make_config(distributed_dataloader=central)
        rank = data.dp_rank_of(config, mesh)
        assert (rank.batch_source is data.local_batches) != central
        assert data.broadcast_dataset_index(config, mesh, own) is own
        assert len(asked) == groups


def test_features_are_computed_as_the_files_of_processors_say():
    """`model` and `data` never import each other, so each has these numbers."""
    said = (processor_files.HOP, processor_files.SAMPLING_RATE, processor_files.N_FFT)
    assert said == (AudioInputs.hop, AudioInputs.sampling_rate, log_mel.N_FFT)
