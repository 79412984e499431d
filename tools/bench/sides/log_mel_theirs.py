"""transformers' WhisperFeatureExtractor on the sounds that are asked for, in NumPy and in torch; see sides/turns.py."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from transformers.models.whisper import feature_extraction_whisper

torch.set_num_threads(1)


def features(kind: str, mel_bins: int, samples: int, frames: int, calls: int) -> tuple[float, float]:
    """Seconds of a call, and the sum of the features."""
    feature_extraction_whisper.is_torch_available = lambda: kind == "torch"
    extractor = feature_extraction_whisper.WhisperFeatureExtractor(feature_size=mel_bins)
    sound = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    options = {"sampling_rate": 16_000, "max_length": frames * 160, "return_tensors": "np"}
    total = float(extractor(sound, **options)["input_features"].sum(dtype=np.float64))
    started = time.perf_counter()
    for _ in range(calls):
        extractor(sound, **options)
    return (time.perf_counter() - started) / calls, total


for line in sys.stdin:
    seconds, total = features(**json.loads(line))
    print("\nANSWER " + json.dumps({"seconds": seconds, "total": total}), flush=True)
