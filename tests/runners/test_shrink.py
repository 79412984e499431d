"""Runs in miniature: what stays of a configuration, and that every example's is a run of two steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.build.layout import known_model_config, partition_layers
from erniekit.cli import main
from erniekit.config import Config
from erniekit.config.parameter import GPU_ONLY
from erniekit.config.registry import PARAMETERS
from erniekit.distributed.topology import Topology, topology_from
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.runners.shrink import ShrunkRun, shrink, shrink_overrides
from tests.distributed.warm_processes import warm_starts
from tests.model.tiny import config_file

from .test_layout_examples import COMMANDS, _name

ROOT = Path(__file__).parents[2]
VOCABULARY = 512
NEEDED = {"model_name_or_path": "baidu/ERNIE-4.5-21B-A3B-PT", "from_hf_hub": True, "output_dir": "o"}
NEEDED |= {"train_dataset_path": "t"}


def _model(size: str = "21B-A3B") -> ModelConfig:
    model = published_model(f"baidu/ERNIE-4.5-{size}-PT")
    assert model is not None
    return model


def _shrunk_run(values: dict, model: ModelConfig | None = None) -> tuple[ShrunkRun, Topology]:
    """The miniature, and its layout as `train` will see it."""
    config = Config.from_mapping(NEEDED | values)
    shrunk_run = shrink(config, model or _model(), VOCABULARY)
    small = Config.from_mapping(config.resolved() | dict(shrunk_run.parameters))
    topology = topology_from(small, shrunk_run.ranks)
    partition_layers(small, shrunk_run.model, topology)  # raises where something cannot be divided
    return shrunk_run, topology


@pytest.mark.parametrize(
    ("values", "kept", "lost"),
    [
        ({}, Topology(), ()),
        ({"tensor_parallel_degree": 4}, Topology(tensor=2, sequence_parallel=True), ()),
        ({"tensor_parallel_degree": 4, "sequence_parallel": False}, Topology(tensor=2), ()),
        ({"pipeline_parallel_degree": 7, "moe_group": "mp"}, Topology(pipeline=2, expert_axis="tensor"), ()),
        ({"moe_group": "data"}, Topology(data=2, expert_axis="data"), ()),
        (
            {"pipeline_parallel_degree": 4, "sharding": "stage1", "sharding_parallel_degree": 8},
            Topology(pipeline=2, sharding=2),
            (),
        ),
        (
            {
                "tensor_parallel_degree": 4,
                "pipeline_parallel_degree": 14,
                "sharding": "stage1",
                "sharding_parallel_degree": 4,
            },
            Topology(tensor=2, pipeline=2, sequence_parallel=True),
            ("sharding parallelism is left out",),
        ),
        ({"pipeline_parallel_degree": 7, "virtual_pp_degree": 2}, Topology(pipeline=2), ("not interleaved",)),
    ],
)
def test_each_axis_keeps_two_ranks_as_far_as_four_allow(values: dict, kept: Topology, lost: Iterable[str]) -> None:
    shrunk_run, topology = _shrunk_run(values)
    assert topology == kept and shrunk_run.ranks <= 4
    notes = "\n".join(shrunk_run.notes)
    assert all(words in notes for words in lost) and bool(notes) == bool(lost)


def test_what_only_a_gpu_knows_is_left_out() -> None:
    values = {"fp16": True, "fuse_rms_norm": True}
    assert len(Config.from_mapping(NEEDED | values).ignored_on_cpu()) == 2
    parameters = _shrunk_run(values)[0].parameters
    assert Config.from_mapping(NEEDED | values | parameters).ignored_on_cpu() == []


def test_every_kind_of_layer_stays() -> None:
    small = _shrunk_run({})[0].model
    kinds = [small.is_moe_layer(layer) for layer in range(small.num_hidden_layers)]
    assert kinds == [False, True, True, True]
    assert small.moe_num_shared_experts == 1 and small.moe_num_experts > small.moe_k > 1
    assert small.num_attention_heads > small.num_key_value_heads
    assert small.tie_word_embeddings and small.parameter_count() < 1e6
    assert _shrunk_run({}, _model("300B-A47B"))[0].model.moe_num_shared_experts == 0
    assert not any(map(_shrunk_run({}, _model("0.3B"))[0].model.is_moe_layer, range(4)))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_miniature_of_any_family_is_a_model_of_it(model_type: str) -> None:
    sizes = {"vocab_size": 999, "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 9}
    own = {"gemma3_text": {"layer_types": ["full_attention"] * 9}, "smollm3": {"no_rope_layers": [1] * 9}}
    values = {
        "model_type": model_type,
        **sizes,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        **own.get(model_type, {}),
    }
    model = ModelConfig.from_json(config_file(values))
    small = shrink(Config.from_mapping(NEEDED | {"tensor_parallel_degree": 2}), model, VOCABULARY).model
    assert ModelConfig.from_json(small.to_json()) == small
    assert small.parameter_count() < 2e6


def test_the_ways_of_cutting_a_pipeline_stay() -> None:
    degree = {"pipeline_parallel_degree": 2}
    segments = _shrunk_run(degree | {"pp_seg_method": [0, 20]})[0].parameters["pp_seg_method"]
    assert segments == [0, 3]  # the embedding and two layers
    assert _shrunk_run(degree | {"pp_seg_method": "uniform"})[0].parameters["pp_seg_method"] == "uniform"
    shrunk_run, _ = _shrunk_run({"pipeline_parallel_degree": 10, "add_tail_layers": 2})
    assert (shrunk_run.model.num_hidden_layers, shrunk_run.parameters["add_tail_layers"]) == (3, 1)


def test_what_the_run_needs_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config = Config.from_mapping(NEEDED | {"output_dir": str(tmp_path / "out"), "lora": True, "learning_rate": 0.5})
    words, ranks, lines = shrink_overrides(config)
    small = Config.from_mapping(config.resolved(), overrides=words)
    folder = Path(small.basic.model_name_or_path)
    assert folder == tmp_path / "out-shrunken" / "model" and ranks == 1 and str(folder.parent) in lines[0]
    assert ModelConfig.from_folder(folder).parameter_count() < 1e6 and (folder / "model.safetensors").is_file()
    assert small.training.max_steps == 2 and small.training.learning_rate == 0.5
    assert all(Path(path).is_file() for path in small.training.train_dataset_path)


def test_evaluation_stays_on_shipped_data() -> None:
    values = {"do_eval": True, "eval_dataset_path": "e", "eval_steps": 50, "save_steps": 50}
    best = {"load_best_model_at_end": True, "early_stopping_patience": 2, "save_strategy": "steps"}
    parameters = _shrunk_run(values | best)[0].parameters
    assert Path(parameters["eval_dataset_path"][0]).is_file() and parameters["eval_steps"] == 1
    assert "eval_dataset_path" not in _shrunk_run({})[0].parameters


def test_a_model_of_unknown_shape_cannot_be_shrunk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(NEEDED | {"model_name_or_path": "nobody/unknown"}), encoding="utf-8")
    assert main(["train", str(file), "--shrink"]) == 2
    assert "--shrink needs the shape of the model: nobody/unknown is not here yet" in capsys.readouterr().err


def _distinct() -> list[Path]:
    """The examples without those whose miniature differs from one before in paths only, or in what only GPUs do."""
    left_out = {"output_dir", "logging_dir", "model_name_or_path"}
    left_out |= {name for name, parameter in PARAMETERS.items() if parameter.devices == GPU_ONLY}
    seen, chosen = set(), []
    for path in COMMANDS:
        config = Config.load(path)
        model = known_model_config(config)
        assert not isinstance(model, str), model
        shrunk_run = shrink(config, model, VOCABULARY)
        values = config.resolved() | dict(shrunk_run.parameters)
        key = repr((shrunk_run.model, sorted(item for item in values.items() if item[0] not in left_out)))
        if key not in seen:
            seen.add(key)
            chosen.append(path)
    return chosen


def _longest_first() -> list[Any]:
    """The distinct examples; of the lengths of one model, stage and method all but the longest run with test-all."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in _distinct():
        length = re.search(r"-(\d+)k$", path.stem)
        name = _name(path).removesuffix(length[0]) if length else _name(path)
        found.setdefault(name, []).append((int(length[1]) if length else 0, path))
    return [
        pytest.param(path, id=_name(path), marks=[pytest.mark.exhaustive] * ((length, path) != max(lengths)))
        for lengths in found.values()
        for length, path in lengths
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("path", _longest_first())
def test_an_example_runs_two_steps_in_miniature(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    verb = "dpo" if "dpo" in path.stem else "train"
    words = [verb, str(path), "--shrink", f"output_dir={tmp_path / 'out'}", f"data_cache_dir={tmp_path}"]
    with warm_starts():
        code = main(words)
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert "step 2/2" in shown.out
    run = tmp_path / "out-shrunken" / "run"
    weights = "adapter_model.safetensors" if "lora" in path.stem else "model.safetensors"
    assert (run / weights).is_file()


@pytest.mark.proves("eval_split")
def test_shipped_data_is_not_divided() -> None:
    parameters = _shrunk_run({"do_eval": True, "eval_split": 0.001})[0].parameters
    assert parameters["eval_split"] == 0 and Path(parameters["eval_dataset_path"][0]).is_file()
    assert "eval_split" not in _shrunk_run({})[0].parameters


EVALUATED = {"do_eval": True, "eval_dataset_path": "e"}
GROUPS = {"stage": "GRPO", "rewards": ["exact_match"], "overlong_handling": "soft"}


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size", 1),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size", 2),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps", 3),
        ({"gradient_accumulation_steps": 64}, "gradient_accumulation_steps", 4),
        ({"lora": True, "lora_rank": 2}, "lora_rank", 2),
        ({"lora": True}, "lora_rank", 4),
        ({}, "lora_rank", None),
        ({"stage": "DPO", "max_prompt_len": 30}, "max_prompt_len", 30),
        ({"packing": False, "batch_tokens": 9000}, "batch_tokens", 256),
        ({}, "batch_tokens", None),
        (EVALUATED, "max_evaluate_steps", 1),
        ({}, "max_evaluate_steps", None),
        (EVALUATED | {"evaluation_strategy": "steps"}, "eval_steps", 1),
        (EVALUATED | {"evaluation_strategy": "epoch"}, "eval_steps", None),
        (GROUPS | {"overlong_buffer": 9}, "overlong_buffer", 9),
        (GROUPS | {"overlong_buffer": 90, "max_completion_len": 100}, "overlong_buffer", 16),
        ({"save_strategy": "steps"}, "save_steps", 1),
        ({"save_strategy": "epoch"}, "save_steps", None),
        ({"hadamard_block_size": 16}, "hadamard_block_size", 16),
        ({"hadamard_block_size": 128}, "hadamard_block_size", 32),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers", 1),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers", None),
        ({"sharding": "stage2", "sharding_parallel_degree": 2}, "sharding", "stage2"),
        ({"pipeline_parallel_degree": 2, "pp_seg_method": "uniform"}, "pp_seg_method", "uniform"),
    ],
    ids=str,
)
def test_values_that_are_small_enough_stay(values: dict, name: str, expected: object) -> None:
    model = replace(_model(), num_nextn_predict_layers=2)
    config = Config.from_mapping(NEEDED | values)
    assert shrink(config, model, VOCABULARY).parameters.get(name) == expected


def test_its_weights_follow_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("erniekit.runners.shrink._write_model", lambda model, seed, folder: seeds.append(seed))
    shrink_overrides(Config.from_mapping(NEEDED | {"output_dir": str(tmp_path / "out"), "seed": 7}))
    assert seeds == [7]
    monkeypatch.setattr("erniekit.runners.shrink.write_codes", lambda model, folder, seed: seeds.append(seed))
    spoken = {
        "stage": "TTS",
        "train_dataset_type": "codes",
        "codec": "some/codec",
        "codec_levels": 2,
        "codebook_size": 8,
    }
    spoken |= {"model_name_or_path": "baidu/ERNIE-4.5-0.3B-PT"}
    shrink_overrides(Config.from_mapping(NEEDED | spoken | {"output_dir": str(tmp_path / "spoken"), "seed": 9}))
    assert seeds == [7, 9, 9]


def test_only_a_pipeline_has_empty_layers() -> None:
    model = _shrunk_run({"pipeline_parallel_degree": 10, "add_tail_layers": 2})[0].model
    assert model.num_hidden_layers == 3
    alone = shrink(Config.from_mapping(NEEDED | {"add_tail_layers": 2}), _model(), VOCABULARY)
    assert alone.model.num_hidden_layers == 4
