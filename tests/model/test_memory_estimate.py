from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.model import attention, head
from erniekit.model.memory_estimate import training_memory

from .tiny import tiny_config

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}

# Runs in a fresh process, whose peak memory nothing else has raised.
MEASURE = """
import json, re, sys
from erniekit.environment import import_paddle
import_paddle()
import numpy as np, paddle
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from tests.model.tiny import tiny_config
shape, batch, length, fused, dense = json.loads(sys.argv[1])
paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
def resident():  # bytes
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
decoder = build_model(tiny_config(**shape), None)
optimizer = paddle.optimizer.AdamW(1e-4, parameters=decoder.parameters())
ids = paddle.randint(0, shape["vocab_size"], [batch, length])
positions = paddle.arange(length).expand([batch, length])
indices = np.full((batch, 1, length, 1), length, np.int32)
for _ in range(2):
    plan = AttentionPlan.build(indices, dense=dense)
    token_loss(decoder, decoder(ids, positions, plan), ids, fused=fused).loss_sum.backward()
    optimizer.step()
    optimizer.clear_grad()
# Not ru_maxrss, which a process inherits from the one that started it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024
print("BYTES", peak - before)
"""


def test_the_constants_are_those_of_the_model():
    from erniekit.model import memory_estimate

    assert memory_estimate.CHUNK_LOGITS == head.CHUNK_LOGITS
    assert memory_estimate.KEPT_SCORES == attention.KEEP_SCORES_UP_TO


def test_parts_add_up_and_follow_what_they_should():
    config = tiny_config(**SHAPE)

    def memory(**how):
        return training_memory(config, **{"batch_size": 2, "max_seq_len": 1024, **how})

    base = memory()
    assert base["total"] == sum(size for name, size in base.items() if name != "total")
    assert base["parameters"] == base["gradients"] == base["optimizer"] // 2 == 4 * config.parameter_count()
    assert memory(trainable=1000)["gradients"] == 4000
    assert memory(batch_size=4)["activations"] > 1.5 * base["activations"]
    assert memory(recomputed_layers=100)["activations"] < 0.7 * base["activations"]
    assert memory(fused_head=True)["logits"] < base["logits"]
    assert memory(dense_mask=True)["attention_mask"] == attention.dense_mask_bytes(2, 1024)
    assert memory(dense_mask=True)["activations"] > base["activations"]


def test_every_prediction_layer_has_logits_of_its_own():
    moe = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}

    def logits(depths, fused_head):
        config = tiny_config(**SHAPE, **moe, num_nextn_predict_layers=depths)
        return training_memory(config, batch_size=2, max_seq_len=1024, fused_head=fused_head)["logits"]

    probabilities = 4 * 2 * 1024 * SHAPE["vocab_size"]
    assert [logits(depths, False) for depths in (0, 1, 2)] == [2 * probabilities, 3 * probabilities, 4 * probabilities]
    assert logits(0, True) < logits(1, True) < logits(1, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "length", "fused", "dense"),
    [(1, 1024, True, False), (4, 1024, False, False), (1, 4096, True, False), (2, 1024, False, True)],
)
def test_the_estimate_is_near_the_measured_peak(batch, length, fused, dense):
    request = json.dumps([SHAPE, batch, length, fused, dense])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, request], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    measured = int(done.stdout.split("BYTES")[1])
    estimate = training_memory(
        tiny_config(**SHAPE), batch_size=batch, max_seq_len=length, fused_head=fused, dense_mask=dense
    )
    print(f"measured {measured / 1e6:,.0f} MB, estimated {estimate['total'] / 1e6:,.0f} MB: {estimate}")
    assert estimate["total"] == pytest.approx(measured, rel=0.25)
