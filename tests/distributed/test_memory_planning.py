from __future__ import annotations

from dataclasses import replace

import pytest

from erniekit.build.layout import workload
from erniekit.config import Config
from erniekit.distributed.planning import head_memory, memory
from erniekit.distributed.planning.memory import (
    BFLOAT16_O2,
    Formats,
    Workload,
    process_bytes,
    tensor_bytes,
    training_memory,
)
from erniekit.distributed.stages import layer_chunks
from erniekit.distributed.topology import Topology
from erniekit.model import attention, attention_plan, block_attention, head
from erniekit.model.architectures.published import published_model
from erniekit.model.lora.config import LoraSettings
from erniekit.native import library
from tests.distributed.cases.memory import peak_of_training
from tests.distributed.ranks import run_ranks
from tests.model.tiny import tiny_config

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 384,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 0,
}
ADAPTERS = LoraSettings(rank=8, alpha=16.0)
WORK = Workload(batch_size=2, max_seq_len=1024)


def test_the_constants_are_those_of_the_model():
    assert head_memory.CHUNK_LOGITS == head.CHUNK_LOGITS
    assert memory.KEPT_SCORES == block_attention.MAX_SAVED_SCORES
    assert memory.TILE == attention_plan.TILE


def test_parts_add_up_and_follow_what_they_should():
    config = tiny_config(**SHAPE)

    def memory(**how):
        return training_memory(config, replace(WORK, **how))

    base = memory()
    assert base["total"] == sum(size for name, size in base.items() if name != "total")
    assert base["parameters"] == base["gradients"] == base["optimizer"] // 2 == 4 * config.parameter_count()
    assert memory(adapters=ADAPTERS)["gradients"] < 0.1 * base["gradients"]
    assert memory(adapters=ADAPTERS)["parameters"] == base["parameters"] + memory(adapters=ADAPTERS)["gradients"]
    assert memory(batch_size=4)["activations"] > 1.5 * base["activations"]
    assert memory(recompute=True)["activations"] < 0.3 * base["activations"]
    assert memory(recompute=True)["activations"] < memory(recompute=True, no_recompute_layers=2)["activations"]
    full, attention_again, product_again = (
        memory(recompute=True, recompute_granularity=part)["activations"] for part in ("full", "full_attn", "core_attn")
    )
    assert full < attention_again < product_again <= base["activations"]
    assert memory(fused_head=True)["logits"] < base["logits"]
    assert memory(dense_mask=True)["attention_mask"] == attention.dense_mask_bytes(2, 1024)
    assert memory(dense_mask=True)["activations"] > base["activations"]
    assert memory(reference_copy=True)["reference"] == base["parameters"]


def test_models_beside_the_trained_one_count_as_far_as_a_rank_has_them():
    config, other = tiny_config(**SHAPE), tiny_config(**{**SHAPE, "hidden_size": 640, "num_hidden_layers": 6})
    base, count = training_memory(config, WORK), other.parameter_count()
    compared = training_memory(config, replace(WORK, reference=other))
    assert compared["reference"] == 4 * count and compared["total"] == base["total"] + 4 * count
    taught = training_memory(config, replace(WORK, teacher=other))
    assert taught["teacher"] == 4 * (count + 2 * 1024 * 640)  # the weights, and the last states of every token
    scored = training_memory(config, replace(WORK, reward_models=(other, config)))
    assert scored["reward_models"] == 4 * (count + config.parameter_count())
    both = replace(WORK, teacher=other, reward_models=(other,), sharding=3)
    cut, sharded = (training_memory(config, both, layout) for layout in (Topology(tensor=2), Topology(sharding=2)))
    assert 0.5 * taught["teacher"] < cut["teacher"] < 0.6 * taught["teacher"] and cut["reward_models"] == 4 * count
    assert sharded["teacher"] == taught["teacher"] and sharded["parameters"] == base["parameters"] // 2


def test_a_wide_teacher_s_layer_takes_more_than_a_small_student():
    small, wide = tiny_config(vocab_size=64), tiny_config(**{**SHAPE, "vocab_size": 64, "intermediate_size": 32768})
    alone, taught = (training_memory(small, replace(WORK, teacher=teacher)) for teacher in (None, wide))
    assert taught["workspace"] > 4 * 2 * 1024 * 32768 - alone["activations"] > alone["workspace"]


def test_the_logits_of_a_divergence_are_of_chunks_and_a_score_has_none():
    config = tiny_config(**SHAPE)
    plain, distilled = (
        training_memory(config, replace(WORK, fused_head=True, distills=each)) for each in (False, True)
    )
    assert distilled["logits"] == plain["logits"]
    assert distilled["workspace"] == head_memory.CHUNKS_OF_A_DIVERGENCE * 4 * head_memory.CHUNK_LOGITS
    scored = training_memory(replace(config, scored=True), WORK)
    assert scored["logits"] == 4 * 2 * 1024 and scored["workspace"] < training_memory(config, WORK)["workspace"]


def test_a_checkpoint_in_shared_memory_counts_but_is_not_the_process_s():
    config = tiny_config(**SHAPE)
    base, waiting = training_memory(config, WORK), training_memory(config, replace(WORK, checkpoint_value=12.0))
    assert base["checkpoint"] == 0
    assert waiting["checkpoint"] == 12 * config.parameter_count() == waiting["total"] - base["total"]
    assert process_bytes(waiting) == process_bytes(base) == base["total"]
    assert tensor_bytes(waiting) == tensor_bytes(base) == base["total"] - base["process"]
    shared = training_memory(config, replace(WORK, checkpoint_value=12.0, sharding=1), Topology(sharding=4))
    assert shared["checkpoint"] == waiting["checkpoint"] // 4
    adapters = training_memory(config, replace(WORK, checkpoint_value=12.0, adapters=ADAPTERS))
    assert adapters["checkpoint"] == 3 * adapters["gradients"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"unified_checkpoint_config": "async_save"}, 12.0),
        ({"unified_checkpoint_config": "async_save", "save_strategy": "no"}, 0.0),
        ({"unified_checkpoint_config": "async_save", "ignore_save_lr_and_optim": True}, 4.0),
        ({"unified_checkpoint_config": "async_save", "ckpt_quant_stage": "O2"}, 5.09),
        ({"unified_checkpoint_config": "async_save", "ckpt_quant_stage": "O2", "disable_ckpt_quant": True}, 12.0),
    ],
)
def test_async_save_is_planned_for(changes, expected):
    config = Config.from_mapping(
        {
            "stage": "SFT",
            "model_name_or_path": "model",
            "train_dataset_path": "data.jsonl",
            "output_dir": "out",
            "max_steps": 10,
            "save_strategy": "steps",
            "save_steps": 5,
            "device": "cpu",
        }
        | changes
    )
    assert workload(config, tiny_config(**SHAPE)).checkpoint_value == expected


def test_sixteen_bits_with_float32_copies_on_a_gpu():
    config = tiny_config(**SHAPE)
    memory = training_memory(config, replace(WORK, formats=BFLOAT16_O2))
    count = config.parameter_count()
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (2 * count, 2 * count, 12 * count)
    assert memory["process"] == 0 and tensor_bytes(memory) == memory["total"]


def test_every_prediction_layer_has_logits_of_its_own():
    def logits(depths, fused_head):
        config = tiny_config(**SHAPE, **EXPERTS, num_nextn_predict_layers=depths)
        return training_memory(config, replace(WORK, fused_head=fused_head))["logits"]

    probabilities = 4 * 2 * 1024 * SHAPE["vocab_size"]
    assert [logits(depths, False) for depths in (0, 1, 2)] == [probabilities, 2 * probabilities, 3 * probabilities]
    assert logits(0, True) < logits(1, True) < logits(1, False)


@pytest.mark.parametrize("adapters", [None, ADAPTERS])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_the_ranks_of_a_layout_hold_the_model_together(adapters, experts):
    config = tiny_config(**SHAPE, **experts)
    topology = Topology(tensor=2, pipeline=2, expert_axis="tensor" if experts else None)
    chunks = layer_chunks(4, topology)
    work = replace(WORK, adapters=adapters)
    held = sum(2 * training_memory(config, work, topology, chunks, stage)["parameters"] for stage in (0, 1))
    alone = training_memory(config, work)["parameters"]
    tied = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]  # on the last stage, too
    assert alone + tied < held < 1.05 * (alone + tied)  # norms, routers and half of each adapter are on both slices


def test_each_way_of_dividing_divides_what_it_says():
    config = tiny_config(**SHAPE)
    one = training_memory(config, WORK)
    for level, names in ((1, ["optimizer"]), (2, ["optimizer", "gradients"]), (3, ["optimizer", "gradients"])):
        memory = training_memory(config, replace(WORK, sharding=level), Topology(sharding=4))
        assert all(memory[name] == one[name] // 4 for name in names)
        assert memory["parameters"] == one["parameters"] // (4 if level == 3 else 1)
        assert memory["activations"] == one["activations"]
    cut = training_memory(config, WORK, Topology(tensor=2))
    sequence = training_memory(config, WORK, Topology(tensor=2, sequence_parallel=True))
    assert 0.5 * one["activations"] < sequence["activations"] < cut["activations"] < one["activations"]
    assert cut["logits"] == one["logits"] // 2


def test_the_first_stage_holds_the_most_micro_batches():
    config = tiny_config(**SHAPE)
    topology, work = Topology(pipeline=4), replace(WORK, accumulation=8)
    stages = [training_memory(config, work, topology, layer_chunks(4, topology), stage) for stage in range(4)]
    activations = [stage["activations"] for stage in stages]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] == pytest.approx(4 * activations[3], rel=0.1)
    assert [stage["logits"] > 0 for stage in stages] == [False, False, False, True]


def test_the_largest_model_needs_the_layout_of_its_recipe():
    model = published_model("baidu/ERNIE-4.5-300B-A47B-PT")
    work = Workload(1, 8192, accumulation=28, recompute=True, fused_head=True, sharding=1, formats=BFLOAT16_O2)
    topology = Topology(tensor=8, pipeline=14, expert_axis="tensor", sequence_parallel=True)
    chunks = layer_chunks(54, topology, tail=2)
    totals = [training_memory(model, work, topology, chunks, stage)["total"] for stage in range(14)]
    assert 40e9 < max(totals) < 80e9  # bytes of one GPU
    assert training_memory(model, work)["total"] > 4e12


# batch, length, documents, fused, dense, lora, dropout, recompute, beside the shape
MEASURED = {
    "full": ({}, 1, 1024, 1, True, False, False, 0.0, ""),
    "packed": ({}, 4, 1024, 8, False, False, False, 0.0, ""),
    "long": ({}, 1, 4096, 1, True, False, True, 0.0, ""),
    "dense mask": ({}, 2, 1024, 1, False, True, False, 0.0, ""),
    "adapters": ({}, 2, 1024, 4, True, False, True, 0.0, ""),
    "adapters, dropout": ({}, 2, 1024, 4, True, False, True, 0.1, ""),
    "adapters, recompute": ({}, 2, 1024, 4, True, False, True, 0.0, "full"),
    "recompute": ({}, 2, 1024, 1, True, False, False, 0.0, "full"),
    "experts": (EXPERTS, 1, 2048, 8, True, False, False, 0.0, ""),
    "experts, adapters, recompute": (EXPERTS, 1, 2048, 8, True, False, True, 0.0, "full"),
    "attention again": ({}, 2, 1024, 4, True, False, False, 0.0, "full_attn"),
    "product again, dense mask": ({}, 2, 1024, 1, True, True, False, 0.0, "core_attn"),
    "experts, attention again": (EXPERTS, 1, 2048, 8, True, False, False, 0.0, "full_attn"),
}


CASES = [
    *[(name, "auto", False) for name in MEASURED],
    *[(name, "paddle", False) for name in ("long", "adapters")],
    *[(name, "auto", True) for name in ("full", "recompute")],
]
IN_THE_PLAIN_RUN = (
    ("full", "auto", True),
    ("packed", "auto", False),
    ("adapters", "paddle", False),
    ("adapters, recompute", "auto", False),
    ("experts", "auto", False),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels", "rounded"),
    [pytest.param(*each, marks=[pytest.mark.exhaustive] * (each not in IN_THE_PLAIN_RUN)) for each in CASES],
)
def test_the_estimate_is_near_what_paddle_counts(name, kernels, rounded):
    changes, batch, length, documents, fused, dense, lora, dropout, again = MEASURED[name]
    shape = SHAPE | changes
    run = {"batch": batch, "length": length, "documents": documents, "fused": fused, "dense": dense}
    run |= {"lora": lora, "dropout": dropout, "again": again, "kernels": kernels, "rounded": rounded}
    (measured,) = run_ranks(peak_of_training, 1, timeout=300, shape=shape, **run)
    work = Workload(
        batch,
        length,
        longest_document=length // documents,
        recompute=bool(again),
        recompute_granularity=again,
        fused_head=fused,
        dense_mask=dense,
        adapters=replace(ADAPTERS, dropout=dropout) if lora else None,
        formats=Formats(
            native_kernels=kernels == "auto" and library.kernels().path != library.PADDLE,
            rounded_weights=2 if rounded else 0,
        ),
    )  # fmt: skip
    estimate = training_memory(tiny_config(**shape), work)
    print(f"measured {measured / 1e6:,.0f} MB, estimated {tensor_bytes(estimate) / 1e6:,.0f} MB: {estimate}")
    expected = tensor_bytes(estimate)
    if documents == 1 and not dense and not again and not work.formats.native_kernels:
        expected -= 4 * memory.KEPT_SCORES * SHAPE["num_hidden_layers"]
    assert expected == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("algorithm", ["weight_only_mix", "nf4"])
def test_weights_in_few_bits_take_what_they_hold(algorithm: str) -> None:
    from erniekit.model.builder import build_model
    from erniekit.model.quantization.settings import WeightOnly
    from erniekit.model.weights import packed_weights

    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 1}
    config = tiny_config(model_type="ernie4_5_moe", **experts)
    lora, settings = LoraSettings(rank=2, alpha=4.0), WeightOnly(algorithm)
    work = Workload(batch_size=1, max_seq_len=16, adapters=lora, weight_only=settings)
    decoder = build_model(config, None, lora=lora, quantization=settings)
    plain = sum(4 * parameter.size for parameter in decoder.parameters())
    held = plain + sum(weight.nbytes for weight in packed_weights(decoder).values())
    assert training_memory(config, work)["parameters"] == held
