#!/usr/bin/env python3
"""Record the samples that the processor of the `omnivoice` package draws, with given numbers in place of random ones.

    .venv-transformers5/bin/python tools/parity/record_masked_codes.py

Needs omnivoice 0.2.1 and torch. Writes tests/data/recorded_masked_codes.npz: for each run, time and record of
tests/data/masked_code_cases.py the ids [C, S] and labels [C, S], and from which position on they are codes.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.data.masked_code_cases import (  # noqa: E402
    CODES,
    LEVELS,
    RECORDED,
    RECORDS,
    RUNS,
    TIMES,
    choices_of,
    codes_of,
    ids_of,
    masks_of,
)


def load_processor() -> Any:
    """Load the package's module alone; the package itself needs libraries for sound."""
    package = importlib.util.find_spec("omnivoice")
    if package is None or package.origin is None:
        sys.exit("error: omnivoice 0.2.1 is needed: pip install --no-deps omnivoice==0.2.1")
    spec = importlib.util.spec_from_file_location("processor", Path(package.origin).parent / "data/processor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tokenizer:
    """One id a character or special token."""

    def __call__(self, text: str, return_tensors: str) -> Any:
        return types.SimpleNamespace(input_ids=torch.tensor([ids_of(text)]))


def asked(record: Mapping[str, Any], numbers: np.ndarray, run: Mapping[str, Any]) -> list[float]:
    """Return the numbers in the order in which the processor asks for them; it leaves out what does not matter."""
    drop, prompt, language, instruct, only_instruct, ratio, pinyin = numbers[:7].tolist()
    is_denoised = "clean_start_token_idx" in record
    found = [] if is_denoised else [drop]
    if is_denoised or drop >= run["condition_dropout"]:
        found += [prompt, language, instruct]
        found += [only_instruct] if instruct < run["instruct"] else []
    return [*found, ratio, *([pinyin] if "text_pinyin" in record else [])]


def main() -> None:
    module = load_processor()
    arrays: dict[str, np.ndarray] = {}
    for name, run in RUNS.items():
        processor = module.OmniVoiceSampleProcessor(
            Tokenizer(), LEVELS, CODES, run["prompt_ratio"], run["mask_ratio"], run["condition_dropout"],
            run["language"], run["pinyin"], run["instruct"], run["only_instruct"],
        )  # fmt: skip
        for time in range(TIMES):
            choices = choices_of(time)
            for number, record in enumerate(RECORDS):
                numbers = asked(record, choices[number], run)
                module.random = types.SimpleNamespace(
                    uniform=lambda low, high, of=numbers: low + (high - low) * of.pop(0)
                )
                masks = torch.from_numpy(masks_of(time, number))
                module.torch.rand = lambda shape, of=masks: of[:, of.shape[1] - shape[1] :]
                sample = processor({"label": record, "audio_tokens": torch.from_numpy(codes_of(number))})
                assert not numbers, (name, time, number)
                key = f"{name}/{time}/{number}"
                arrays[f"{key}/ids"] = sample["input_ids"].numpy().astype(np.int32)
                arrays[f"{key}/labels"] = sample["labels"].numpy().astype(np.int32)
                arrays[f"{key}/first"] = np.array(int((~sample["audio_mask"]).sum()), np.int32)
    np.savez_compressed(RECORDED, **arrays)
    print(f"{RECORDED}: {len(arrays) // 3} samples, {RECORDED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
