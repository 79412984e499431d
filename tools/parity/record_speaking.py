#!/usr/bin/env python3
"""Record how the `omnivoice` package divides texts, estimates durations, unmasks codes and removes silence.

    .venv-transformers5/bin/python tools/parity/record_speaking.py

Needs omnivoice 0.2.1 (and so transformers 5 and torch) and pydub 0.25.1, and neither Paddle nor soundfile: what it
imports to read sound is replaced by empty modules. Writes tests/inference/speaking/recorded/: texts.json,
divided.json, schedules.json, unmasking.npz with the codes after each step, and silence.json with what the sounds of
`speaking_cases.sound` are without silence.
"""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.inference.speaking.speaking_cases import (  # noqa: E402
    CODES,
    DIVIDED,
    LENGTHS,
    LEVELS,
    LLM,
    RATE,
    RECORDED,
    REFERENCES,
    RUNS,
    SCHEDULES,
    SEED,
    SOUNDS,
    SPEEDS,
    SPOKEN,
    TASKS,
    character_ids,
    described,
    sound,
    voice_codes,
)
from tests.model.seeded_weights import seeded_weight  # noqa: E402
from tools.parity.empty_modules import READ_SOUND, replace_modules  # noqa: E402

replace_modules(*READ_SOUND)

import torch  # noqa: E402
from omnivoice.models import omnivoice as package  # noqa: E402
from omnivoice.utils.audio import remove_silence  # noqa: E402
from omnivoice.utils.duration import RuleDurationEstimator  # noqa: E402
from omnivoice.utils.text import add_punctuation, chunk_text_punctuation  # noqa: E402


class Characters:
    """A tokenizer of one id a character."""

    def __call__(self, text: str, return_tensors: str | None = None, add_special_tokens: bool = True) -> Any:
        ids = character_ids(text)
        return types.SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)


class Replayed:
    """Gives `torch.rand_like` the numbers that we draw: those of a request depend on its number and the step."""

    def __init__(self, requests: int, draws: int) -> None:
        self.requests, self.draws, self.count, self.generator = requests, draws, 0, None

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        number, draw = divmod(self.count, self.draws)
        if draw == 0:
            step, request = divmod(number, self.requests)
            self.generator = np.random.default_rng([SEED, request, step])
        self.count += 1
        assert self.generator is not None
        return torch.from_numpy(self.generator.random(tuple(like.shape[1:]), np.float32))[None]


def texts() -> dict[str, Any]:
    """Return what becomes of each text."""
    estimator = RuleDurationEstimator()
    model = types.SimpleNamespace(duration_estimator=estimator)
    return {
        "pieces": [[chunk_text_punctuation(text, length, 3) for length in LENGTHS] for text in SPOKEN],
        "punctuated": [add_punctuation(text) for text in SPOKEN],
        "joined": [[package._combine_text(text, other) for other in (None, *SPOKEN)] for text in SPOKEN],
        "frames": [
            [
                package.OmniVoice._estimate_target_tokens(model, text, *(reference or (None, None)), speed)
                for reference in REFERENCES
                for speed in SPEEDS
            ]
            for text in SPOKEN
        ],
        "weights": runs_of_weights(estimator),
    }


def runs_of_weights(estimator: RuleDurationEstimator) -> list[list[float]]:
    """Return [first code point, weight] of each run of characters that take equally long."""
    runs: list[list[float]] = []
    for code in range(sys.maxunicode + 1):
        weight = estimator._get_char_weight(chr(code))
        if not runs or runs[-1][1] != weight:
            runs.append([code, weight])
    return runs


def schedules() -> list[list[int]]:
    """Return the codes of each step, as `_generate_iterative` plans them."""
    found = []
    for codes, steps, shift in SCHEDULES:
        times = package._get_time_steps(0.0, 1.0, steps, shift).tolist()
        left, counts = codes, []
        for step in range(steps):
            count = left if step == steps - 1 else min(math.ceil(codes * (times[step + 1] - times[step])), left)
            counts.append(int(count))
            left -= int(count)
        found.append(counts)
    return found


def unmasking() -> dict[str, np.ndarray]:
    """Return for each run and request the ids before the codes, and the codes after each step [steps, C, T]."""
    from transformers import Qwen3Config

    config = package.OmniVoiceConfig(
        audio_vocab_size=CODES + 1,
        audio_mask_id=CODES,
        num_audio_codebook=LEVELS,
        audio_codebook_weights=[8, 6, 4, 2],
        llm_config=Qwen3Config(**LLM),
    )
    model = package.OmniVoice(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(seeded_weight(name, tuple(parameter.shape), SEED)))
    model.eval()
    model.text_tokenizer = Characters()
    task = package.GenerationTask(
        batch_size=len(TASKS),
        texts=[task[0] for task in TASKS],
        target_lens=[task[1] for task in TASKS],
        langs=[task[3] for task in TASKS],
        instructs=[task[4] for task in TASKS],
        ref_texts=[task[2][0] if task[2] else None for task in TASKS],
        ref_audio_tokens=[torch.from_numpy(voice_codes(task[2][1])) if task[2] else None for task in TASKS],
        ref_rms=[None for _ in TASKS],
    )
    arrays: dict[str, np.ndarray] = {}
    forward, seen = model.forward, []

    def recording(input_ids: torch.Tensor, **others: Any) -> Any:
        seen.append(input_ids.clone())
        return forward(input_ids=input_ids, **others)

    model.forward = recording
    for name, settings in RUNS.items():
        seen.clear()
        generation = package.OmniVoiceGenerationConfig(**settings)
        draws = (generation.class_temperature > 0) + (generation.position_temperature > 0)
        torch.rand_like = Replayed(len(TASKS), draws) if draws else None
        with torch.inference_mode():
            results = model._generate_iterative(task, generation)
        for request, result in enumerate(results):
            frames = TASKS[request][1]
            inputs = model._prepare_inference_inputs(
                task.texts[request],
                frames,
                task.ref_texts[request],
                task.ref_audio_tokens[request],
                task.langs[request],
                task.instructs[request],
                True,
            )
            length = inputs["input_ids"].shape[-1]
            steps = [each[request, :, length - frames : length] for each in seen[1:]] + [result]
            arrays[f"{name}-{request}-steps"] = torch.stack(steps).numpy().astype(np.int16)
            is_text = ~inputs["audio_mask"][0]
            arrays[f"{name}-{request}-ids"] = inputs["input_ids"][0, 0][is_text].numpy().astype(np.int16)
    return arrays


class Divider:
    """What the package needs to divide texts, in the place of its model; notes the pieces that it would write."""

    _preprocess_all = package.OmniVoice._preprocess_all
    _ensure_list = package.OmniVoice._ensure_list
    _estimate_target_tokens = package.OmniVoice._estimate_target_tokens
    _generate_chunked = package.OmniVoice._generate_chunked

    def __init__(self) -> None:
        self.duration_estimator = RuleDurationEstimator()
        self.audio_tokenizer = types.SimpleNamespace(config=types.SimpleNamespace(frame_rate=25))
        self.pieces: list[list[Any]] = []

    def _generate_iterative(self, task: Any, settings: Any) -> list[torch.Tensor]:
        voices = [None if codes is None else codes.shape[-1] for codes in task.ref_audio_tokens]
        self.pieces += map(list, zip(task.texts, task.target_lens, voices, strict=True))
        return [torch.zeros(LEVELS, frames, dtype=torch.long) for frames in task.target_lens]


def divided() -> list[list[list[Any]]]:
    """Return the text, the frames and the frames of the voice of each piece of each case."""
    found = []
    for text, voice, duration, speed, seconds in DIVIDED:
        divider = Divider()
        prompt = voice and package.VoiceClonePrompt(torch.zeros(LEVELS, voice[1], dtype=torch.long), voice[0], 0.2)
        settings = package.OmniVoiceGenerationConfig(audio_chunk_duration=seconds)
        task = divider._preprocess_all(text, voice_clone_prompt=prompt, duration=duration, speed=speed)
        is_long = bool(task.get_indices(settings, 25)[1])
        (divider._generate_chunked if is_long else divider._generate_iterative)(task, settings)
        found.append(divider.pieces)
    return found


def silences() -> dict[str, list[Any]]:
    """Return what the sounds are without silence."""
    found = {}
    for name in SOUNDS:
        for kind, (between, start, end) in {"speech": (500, 100, 100), "reference": (200, 100, 200)}.items():
            kept = remove_silence(sound(name)[None], RATE, between, start, end)[0]
            found[f"{name}-{kind}"] = described(kept)
    return found


def main() -> None:
    RECORDED.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "texts": texts(),
        "schedules": schedules(),
        "silence": silences(),
        "divided": divided(),
    }.items():
        (RECORDED / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    np.savez_compressed(RECORDED / "unmasking.npz", **unmasking())
    print(f"{RECORDED}: {len(SPOKEN)} texts, {len(SCHEDULES)} schedules, {len(RUNS)} runs, {len(SOUNDS)} sounds")


if __name__ == "__main__":
    main()
