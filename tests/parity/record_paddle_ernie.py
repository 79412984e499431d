"""Record tests/model/storage/paddle_ernie.npz: tiny ERNIE-4.5 files of paddleformers 0.1.6 (ERNIEKit 1.0.1).

    pip install paddleformers==0.1.6        # in an environment of its own, with Paddle 3.3.1
    python -m tests.parity.record_paddle_ernie

Holds what `save_pretrained` wrote (names, [in, out] linears, fused projections), the keys of config.json, and logits.
That model attends on a GPU only: its causal softmax is a GPU kernel, and grouped keys are left to the kernel behind it.
Both are given to it here in plain operations, after everything that the files hold has acted.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import paddle
import paddleformers.transformers.ernie4_5.modeling as theirs
import safetensors.numpy
from paddleformers.transformers import Ernie4_5Config, Ernie4_5ForCausalLM

TARGET = Path(__file__).parents[1] / "model" / "storage" / "paddle_ernie.npz"
BASE = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "use_flash_attention": False,
}
CASES = {
    "grouped": {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False},
    "ungrouped": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
KEYS = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "use_bias", "model_type")


def causal_softmax(scores: paddle.Tensor) -> paddle.Tensor:
    length = scores.shape[-1]
    mask = np.triu(np.full((length, length), -1e30, np.float32), 1)
    return paddle.nn.functional.softmax(scores + paddle.to_tensor(mask))


def main() -> None:
    attend = theirs.Ernie4_5Attention.core_attn

    def attend_with_repeated_keys(self, q, k, v, *args, **kwargs):  # type: ignore[no-untyped-def]
        k, v = (paddle.repeat_interleave(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return attend(self, q, k, v, *args, **kwargs)

    theirs.incubate.softmax_mask_fuse_upper_triangle = causal_softmax
    theirs.Ernie4_5Attention.core_attn = attend_with_repeated_keys

    rng = np.random.default_rng(31)
    ids = rng.integers(0, BASE["vocab_size"], 30)
    arrays = {"ids": ids}
    for case, changes in CASES.items():
        model = Ernie4_5ForCausalLM(Ernie4_5Config(**BASE, **changes))
        model.eval()
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name else 0.0
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32) * 0.4 + offset)
        with tempfile.TemporaryDirectory() as folder, paddle.no_grad():
            model.save_pretrained(folder, safe_serialization=True)
            stored = safetensors.numpy.load_file(Path(folder) / "model.safetensors")
            config = json.loads((Path(folder) / "config.json").read_text())
            hidden = model.ernie(paddle.to_tensor(ids[None]))
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden.last_hidden_state
            logits = model.lm_head(hidden)[0].numpy()
        config = {key: config[key] for key in (*BASE, *KEYS) if key in config}
        arrays[f"{case}/config"] = np.frombuffer(json.dumps(config).encode(), np.uint8)
        arrays[f"{case}/logits"] = logits
        arrays |= {f"{case}/stored/{name}": values for name, values in stored.items()}
    versions = {name: version(name) for name in ("paddlepaddle", "paddleformers")}
    np.savez_compressed(TARGET, versions=np.frombuffer(json.dumps(versions).encode(), np.uint8), **arrays)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()
