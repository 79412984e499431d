"""Loading holds the model and little more: the peak of a process of its own, file-mapped pages included."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.storage.precision import to_stored
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.model.storage.shards import write_weight_files

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "ernie4_5",
    "vocab_size": 20_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
# Prints the peak (VmHWM, KiB) before and after the model is built. Paddle's own first-use costs come before.
MEASURE = """
import sys
from erniekit.environment import apply_cpu_settings
apply_cpu_settings()
import paddle
from erniekit.model.builder import build_model
from erniekit.model.architectures.model_config import ModelConfig
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
config = ModelConfig.from_folder(sys.argv[1])
tiny = paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
tiny[0:2] = paddle.zeros([2, 64])
before = peak()
model = build_model(config, sys.argv[1])
print(before, peak())
"""
# The same beside adapters, and again after a forward and a backward pass.
MEASURE_PACKED = MEASURE.replace(
    "model = build_model(config, sys.argv[1])\nprint(before, peak())",
    """
from erniekit.model.lora.config import LoraSettings
from erniekit.model.attention import AttentionPlan
from erniekit.model.head import token_loss
from erniekit.model.quantization.settings import WeightOnly
model = build_model(config, sys.argv[1], lora=LoraSettings(rank=2, alpha=4.0), quantization=WeightOnly(sys.argv[2]))
loaded = peak()
ids = paddle.arange(16).unsqueeze(0)
plan = AttentionPlan.build(paddle.full([1, 1, 16, 1], 16, "int32").numpy())
token_loss(model, model(ids, ids, plan), ids).loss_sum.backward()
print(before, loaded, peak())
""",
)


def write_model(folder: Path, dtype: str, max_shard_bytes: int) -> int:
    """A random model in files; returns its size in bytes as float32."""
    config = ModelConfig.from_json(CONFIG)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    shapes = config.weight_shapes()
    rng = np.random.default_rng(0)
    tensors = {name: StoredTensor(dtype, shape) for name, shape in shapes.items()}
    contents = (
        (name, [to_stored(name, rng.standard_normal(shape, np.float32), dtype).data]) for name, shape in shapes.items()
    )
    write_weight_files(folder, tensors, contents, max_shard_bytes, {"format": "pt"})
    return 4 * config.parameter_count()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells no peak")
@pytest.mark.parametrize(("dtype", "max_shard_bytes"), [("F32", 10**9), ("F32", 5 * 10**7), ("BF16", 10**9)])
def test_the_peak_is_under_a_fifth_above_the_model(dtype, max_shard_bytes, tmp_path):
    size = write_model(tmp_path, dtype, max_shard_bytes)
    assert size > 150e6
    before, after = _peaks(MEASURE, str(tmp_path))
    assert size <= after - before < 1.2 * size, f"{(after - before) / size:.2f} times the model"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells no peak")
@pytest.mark.parametrize("algorithm", ["weight_only_int8", "nf4"])
def test_weights_in_few_bits_are_never_dense_together(algorithm, tmp_path):
    """While they load a few MB of one are; while a layer computes, its own."""
    size = write_model(tmp_path, "F32", 10**9)
    config = ModelConfig.from_json(CONFIG)
    shapes = config.linear_shapes()
    dense = 4 * sum(math.prod(shape) for shape in shapes.values())
    packed = sum(WeightOnly(algorithm).form(path, config.architecture).nbytes(*shape) for path, shape in shapes.items())
    before, loaded, trained = _peaks(MEASURE_PACKED, str(tmp_path), algorithm)
    held = size - dense + packed
    assert held <= loaded - before < 1.2 * held + 2e7, f"{(loaded - before) / held:.2f} times what is held"
    assert trained - loaded < dense / 3, f"{(trained - loaded) / 1e6:.0f} MB for 16 tokens"


def _peaks(program: str, *arguments: str) -> list[int]:
    """What a program prints last, in bytes."""
    words = [sys.executable, "-c", program, *arguments]
    output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    return [1024 * int(word) for word in output.splitlines()[-1].split()]
