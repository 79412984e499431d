"""Tokens per second of `erniekit server` with 16 requests at once and one after another, its memory under mixed load,
and the same requests to transformers' `serve`.

    python tools/bench/serving.py [--requests 32] [--rounds 3] [--minutes 60] [--threads 2]
        [--theirs PYTHON] [--write]

The model has 28 M parameters with random weights, so that each token reads 110 MB of them. Requests are chat with
greedy answers of 64 tokens; both servers are asked by the same client, streams off. Mixed load is whole and streamed
answers, schemas, clients that leave, malformed bodies, and prompts that are too long, from 12 clients without a pause.
`--theirs` is the Python of an environment with `transformers[serving]`. `--write` puts the tables into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from workers import make_model

TINY_ERNIE = ROOT / "examples/models/tiny-ernie"
AT_ONCE, TOKENS = 16, 64
TEMPLATE = (
    "{%- for message in messages %}{{ '<|begin_of_sentence|>' + message['role'] + ': ' + message['content'] + "
    "'<|end_of_sentence|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|begin_of_sentence|>assistant: ' }}"
    "{%- endif %}"
)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.05,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


class Server(NamedTuple):
    """A server under measurement."""

    process: subprocess.Popen
    url: str
    model: str


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def start_ours(folder: Path, threads: int) -> Server:
    command = [sys.executable, "-m", "erniekit", "server", str(folder), "port=0", "device=cpu", "served_model_name=m"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(threads), cwd=ROOT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"at (http://\S+)", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # an unread pipe would stop the server
            return Server(process, found[1], "m")
    raise SystemExit("the server has ended before it answered")


def start_theirs(python: Path, folder: Path, threads: int, *, batches: bool) -> Server:
    """Start transformers' server, with its own continuous batching or as it comes."""
    port = random.randint(20_000, 60_000)
    command = [str(python), "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command += ["--continuous-batching"] if batches else []
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment(threads))
    url = f"http://localhost:{port}/v1"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"http://localhost:{port}/health", timeout=5)
            return Server(process, url, str(folder))
        except httpx.HTTPError:
            time.sleep(0.5)
    log.seek(0)
    raise SystemExit(f"transformers serve does not answer:\n{log.read()[-3000:]}")


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.process.kill()


def body(server: Server, number: int, **more: Any) -> dict[str, Any]:
    question = f"Sort {number} {number * 7 % 100} {number * 31 % 100} in ascending order."
    messages = [{"role": "user", "content": question}]
    return {"model": server.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, **more}


async def tokens_a_second(server: Server, requests: int, at_once: int) -> float:
    """Return the tokens of answers per second of wall time."""
    waiting = list(range(requests))
    tokens = 0
    async with httpx.AsyncClient(timeout=600) as client:

        async def ask() -> None:
            nonlocal tokens
            while waiting:
                answer = await client.post(f"{server.url}/chat/completions", json=body(server, waiting.pop()))
                answer.raise_for_status()
                tokens += answer.json()["usage"]["completion_tokens"]

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(at_once)))
        return tokens / (time.perf_counter() - began)


def rates(server: Server, requests: int, rounds: int) -> tuple[str, str, str]:
    """Return tokens per second one after another, side by side, and their ratio, as cells of a table."""
    asyncio.run(tokens_a_second(server, AT_ONCE, AT_ONCE))  # warm
    pairs = [
        [asyncio.run(tokens_a_second(server, requests, at_once)) for at_once in (1, AT_ONCE)] for _ in range(rounds)
    ]
    alone, together = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [many / one for one, many in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"{alone:,.0f}", f"{together:,.0f}", spread


def resident_mb(process: subprocess.Popen) -> float:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


async def mixed_load(server: Server, minutes: float) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """Return (minutes, MB) as the load goes on, and how often each status was answered."""
    ends, statuses = time.monotonic() + 60 * minutes, dict[str, int]()
    curve: list[tuple[float, float]] = []

    def count(what: object) -> None:
        statuses[str(what)] = statuses.get(str(what), 0) + 1

    async def one(client: httpx.AsyncClient, draw: random.Random) -> None:
        url, number = f"{server.url}/chat/completions", draw.randrange(10_000)
        match draw.randrange(8):
            case 0:
                count((await client.post(url, content=b'{"messages": [')).status_code)
            case 1:
                long = [{"role": "user", "content": "one two " * draw.randrange(3000, 20_000)}]
                count((await client.post(url, json=body(server, 0, messages=long))).status_code)
            case 2:
                form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
                count((await client.post(url, json=body(server, number, response_format=form))).status_code)
            case 3:
                async with client.stream("POST", url, json=body(server, number, stream=True)) as answer:
                    async for _ in answer.aiter_lines():
                        break  # and leaves
                count("left")
            case 4:
                async with client.stream("POST", url, json=body(server, number, stream=True)) as answer:
                    async for _ in answer.aiter_lines():
                        pass
                count(answer.status_code)
            case _:
                more = {"n": draw.randrange(1, 4), "temperature": 1.0, "logprobs": draw.random() < 0.3}
                count((await client.post(url, json=body(server, number, **more))).status_code)

    async def load(seed: int) -> None:
        draw = random.Random(seed)
        async with httpx.AsyncClient(timeout=600) as client:
            while time.monotonic() < ends:
                await one(client, draw)

    async def watch() -> None:
        began = time.monotonic()
        while time.monotonic() < ends:
            curve.append(((time.monotonic() - began) / 60, resident_mb(server.process)))
            await asyncio.sleep(min(10.0, 6 * minutes))

    await asyncio.gather(watch(), *(load(seed) for seed in range(12)))
    curve.append((minutes, resident_mb(server.process)))
    return curve, statuses


def write_folder(folder: Path) -> None:
    """Write a model that both servers read."""
    (folder / "tokenizer.json").write_bytes((TINY_ERNIE / "tokenizer.json").read_bytes())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    make_model(folder, CONFIG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="of mixed load; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--theirs", type=Path, help="the Python of an environment with transformers[serving]")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args()
    rows = ["| server | tokens/s, one after another | tokens/s, 16 at once | ratio |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder)
        kinds = [("`erniekit server`", lambda: start_ours(folder, options.threads))]
        if options.theirs:
            for batches, words in ((False, ""), (True, " --continuous-batching")):
                kinds.append(
                    (
                        f"`transformers serve{words}`",
                        lambda batches=batches: start_theirs(options.theirs, folder, options.threads, batches=batches),
                    )
                )
        for title, start in kinds:
            try:
                server = start()
                try:
                    cells = rates(server, options.requests, options.rounds)
                finally:
                    stop(server)
            except (SystemExit, httpx.HTTPError) as error:
                print(f"{title}: {error}", file=sys.stderr)
                cells = ("did not answer", "", "")
            rows.append(f"| {title} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
        if options.minutes:
            server = start_ours(folder, options.threads)
            curve, statuses = asyncio.run(mixed_load(server, options.minutes))
            health = httpx.get(server.url.removesuffix("/v1") + "/health").json()
            stop(server)
            chosen = [curve[round(place * (len(curve) - 1) / 6)] for place in range(7)]
            rows += ["", f"| minutes | {' | '.join(f'{minute:.1f}' for minute, _ in chosen)} |"]
            rows += [f"|---|{'---:|' * len(chosen)}", f"| MB | {' | '.join(f'{size:,.0f}' for _, size in chosen)} |"]
            answered = ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))
            rows += ["", f"Answered: {answered}; under way at the end: {health['in_flight']}."]
    versions = versions_in(options.theirs, "torch", "transformers") if options.theirs else []
    rows += ["", measured_at(f"python tools/bench/serving.py --minutes {options.minutes:g}", versions)]
    print("\n".join(rows))
    if options.write:
        BENCHMARKS.write_text(with_table("serving", "\n".join(rows), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
