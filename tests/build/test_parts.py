"""Which parts of a model with an audio encoder a run trains: `freeze_config`, `audio_lr_ratio`, and what is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from erniekit.build.adapters import adapter_plan, lora_settings
from erniekit.build.layout import plan_layout, workload
from erniekit.build.parts import frozen_parts, part_notes, relative_learning_rates
from erniekit.cli.layout_report import memory_table
from erniekit.config.sections.training import TrainingParameters
from erniekit.distributed.planning.communication import step_bytes
from erniekit.distributed.planning.encoder_memory import encoder_cost
from erniekit.distributed.planning.memory import Workload, training_memory
from erniekit.distributed.planning.pipeline_bubble import chunk_costs
from erniekit.distributed.stages import layer_chunks
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.architecture import Tower
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.parts import (
    ALIGNER,
    decoder_linears,
    named_parts,
    part_of,
    part_sizes,
    parts_of,
    trainable_shapes,
)
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.sharding import REPLICATED_LINEAR
from erniekit.model.builder import build_model
from erniekit.model.linear import Linear
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import named_adapters, named_trainable_parameters
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.weights import named_weights, packed_weights
from erniekit.training.objectives.forward import embedding_inputs
from erniekit.training.optim.adamw import build_optimizer, optimizer_state, trainable_parameters
from tests.config.samples import load
from tests.model.test_architectures import AUDIO
from tests.model.tiny import tiny_config
from tests.model.tiny_audio import FAMILIES, audio_batch, audio_config

ENCODER, PROJECTOR = "audio_tower.conv1.weight", "multi_modal_projector.linear_1.weight"
DECODER = "model.layers.0.self_attn.q_proj.weight"


class _Projector(nn.Layer):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear_1 = Linear(size, size)


LISTENER = replace(
    AUDIO,
    model_type="tiny_listener",
    towers=(
        *AUDIO.towers,
        Tower(
            "multi_modal_projector.",
            lambda config: {"linear_1.weight": (config.own["audio_size"],) * 2},
            {"linear_1": REPLICATED_LINEAR},
            lambda config, tp: _Projector(config.own["audio_size"]),
            ALIGNER,
        ),
    ),
)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelConfig]:
    monkeypatch.setitem(ARCHITECTURES, "tiny_listener", LISTENER)
    yield tiny_config(model_type="tiny_listener", vocab_size=56, audio_size=8)


def frozen(model: ModelConfig, words: Any, **values: Any) -> frozenset[str]:
    return frozen_parts(load(freeze_config=words, **values), model)


@pytest.mark.proves("freeze_config")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("", ""),
        ("freeze_audio", "audio"),
        ("freeze_audio freeze_aligner", "aligner audio"),
        ("freeze_lm, freeze_audio", "audio llm"),
        (["freeze_llm", "freeze_aligner"], "aligner llm"),
    ],
    ids=str,
)
def test_words_name_parts(words: Any, parts: str, listener: ModelConfig) -> None:
    assert frozen(listener, words) == set(parts.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "freeze_vision",
            "freeze_vision: tiny_listener has no vision encoder.\n  Remove the word; of this model freeze_audio, fr",
        ),
        ("freeze_audio freeze_aligner freeze_llm", "freeze_audio freeze_aligner freeze_llm leaves nothing to train"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words: str, told: str, listener: ModelConfig) -> None:
    with pytest.raises(ConfigurationError, match="`freeze_config`: ") as refused:
        frozen(listener, words)
    assert told in str(refused.value)
    assert frozen(listener, words, do_train=False, do_eval=True, eval_dataset_path="e") == set()


def test_a_text_model_has_a_decoder_alone() -> None:
    model = tiny_config()
    for words, told in (("freeze_audio", "has no audio encoder"), ("freeze_llm", "leaves nothing to train")):
        with pytest.raises(ConfigurationError, match=told):
            frozen(model, words)
    assert parts_of(model.architecture) == ("llm",)
    assert part_notes(load(), model, None) == []


def test_nothing_is_told_of_parts_where_nothing_is_trained(listener: ModelConfig) -> None:
    assert part_notes(load(do_train=True), listener, None)
    assert part_notes(load(do_train=False, do_eval=True, eval_dataset_path="e.jsonl"), listener, None) == []


def test_each_weight_belongs_to_one_part(listener: ModelConfig) -> None:
    names = (ENCODER, PROJECTOR, DECODER, "model.embed_tokens.weight", PROJECTOR.replace("weight", "lora_A"))
    parts = [part_of(listener.architecture, name) for name in names]
    assert parts == ["audio", "aligner", "llm", "llm", "aligner"]
    assert named_parts(parts) == "the audio encoder, the projector and the decoder" and named_parts(["llm"]) == (
        "the decoder"
    )
    assert all(path.startswith("model.layers.") for path in decoder_linears(listener))


def test_a_frozen_part_has_neither_gradient_nor_state_and_does_not_change(listener: ModelConfig) -> None:
    """Weight decay is strong enough to be seen where nothing else moves a weight."""
    model = build_model(listener, None, seed=3, frozen={"audio", "llm"})
    parameters = named_trainable_parameters(model)
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.5))
    before = {name: weight.numpy().copy() for name, weight in named_weights(model).items()}
    for weight in trainable_parameters(parameters).values():
        weight.grad = paddle.zeros_like(weight)
    optimizer.set_lr(0.1)
    optimizer.step()
    changed = {name for name, weight in named_weights(model).items() if (weight.numpy() != before[name]).any()}
    assert changed == {PROJECTOR}
    assert {name.partition("/")[0] for name in optimizer_state(optimizer, parameters)} == {PROJECTOR}
    clip = paddle.ones([1, 6, 7])
    hidden = model.embed({"input_ids": paddle.zeros([1, 9], "int64"), "audio": clip})
    assert hidden.stop_gradient  # no graph of the frozen encoder


@pytest.mark.proves("audio_lr_ratio")
def test_the_encoder_learns_at_its_own_rate(listener: ModelConfig) -> None:
    """The first step of AdamW moves a weight by its learning rate; the projector has that of the decoder."""
    moved: dict[float, dict[str, float]] = {}
    for ratio in (1.0, 0.25):
        model = build_model(listener, None, seed=3)
        parameters = named_trainable_parameters(model)
        architecture = listener.architecture
        optimizer = build_optimizer(
            parameters,
            TrainingParameters(audio_lr_ratio=ratio, layerwise_lr_decay_bound=0.5),
            num_layers=2,
            part_of=lambda name, architecture=architecture: part_of(architecture, name),
        )
        before = {name: parameters[name].numpy().copy() for name in (ENCODER, PROJECTOR, DECODER)}
        for weight in parameters.values():
            weight.grad = paddle.ones_like(weight)
        optimizer.set_lr(0.01)
        optimizer.step()
        moved[ratio] = {name: float(np.abs(parameters[name].numpy() - was).max()) for name, was in before.items()}
    assert moved[1.0] == pytest.approx({ENCODER: 0.005, PROJECTOR: 0.005, DECODER: 0.00625}, rel=1e-3)
    assert moved[0.25] == pytest.approx({**moved[1.0], ENCODER: 0.00125}, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "rates", "told"),
    [
        ({}, {}, ""),
        ({"audio_lr_ratio": 0.1}, {"audio_learning_rate": 0.1}, ""),
        (
            {"audio_lr_ratio": 0.1, "freeze_config": "freeze_audio"},
            {},
            "`audio_lr_ratio: 0.1` has no effect: nothing of the audio encoder",
        ),
        (
            {"audio_lr_ratio": 0.1, "lora": True},
            {},
            "`audio_lr_ratio: 0.1` has no effect: nothing of the audio encoder",
        ),
        (
            {"audio_lr_ratio": 0.1, "lora": True, "lora_target_modules": "audio_tower"},
            {"audio_learning_rate": 0.1},
            "",
        ),
        (
            {"lora": True, "freeze_config": "freeze_audio"},
            {},
            "`freeze_config: freeze_audio` changes nothing: `lora: true` freezes all weights",
        ),
    ],
    ids=str,
)
def test_what_is_told_of_rates_and_adapters(
    values: dict[str, Any], rates: dict[str, float], told: str, listener: ModelConfig
) -> None:
    config = load(**values)
    adapters = lora_settings(config) if config.lora.lora else None
    assert relative_learning_rates(config, listener, adapters) == rates
    first, *lines = part_notes(config, listener, adapters)
    assert first.startswith("trained: ") and told in "".join(lines) and len(lines) == bool(told)


def test_no_rate_of_an_encoder_on_a_text_model() -> None:
    config = load(audio_lr_ratio=0.5)
    assert part_notes(config, tiny_config(), None) == [
        "`audio_lr_ratio: 0.5` has no effect: ernie4_5 has no audio encoder"
    ]
    assert relative_learning_rates(config, tiny_config(), None) == {}


def test_what_is_trained_and_frozen_is_counted(listener: ModelConfig) -> None:
    sizes = {"audio": 0, "aligner": 0, "llm": 0}
    for name, weight in named_weights(build_model(listener, None)).items():
        sizes[part_of(listener.architecture, name)] += weight.size
    assert part_notes(load(freeze_config="freeze_llm"), listener, None) == [
        f"trained: audio encoder ({sizes['audio']:,} parameters), projector ({sizes['aligner']} parameters); "
        f"frozen: decoder ({sizes['llm']:,} parameters)"
    ]
    adapters = LoraSettings(2, 4.0, target_modules=("multi_modal_projector",))
    (line,) = part_notes(load(lora=True), listener, adapters)
    assert line.startswith("trained: adapters of projector (32 parameters); frozen: audio encoder (")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"freeze_config": "freeze_llm"}, "leaves no adapter: without lora_target_modules they stand in the decoder"),
        ({"freeze_config": "freeze_llm"}, "lora_target_modules: audio_tower multi_modal_projector"),
        (
            {"freeze_config": "freeze_audio", "lora_target_modules": "q_proj audio_tower.*.q_proj"},
            "contradicts lora_target_modules, which puts adapters into the audio encoder",
        ),
        ({"freeze_config": "freeze_audio"}, ""),
        ({"freeze_config": "freeze_llm", "lora_target_modules": "audio_tower multi_modal_projector"}, ""),
    ],
    ids=str,
)
def test_adapters_of_frozen_parts_are_refused(values: dict[str, Any], told: str, listener: ModelConfig) -> None:
    config = load(lora=True, **values)
    if told:
        with pytest.raises(ConfigurationError, match="`freeze_config`: ") as refused:
            adapter_plan(config, listener)
        assert told in str(refused.value)
    else:
        assert adapter_plan(config, listener) is not None


def test_the_name_of_a_tower_stands_for_its_linear_layers(listener: ModelConfig) -> None:
    model = build_model(listener, None, lora=LoraSettings(2, 4.0, target_modules=("audio_tower", "model.layers.1")))
    paths = list(named_adapters(model))
    assert sum(path.startswith("audio_tower.layers.0.") for path in paths) == 6
    assert sum(path.startswith("model.layers.1.") for path in paths) == 7 and len(paths) == 13


def test_an_encoder_is_not_quantized(listener: ModelConfig) -> None:
    settings = WeightOnly("weight_only_int8")
    model = build_model(listener, None, seed=3, quantization=settings, lora=LoraSettings(2, 4.0))
    packed = {name.removesuffix(".weight") for name in packed_weights(model)}
    assert packed == set(decoder_linears(listener))
    whole = named_weights(build_model(listener, None, seed=3))
    for name in (ENCODER, PROJECTOR):
        np.testing.assert_array_equal(named_weights(model)[name].numpy(), whole[name].numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fixed_positions_of_an_encoder_are_not_trained(family: str) -> None:
    model = audio_config(family)
    built = named_weights(build_model(model, None, frozen={"llm"}))
    assert set(trainable_shapes(model, {"llm"})) == {name for name, w in built.items() if not w.stop_gradient}
    assert trainable_shapes(model).keys() == model.weight_shapes().keys() - {"audio_tower.embed_positions.weight"}


def test_the_first_stage_of_a_pipeline_has_the_encoder() -> None:
    """In the layout, in its memory and in the time that others wait for it."""
    model, topology = audio_config("voxtral"), Topology(pipeline=2)
    chunks = layer_chunks(2, topology)
    first, last = chunk_costs(model, chunks)
    plain = first - encoder_cost(model)
    assert last == plain + model.vocab_size * model.hidden_size
    encoder = sum(np.prod(shape) for name, shape in trainable_shapes(model, {"llm", "aligner"}).items())
    assert encoder_cost(model) == 2 * encoder + 32 * 16 // 2 + 16 * 16  # two states a token, two linears
    work = Workload(batch_size=1, max_seq_len=32)
    memory = [training_memory(model, work, topology, chunks, stage)["activations"] for stage in (0, 1)]
    assert memory[0] > memory[1]
    plan = plan_layout(load(pipeline_parallel_degree=2), model)
    report = memory_table(load(pipeline_parallel_degree=2), plan).splitlines()
    assert report[2].split()[:4] == ["0", "0", "encoder,", "0"] and report[3].split()[:3] == ["1", "1", "1"]


def test_estimates_count_what_is_trained(listener: ModelConfig) -> None:
    """Frozen parts have weights, but neither gradients nor moments, and nothing of them is sent."""
    work = Workload(batch_size=1, max_seq_len=16)
    whole, part = (training_memory(listener, replace(work, frozen=frozenset(parts))) for parts in ((), ("llm",)))
    sizes = part_sizes(listener.architecture, listener.weight_shapes())
    assert part["parameters"] == whole["parameters"] and part["gradients"] == 4 * (sizes["audio"] + sizes["aligner"])
    assert part["optimizer"] == 2 * part["gradients"] and part["workspace"] <= whole["workspace"]
    sent = [step_bytes(listener, replace(work, frozen=frozenset(parts)), Topology(data=2)) for parts in ((), ("llm",))]
    assert sent[1]["data"] == part["gradients"] < sent[0]["data"] == whole["gradients"]
    assert workload(load(freeze_config="freeze_llm"), listener).frozen == {"llm"}


@pytest.mark.parametrize(
    ("targets", "frozen", "graph"),
    [
        ((), (), False),
        (("multi_modal_projector",), (), True),
        (("audio_tower",), (), True),
        (None, ("audio", "aligner", "llm"), False),
        (None, ("audio", "llm"), True),
    ],
    ids=str,
)
def test_what_is_heard_has_a_graph_only_where_something_learns_to_hear(
    targets: tuple[str, ...] | None, frozen: tuple[str, ...], graph: bool
) -> None:
    """Beside adapters of the decoder, or frozen, an encoder keeps nothing for backward."""
    lora = None if targets is None else LoraSettings(2, 4.0, target_modules=targets)
    model = build_model(audio_config("voxtral"), None, lora=lora, frozen=frozen)
    hidden = model.embed(embedding_inputs(model, audio_batch(model.config, 2, 1)))
    assert hidden.stop_gradient == (not graph)
