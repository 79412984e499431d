"""Speak with the package `omnivoice`, as its `generate` does up to the sound of the codes."""

from __future__ import annotations

from speaking_side import serve_speech  # isort: skip -- it finds the others
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from speaking_case import FRAME_RATE, SETTINGS

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tools.parity.empty_modules import CUT_SILENCE, READ_SOUND, replace_modules

replace_modules(*READ_SOUND, *CUT_SILENCE)

import torch
from omnivoice.models import omnivoice as package
from omnivoice.utils.duration import RuleDurationEstimator
from transformers import AutoTokenizer


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = package.OmniVoice.from_pretrained(sys.argv[1], train=True).eval()  # no tokenizers: they are set here
    model.text_tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model.audio_tokenizer = SimpleNamespace(config=SimpleNamespace(frame_rate=FRAME_RATE))
    model.duration_estimator = RuleDurationEstimator()
    settings = package.OmniVoiceGenerationConfig(**SETTINGS)

    def speak(texts: tuple[str, ...]) -> Iterator[tuple[int, np.ndarray]]:
        with torch.inference_mode():
            task = model._preprocess_all(list(texts))
            if task.get_indices(settings, FRAME_RATE)[1]:
                found = [torch.cat(pieces, 1) for pieces in model._generate_chunked(task, settings)]
            else:
                found = model._generate_iterative(task, settings)
        yield from ((number, codes.numpy()) for number, codes in enumerate(found))

    serve_speech(speak)


main()
