"""How a side of the speaking benchmark is asked to speak. NumPy only: the peer's environment reads it, too."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from speaking_case import FRAME_RATE, TASKS

Speak = Callable[[tuple[str, ...]], Iterator[tuple[int, np.ndarray]]]  # texts -> number of one, codes [C, T] of a piece


def serve_speech(speak: Speak) -> None:
    """For each line {"task": "one", "clock": "perf_counter"}, speak, and print seconds of it and of the sound, seconds
    to the first piece, and peak MB. Where there is "answers": FILE, the codes of each text go into it."""
    for line in sys.stdin:
        request = json.loads(line)
        texts, clock = TASKS[request["task"]].texts, getattr(time, request["clock"])
        pieces: list[list[np.ndarray]] = [[] for _ in texts]
        start, first = clock(), 0.0
        for number, codes in speak(texts):
            first = first or clock() - start
            pieces[number].append(codes)
        seconds = clock() - start
        joined = [np.concatenate(own, axis=1) for own in pieces]
        if request.get("answers"):
            np.savez(request["answers"], *joined)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        audio = sum(codes.shape[1] for codes in joined) / FRAME_RATE
        figures = {"seconds": seconds, "first": first, "audio": audio, "peak_mb": peak}
        print("\nANSWER " + json.dumps(figures), flush=True)
