"""A run in miniature, `--shrink`: the layout logic of a configuration on a tiny model, at most four CPU ranks, 2 steps.

Every axis of the layout that has several ranks keeps two as far as four ranks allow, and every kind of layer the model
has stays: dense ones, experts, shared experts, empty ones of a pipeline. Weights are random; tokenizer and data are the
shipped ones. Needs no Paddle, and `shrink` alone no NumPy.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import erniekit
from erniekit.build.layout import known_model_config
from erniekit.config.values import format_value
from erniekit.distributed.topology import Topology, topology_from
from erniekit.environment import import_paddle
from erniekit.errors import ConfigurationError
from erniekit.runners.shrink_codes import RECORDS, codes_parameters, write_codes

if TYPE_CHECKING:
    from erniekit.config import Config
    from erniekit.model.architectures.model_config import ModelConfig

MAX_RANKS, MAX_DEGREE = 4, 2
STEPS = 2
LAYERS = 4
DATA = {  # of each kind of records: files to train and to evaluate on, and their type
    "text": ("text-train", "text-train", "text"),
    "dialogues": ("sft-train", "sft-eval", "erniekit"),
    "prompts": ("sft-train", "sft-eval", "erniekit"),
    "pairs": ("preference-train", "preference-eval", "erniekit"),
    "verdicts": ("verdict-train", "verdict-eval", "erniekit"),
}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
CODES = "codes"  # the folder of codes that are written
EXAMPLES = Path(erniekit.__file__).parents[1] / "examples"


@dataclass(frozen=True)
class ShrunkRun:
    """A run in miniature.

    Attributes:
        model: the tiny model.
        parameters: what its configuration has instead.
        ranks: how many ranks it needs.
        notes: what four ranks could not keep.
    """

    model: ModelConfig
    parameters: dict[str, Any]
    ranks: int
    notes: tuple[str, ...]


def shrink(config: Config, model: ModelConfig, vocabulary: int) -> ShrunkRun:
    """The run of `config` in miniature.

    Args:
        model: of `model_name_or_path`.
        vocabulary: the size of the shipped tokenizer's.
    """
    asked = topology_from(config)
    topology = _shrunk_topology(asked, data=config.distributed.moe_group == "data")
    small = _tiny_model(config, model, vocabulary)
    parameters = (
        _shipped_inputs(config, small) | _short_run(config) | _degrees(config, topology, small.num_hidden_layers)
    )
    # The miniature runs on a CPU; that these have no effect there is no news.
    parameters |= {item.name: item.default for item in config.gpu_only_parameters()}
    parameters["hadamard_block_size"] = min(config.fp8.hadamard_block_size, 32)
    if small.num_nextn_predict_layers != config.basic.num_nextn_predict_layers:
        parameters["num_nextn_predict_layers"] = small.num_nextn_predict_layers
    return ShrunkRun(small, parameters, topology.world_size, tuple(_dropped_axes(asked, topology)))


def shrink_overrides(config: Config) -> tuple[list[str], int, list[str]]:
    """Write the tiny model beside `output_dir`, and say how to run it.

    Returns:
        Words for the command line, the number of ranks, and lines to print.

    Raises:
        ConfigurationError: the model's shape is not known here, or the shipped examples are not.
    """
    model = known_model_config(config)
    if isinstance(model, str):
        raise ConfigurationError(f"--shrink needs the shape of the model: {model}")
    source = EXAMPLES / "models" / "tiny-ernie"
    if not source.is_dir():
        raise ConfigurationError(f"--shrink needs the project's examples, and {EXAMPLES} does not exist")
    vocabulary = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shrunk_run = shrink(config, model, vocabulary)
    folder = _home(config) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)
    _write_model(shrunk_run.model, config.training.seed, folder)
    if config.stage.reads_codes:
        write_codes(shrunk_run.model, _home(config) / CODES, config.training.seed)
    own = shrunk_run.parameters | {"model_name_or_path": str(folder), "output_dir": str(folder.parent / "run")}
    if config.applies("teacher_model_name_or_path"):  # a teacher of its size and tokens: itself
        own["teacher_model_name_or_path"] = str(folder)
    present = config.resolved()
    words = [f"{name}={_override_text(value)}" for name, value in own.items() if value != present[name]]
    lines = [
        f"shrunken to {shrunk_run.model.parameter_count():,} random weights, {shrunk_run.ranks} "
        f"rank{'s' if shrunk_run.ranks > 1 else ''} and {STEPS} steps; written to {folder.parent}",
        *shrunk_run.notes,
    ]
    return words, shrunk_run.ranks, lines


def _write_model(model: ModelConfig, seed: int, folder: Path) -> None:
    """`config.json` and random weights, which ranks then read as they read any model's."""
    import_paddle()
    from erniekit.model.initial_weights import initial_weight
    from erniekit.model.storage.safetensors import write_safetensors

    text = json.dumps(model.to_json(), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    shapes = model.weight_shapes()
    weights = ((name, initial_weight(name, shape, model, seed)) for name, shape in shapes.items())
    write_safetensors(folder / "model.safetensors", shapes, weights)


def _shrunk_topology(asked: Topology, *, data: bool) -> Topology:
    """Two ranks for every axis that has several, in the order of what differs most between ranks, up to four."""
    ranks, degrees = 1, {}
    wanted = {"tensor": asked.tensor, "pipeline": asked.pipeline, "sharding": asked.sharding, "data": 1 + data}
    for axis, degree in wanted.items():
        degrees[axis] = MAX_DEGREE if degree > 1 and ranks * MAX_DEGREE <= MAX_RANKS else 1
        ranks *= degrees[axis]
    return Topology(
        tensor=degrees["tensor"],
        pipeline=degrees["pipeline"],
        sharding=degrees["sharding"],
        data=degrees["data"],
        expert_axis=asked.expert_axis,
        sequence_parallel=asked.sequence_parallel and degrees["tensor"] > 1,
    )


def _tiny_model(config: Config, model: ModelConfig, vocabulary: int) -> ModelConfig:
    """The same kinds of layers with tiny widths, which two ranks can divide."""
    tail = min(config.distributed.add_tail_layers, 1) if config.distributed.pipeline_parallel_degree > 1 else 0
    key_heads = min(model.num_key_value_heads, 2)
    heads = min(model.num_attention_heads, 4) if model.num_attention_heads > model.num_key_value_heads else key_heads
    small = replace(
        model,
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS - tail,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=32,  # so that half of the inputs of any linear layer are whole groups and blocks of quantisation
        own={**_shortened_lists(model), **model.architecture.small_values},
        other_keys={},
        wrapped=None,
    )
    if not model.moe_num_experts:
        return small
    return replace(
        small,
        moe_num_experts=min(model.moe_num_experts, 4),
        moe_k=min(model.moe_k, 2),
        moe_intermediate_size=128,
        moe_num_shared_experts=min(model.moe_num_shared_experts, 1),
        moe_layer_start_index=min(model.moe_layer_start_index, 1),
        moe_layer_end_index=-1,
        moe_layer_interval=min(model.moe_layer_interval, 2),
        num_nextn_predict_layers=min(config.basic.num_nextn_predict_layers, 1),
    )


def _shortened_lists(model: ModelConfig) -> dict[str, Any]:
    """The family's own keys, with as many entries in lists with one for each layer as the small model has layers."""
    return {
        key: value[:LAYERS] if isinstance(value, list) and len(value) == model.num_hidden_layers else value
        for key, value in model.own.items()
    }


def _shipped_inputs(config: Config, model: ModelConfig) -> dict[str, Any]:
    """The written model and shipped data in place of the user's; codes are written, too."""
    codes = _home(config) / CODES
    if config.stage.reads_codes:
        train, held_out, kind = (str(codes / RECORDS),) * 2 + ("codes",)
    else:
        train, held_out, kind = DATA[config.stage.records]
        train, held_out = _data_file(train), _data_file(held_out)
    evaluated = {
        "eval_dataset_path": [held_out],
        "eval_dataset_type": [kind],
        "eval_dataset_prob": [1.0],
    }
    whole = {"eval_split": 0.0} if config.evaluation.eval_split else {}
    own = evaluated if config.basic.do_eval else {}
    own |= codes_parameters(config, model, codes) if config.stage.reads_codes else {}
    return own | {
        **whole,
        "continue_training": True,
        "from_hf_hub": False,
        "from_aistudio": False,
        "from_modelscope": False,
        "train_dataset_path": [train],
        "train_dataset_type": [kind],
        "train_dataset_prob": [1.0],
        "ref_model_name_or_path": "",
        "lora_path": "",
        "init_from_checkpoint": "",
        "resume_from_checkpoint": False,
        "overwrite_output_dir": True,
        "hf_hub_id": "",
        "report_to": [],
        "logging_dir": str(_home(config) / "run" / "logs"),
        "device": "cpu",
    }


def _home(config: Config) -> Path:
    return Path(f"{config.basic.output_dir}-shrunken").expanduser()


def _data_file(name: str) -> str:
    return str(EXAMPLES / "data" / f"{name}.jsonl")


def _short_run(config: Config) -> dict[str, Any]:
    """Two steps of short rows; what is due every so many steps is due after each. What has no effect stays."""
    training = config.training
    length = 256 if config.stage.reads_pairs or config.stage.reads_verdicts else 128
    rows = 2 if config.stage.reads_prompts else min(training.per_device_train_batch_size, 2)  # a group at least
    further: dict[str, Any] = {}
    if config.applies("max_prompt_len"):
        further["max_prompt_len"] = min(config.dpo.max_prompt_len, length // 2)
    if config.stage.reads_prompts:
        further |= {"num_generations": 2, "max_completion_len": 16, "steps_per_generation": 1}
        further["overlong_buffer"] = min(config.grpo.overlong_buffer, 16)
    if config.lora.lora:
        further["lora_rank"] = min(config.lora.lora_rank, 4)
    if config.acceleration.batch_tokens:
        further |= {"batch_tokens": 2 * length, "min_sample_len": 1, "max_sample_len": None}
    if config.basic.do_eval:
        further |= {"max_evaluate_steps": 1, "eval_answers": 0}
        further |= {"eval_steps": 1} if config.evaluation.evaluation_strategy == "steps" else {}
    if config.checkpoint.save_strategy == "steps":
        further["save_steps"] = 1
    return further | {
        "max_steps": STEPS,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 1,
        "max_seq_len": length,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": min(training.gradient_accumulation_steps, 4),
    }


def _degrees(config: Config, topology: Topology, layers: int) -> dict[str, Any]:
    """The parameters of a layout; the order of `pp_seg_method` is kept where it names no items."""
    section = config.distributed
    named = isinstance(section.pp_seg_method, str)
    return {
        "tensor_parallel_degree": topology.tensor,
        "sequence_parallel": topology.sequence_parallel,
        "pipeline_parallel_degree": topology.pipeline,
        "virtual_pp_degree": 1,
        "pp_seg_method": section.pp_seg_method if named else [0, 1 + layers // 2],
        "add_tail_layers": LAYERS - layers,
        "sharding_parallel_degree": topology.sharding,
        "sharding": section.sharding if topology.sharding > 1 else "none",
    }


def _dropped_axes(asked: Topology, topology: Topology) -> list[str]:
    axes = [axis for axis in ("tensor", "pipeline", "sharding") if asked.degree(axis) > topology.degree(axis) == 1]
    lines = [f"{axis} parallelism is left out: {MAX_RANKS} ranks hold two axes" for axis in axes]
    if asked.virtual_pipeline > 1:
        lines.append("the pipeline is not interleaved: that needs three stages")
    return lines


def _override_text(value: Any) -> str:
    """As the command line reads it."""
    if isinstance(value, str):
        return value
    return format_value(value) if value != [] else "none"
