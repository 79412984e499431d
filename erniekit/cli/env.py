"""`erniekit env`: show versions, devices, CPU settings and what works on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import metadata

from erniekit import __version__
from erniekit.environment import cpu_settings, import_paddle
from erniekit.terminal import escape_control_characters

PACKAGES = (
    "paddlepaddle", "paddlepaddle-gpu", "paddlenlp", "numpy", "safetensors", "tokenizers", "visualdl", "tensorboardX",
    "sentencepiece", "huggingface_hub", "aistudio-sdk", "modelscope-hub", "transformers", "torch",
    "soundfile", "soxr", "tiktoken", "jiwer",
)  # fmt: skip


def _bfloat16_on_this_cpu() -> str:
    from erniekit.model import bf16

    is_faster, sentence = bf16.is_faster()
    return f"{'acts' if is_faster else 'no effect unless cpu_bf16: always, fp32 runs'} ({sentence})"


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="erniekit env", description="Show versions, devices and what works here.")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a bug report")
    options = parser.parse_args(arguments)
    import_paddle()
    sections = {
        "versions": _versions(),
        "machine": _machine(),
        "cpu settings": cpu_settings(),
        "what works here": _capabilities(),
    }
    if options.json:
        print(json.dumps(sections, indent=2))
        return 0
    for title, rows in sections.items():
        print(title)
        for name, value in rows.items():
            print(escape_control_characters(f"  {name:<26} {value or 'not set'}"))
    return 0


def _versions() -> dict[str, str]:
    versions = {"erniekit": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _machine() -> dict[str, str]:
    import paddle

    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    names = [paddle.device.cuda.get_device_name(index) for index in range(gpus)]
    return {
        "system": platform.platform(),
        "processor": _processor_name(),
        "fp32 matrix product": f"{_matmul_gflops():.0f} GFLOP/s (measured now, 1024 x 1024)",
        "GPUs": ", ".join(names) or "none (or a CPU build of Paddle)",
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _matmul_gflops(size: int = 1024, repeats: int = 5) -> float:
    import paddle

    left, right = paddle.ones([size, size]), paddle.ones([size, size])
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        paddle.matmul(left, right).numpy()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e9


def _capabilities() -> dict[str, str]:
    from erniekit.model.device import has_flashmask_kernel

    gpu = has_flashmask_kernel()
    return {
        "attention": "FlashMask kernel of the GPU" if gpu else "exact CPU equivalent of FlashMask",
        "CPU kernels": _kernels(),
        "training precision": "fp32; products in bf16 with bf16: true, where it acts"
        if not gpu
        else "fp32 with attention in bf16, bf16, fp16 (not tested by us on a GPU)",
        "bf16: true": "acts" if gpu else _bfloat16_on_this_cpu(),
        "fp16: true": "acts" if gpu else "no effect on a CPU: fp32 runs",
    }


def _kernels() -> str:
    from erniekit.native import library

    kernels = library.kernels()
    path = "Paddle's operators" if kernels.path == library.PADDLE else kernels.path
    return f"{path}: {kernels.reason}"
