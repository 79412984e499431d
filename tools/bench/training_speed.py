"""Training tokens per second of this project and of transformers (torch, sdpa), side by side in one run.

    python tools/bench/training_speed.py [--torch-python PATH] [--threads 2] [--rounds 5] [--only 29M]

Both sides load the same random ERNIE-4.5 weights, see the same tokens, and do the same step: forward, summed cross
entropy, backward, clipping to norm 1, AdamW. They are two processes that take turns, so that a busy machine slows
both. "packed" is a row of log-normal documents that must not see each other (transformers is given position ids that
restart, from which it makes a block-diagonal mask); "full" is one document. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from workers import ROOT, Worker, answer, make_model, median_seconds, ratio_and_range, take_turns

MODELS = {
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64},
    "29M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128},
}
SHARED = {
    "model_type": "ernie4_5",
    "vocab_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "use_bias": False,
}
WORKLOADS = {"5M": (2, 512), "29M": (1, 1024)}  # rows, tokens


def batch(rows: int, length: int, packed: bool, seed: int) -> dict[str, np.ndarray]:
    """input_ids, shifted labels, position_ids and document ends, each [rows, length]."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 8192, (rows, length))
    ends = np.full((rows, length), length)
    if packed:
        for row in range(rows):
            lengths = np.maximum(8, rng.lognormal(np.log(length / 6), 0.8, size=length).astype(int))
            borders = np.minimum(np.cumsum(lengths), length)
            ends[row] = borders[np.searchsorted(borders, np.arange(length), side="right")]
    starts = np.concatenate([np.zeros((rows, 1), int), ends[:, :-1]], 1)
    new = np.concatenate([np.ones((rows, 1), bool), ends[:, 1:] != ends[:, :-1]], 1)
    starts = np.maximum.accumulate(np.where(new, np.arange(length), 0), 1)
    return {"ids": ids, "labels": np.roll(ids, -1, 1), "positions": np.arange(length) - starts, "ends": ends}


def ours(folder: Path, head: str):  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT))
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.model.attention import AttentionPlan
    from erniekit.model.builder import build_model
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.head import token_loss

    decoder = build_model(ModelConfig.from_folder(folder), folder)
    optimizer = paddle.optimizer.AdamW(
        1e-4, parameters=decoder.parameters(), weight_decay=0.01, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)
    )

    def step(data: dict[str, np.ndarray]) -> float:
        plan = AttentionPlan.build(data["ends"][:, None, :, None])
        hidden = decoder(paddle.to_tensor(data["ids"]), paddle.to_tensor(data["positions"]), plan)
        loss = token_loss(decoder, hidden, paddle.to_tensor(data["labels"]), fused=head == "fused")
        mean = loss.loss_sum / data["ids"].size
        mean.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(mean)

    return step


def theirs(folder: Path):  # type: ignore[no-untyped-def]
    import torch
    import transformers

    model = transformers.Ernie4_5ForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(data: dict[str, np.ndarray]) -> float:
        one_document = (data["ends"] == data["ends"].shape[1]).all()
        positions = None if one_document else torch.tensor(data["positions"])  # None keeps sdpa's causal fast path
        logits = model(input_ids=torch.tensor(data["ids"]), position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(data["labels"]).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def work(side: str, folder: Path, head: str) -> None:
    """Answer every request line {rows, length, packed, steps} with a line {seconds, losses, peak_mb}."""
    step = ours(folder, head) if side == "ours" else theirs(folder)
    for line in sys.stdin:
        request = json.loads(line)
        losses = []
        start = time.perf_counter()
        for number in range(request["steps"]):
            losses.append(step(batch(request["rows"], request["length"], request["packed"], number)))
        answer(start, losses)


def compare(name: str, args: argparse.Namespace) -> None:
    rows, length = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, {**SHARED, **MODELS[name]})

        def start(python: str, side: str) -> Worker:
            command = [python, __file__, "--work", side, "--folder", str(folder), "--head", args.head]
            return Worker(command, args.threads)

        for packed in (False, True):
            workers = {"ours": start(sys.executable, "ours"), "theirs": start(args.torch_python, "theirs")}
            shape = {"rows": rows, "length": length, "packed": packed}
            first = {side: worker.run(**shape, steps=2)["losses"] for side, worker in workers.items()}
            if not np.allclose(first["ours"], first["theirs"], atol=1e-3):
                raise SystemExit(f"the two sides disagree on the loss: {first}")
            answers = take_turns(workers, args.rounds, **shape, steps=args.steps)
            tokens = rows * length * args.steps
            speed = {side: tokens / median_seconds(listed) for side, listed in answers.items()}
            print(
                f"| {name} | {rows} x {length} {'packed' if packed else 'full'} | {speed['ours']:,.0f} "
                f"| {speed['theirs']:,.0f} | {ratio_and_range(answers)} "
                f"| {answers['ours'][-1]['peak_mb']:,.0f} | {answers['theirs'][-1]['peak_mb']:,.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch and transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps a side makes before the other's turn")
    parser.add_argument("--head", choices=("plain", "fused"), default="fused", help="our head and loss")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--work", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder, args.head)
        return
    print("| parameters | batch | ours, tokens/s | torch, tokens/s | ratio (range) | ours, peak MB | torch, peak MB |")
    print("|---|---|---|---|---|---|---|")
    for name in [args.only] if args.only else MODELS:
        compare(name, args)


if __name__ == "__main__":
    main()
