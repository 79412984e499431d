"""How fast answers are written: ours beside transformers' `generate`, and beside llama.cpp's package where it is there.

    python tools/bench/decode.py [--models tiny medium] [--prompts 1 16] [--length 64] [--new 64] [--threads 2]
                                 [--rounds 3] [--cpu] [--environments .peers] [--llama PYTHON]
                                 [--folder /tmp/bench-decode] [--write]

Greedy answers to prompts of `length` random tokens, by models of workload.py with random weights, in float32; ours also
with linear weights in 8 and 4 bits, and from files in bfloat16. These hold the same weights, since all are rounded:
ours computes in float32 with them, transformers and llama.cpp round what they multiply. Each side runs in a process of
its own, in turn with the others, and tells its tokens a second after the prompts: (new - 1) tokens over the seconds of
new tokens less those of one, the least of each over the rounds and over what a process repeats in three seconds. Sides
that compute in float32 must choose the same first tokens, or nothing is printed.
llama.cpp's package (`pip install llama-cpp-python gguf` compiles it) gets the same weights as a GGUF file, with keys
and values in float32 and without its flash attention, since both change its answers.
With --cpu the seconds are those of the processor, for a machine that others use, too; then take --threads 1. Memory is
the kernel's VmHWM. Prints a markdown table; with --write it goes into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from workload import MODELS

SAME_TOKENS = 8  # of each answer, compared between float32 sides: later ones follow rounding
COMMON = """
import json, sys, time
import numpy as np
folder, count, length, new, clock = sys.argv[1], *map(int, sys.argv[2:5]), getattr(time, sys.argv[5])
vocabulary = json.load(open(folder + "/config.json"))["vocab_size"]
prompts = np.random.default_rng(0).integers(3, vocabulary, (count, length)).tolist()

def report(answer, **more):
    answer(2)
    seconds, began = {1: 1e9, new: 1e9}, time.perf_counter()
    while time.perf_counter() - began < 3:
        for tokens in seconds:
            start = clock()
            ids = answer(tokens)
            seconds[tokens] = min(seconds[tokens], clock() - start)
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps({"first": seconds[1], "all": seconds[new], "peak": peak / 1024, "ids": ids, **more}))
"""
OURS = (
    COMMON
    + """
from erniekit.environment import import_paddle
import_paddle()
import paddle
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.settings import WeightOnly
quantization = WeightOnly(sys.argv[6]) if len(sys.argv) > 6 else None
model = build_model(ModelConfig.from_folder(folder), folder, quantization=quantization, mapped=quantization is None)
a = paddle.ones([1024, 1024])
product = min(timed for _ in range(5) for start in [clock()] for timed in [(paddle.matmul(a, a), clock() - start)[1]])
report(lambda tokens: generate(model, prompts, Sampling(max_new_tokens=tokens)), product=2 * 1024**3 / product / 1e9)
"""
)
TRANSFORMERS = (
    COMMON
    + """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, sys.argv[6])).eval()
inputs = torch.tensor(prompts)

def answer(tokens):
    made = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=tokens,
                          min_new_tokens=tokens, pad_token_id=0)
    return made[:, length:].tolist()

report(answer)
"""
)
GGUF = """
import json, sys
from pathlib import Path
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
folder, target = map(Path, sys.argv[1:3])
config = json.loads((folder / "config.json").read_text())
with (folder / "model.safetensors").open("rb") as file:
    start = 8 + int.from_bytes(file.read(8), "little")
    tensors = json.loads(file.read(start - 8))
values = np.memmap(folder / "model.safetensors", np.uint8, "r")[start:]
parts = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
names = {f"{stored}.weight": f"{name}.weight" for stored, name in ends.items()}
for number in range(config["num_hidden_layers"]):
    names |= {f"model.layers.{number}.{part}.weight": f"blk.{number}.{name}.weight" for part, name in parts.items()}
writer = GGUFWriter(target, "ernie4_5")
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_block_count(config["num_hidden_layers"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_value_length(config["head_dim"])
writer.add_rope_dimension_count(config["head_dim"])
writer.add_rope_freq_base(config["rope_theta"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_tokenizer_model("no_vocab")
writer.add_vocab_size(config["vocab_size"])
for stored, tensor in tensors.items():
    if stored != "__metadata__":
        first, last = tensor["data_offsets"]
        shape, own = tensor["shape"], np.asarray(values[first:last])
        if tensor["dtype"] == "F32":
            writer.add_tensor(names[stored], own.view(np.float32).reshape(shape))
        elif len(shape) == 2:
            bits = own.reshape(shape[0], 2 * shape[1])
            writer.add_tensor(names[stored], bits, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(names[stored], (own.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
LLAMA_CPP = (
    COMMON
    + """
import ctypes, os
import llama_cpp as cpp
threads = int(os.environ["OMP_NUM_THREADS"])
settings = cpp.llama_context_default_params()
settings.n_ctx, settings.n_seq_max, settings.n_batch = count * (length + new + 8), count, count * length
settings.n_threads = settings.n_threads_batch = threads
settings.type_k = settings.type_v = cpp.GGML_TYPE_F32  # as the others keep keys and values
settings.flash_attn_type = cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
quiet = cpp.llama_log_callback(lambda *given: None)
cpp.llama_log_set(quiet, ctypes.c_void_p())
cpp.llama_backend_init()
model = cpp.llama_model_load_from_file(sys.argv[6].encode(), cpp.llama_model_default_params())
context = cpp.llama_init_from_model(model, settings)
batch = cpp.llama_batch_init(count * length, 0, 1)

def decode(sequences, start):
    batch.n_tokens = 0
    for number, tokens in enumerate(sequences):
        for place, token in enumerate(tokens):
            row, last = batch.n_tokens, place == len(tokens) - 1
            batch.token[row], batch.pos[row], batch.logits[row] = token, start + place, last
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
            batch.n_tokens += 1
    assert cpp.llama_decode(context, batch) == 0
    ends = np.cumsum([len(tokens) for tokens in sequences]) - 1
    rows = [cpp.llama_get_logits_ith(context, int(end)) for end in ends]
    return [int(np.ctypeslib.as_array(row, (vocabulary,)).argmax()) for row in rows]

def answer(tokens):
    cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
    steps = [decode(prompts, 0)]
    for position in range(length, length + tokens - 1):
        steps.append(decode([[token] for token in steps[-1]], position))
    return [list(chosen) for chosen in zip(*steps)]

report(answer)
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "medium"], choices=[*MODELS])
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 16], help="answered side by side")
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor time in place of wall time")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    parser.add_argument("--llama", type=Path, help="the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-decode"))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    torch = options.environments / "torch/bin/python"
    lines = [
        f"Prompts of {options.length} tokens, answers of {options.new}, {options.threads} threads; tokens a second "
        "after the prompts, and of the prompts.",
        "",
        "| model | prompts | side | answers, tokens/s | times transformers | prompts, tokens/s | peak, MB |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    products: list[float] = []
    for name in options.models:
        folder = write_model(options.folder / name, name)
        for count in options.prompts:
            results = compare(sides_of(folder, torch, options.llama), count, options)
            products += [result["product"] for result in results.values() if "product" in result]
            base = results.get("transformers")
            for side, result in results.items():
                ratio = f"{result['rate'] / base['rate']:.2f}" if base else "-"
                lines.append(
                    f"| {name} | {count} | {side} | {result['rate']:,.1f} | {ratio} | {result['prompt']:,.0f} "
                    f"| {result['peak']:,.0f} |"
                )
    shutil.rmtree(options.folder)
    lines += ["", f"Float32 products of the run: {min(products):.0f} to {max(products):.0f} GF/s."]
    others = versions_in(torch, "torch", "transformers") if torch.exists() else []
    others += versions_in(options.llama, "llama-cpp-python") if options.llama else []
    table = "\n".join([*lines, "", measured_at("python tools/bench/decode.py --write", others)])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("decode", table, BENCHMARKS), encoding="utf-8")


class Side(NamedTuple):
    """Who answers: an interpreter, its program, the model's folder and further arguments."""

    python: str
    program: str
    folder: Path
    more: tuple[str, ...] = ()


def sides_of(folder: Path, torch: Path, llama: Path | None) -> dict[str, Side]:
    sides = {
        "ours": Side(sys.executable, OURS, folder / "float32"),
        "ours, bfloat16 files": Side(sys.executable, OURS, folder / "bfloat16"),
        "ours, int8": Side(sys.executable, OURS, folder / "float32", ("weight_only_int8",)),
        "ours, int4": Side(sys.executable, OURS, folder / "float32", ("weight_only_int4",)),
    }
    if torch.exists():
        sides["transformers"] = Side(str(torch), TRANSFORMERS, folder / "float32", ("float32",))
        sides["transformers, bfloat16"] = Side(str(torch), TRANSFORMERS, folder / "bfloat16", ("bfloat16",))
    if llama is not None:
        for side, dtype in (("llama.cpp", "float32"), ("llama.cpp, bfloat16", "bfloat16")):
            file = folder / f"{dtype}.gguf"
            if not file.exists():
                subprocess.run([llama, "-c", GGUF, folder / dtype, file], check=True)
            sides[side] = Side(str(llama), LLAMA_CPP, folder / "float32", (str(file),))
    return sides


def compare(sides: dict[str, Side], count: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The least seconds of each side, and its rates; the sides take turns."""
    best: dict[str, dict[str, Any]] = {}
    clock = "process_time" if options.cpu else "perf_counter"
    for _ in range(options.rounds):
        for side, (python, program, folder, more) in sides.items():
            arguments = [str(folder), *map(str, (count, options.length, options.new)), clock, *more]
            environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [python, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
            )
            if done.returncode:
                sys.exit(f"{side}: {done.stderr[-2000:]}")
            result = json.loads(done.stdout.splitlines()[-1])
            before = best.setdefault(side, result)
            best[side] = result | {key: min(before[key], result[key]) for key in ("first", "all", "peak")}
    first = {side: [ids[:SAME_TOKENS] for ids in result["ids"]] for side, result in best.items()}
    for side in ("ours, bfloat16 files", "transformers", "llama.cpp"):
        if side in best and first[side] != first["ours"]:
            sys.exit(f"the answers differ: {first['ours']} here, {first[side]} of {side}")
    for result in best.values():
        result["rate"] = count * (options.new - 1) / (result["all"] - result["first"])
        result["prompt"] = count * options.length / result["first"]
    return best


def write_model(folder: Path, name: str) -> Path:
    """Write a model with random weights, large enough for its answers to vary: the same in bfloat16 and in float32."""
    sys.path.insert(0, str(ROOT))
    from load import write_random

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor, write_stored

    shutil.rmtree(folder, ignore_errors=True)
    config = ModelConfig.from_json({**MODELS[name], "initializer_range": 0.1, "tie_word_embeddings": False})
    for dtype in ("bfloat16", "float32"):
        (folder / dtype).mkdir(parents=True)
    write_random(folder / "bfloat16", config, "BF16", 10**12)
    (folder / "float32/config.json").write_bytes((folder / "bfloat16/config.json").read_bytes())
    rounded = SafetensorsFile(folder / "bfloat16/model.safetensors")
    tensors = {name: StoredTensor("F32", rounded.shape(name)) for name in rounded.names()}
    contents = ((name, [rounded.read(name).data]) for name in tensors)
    write_stored(folder / "float32/model.safetensors", tensors, contents, {"format": "pt"})
    return folder


if __name__ == "__main__":
    main()
