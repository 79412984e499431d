"""Recordings as codes in a preview: how long each stretch is, and what is predicted of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from erniekit.data.collate import collate
from erniekit.data.dataset import Dataset
from erniekit.data.drawing import Drawing
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.runners.preview import TRAINED, render_batch
from tests.data.coded_recordings import FRAME_RATE, LEVELS, ar_nar, dataset, masked, recordings


class Numbers:
    """A tokenizer whose tokens are their ids."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return "".join(f"<{token}>" for token in ids)


def shown(drawing: Drawing, index: int = 0, **options: bool) -> tuple[str, Dataset]:
    speech = dataset(drawing, recordings(20, rich=False, frames=(50, 51)))
    arrays = drawing.arrays
    batch = collate([[speech.sample(index)]], [[index]], 0, arrays=arrays, both_ways=True, levels=LEVELS)
    return render_batch(batch, Numbers(), speech, **options), speech  # type: ignore[arg-type]


def test_masked_codes_are_counted_behind_what_stays() -> None:
    drawing = masked(mask_ratio=(0.5, 0.5), prompt_ratio=(0.4, 0.4), condition_dropout=0.0, instruct=0.0)
    text, speech = shown(drawing)
    sample = speech.sample(0)
    count = int((sample.arrays["code_labels"] != IGNORE_INDEX).sum())
    lines = text.splitlines()
    assert lines[3] == f"--- document 0: speech-0.jsonl:1, positions 0-{len(sample.input_ids) - 1}, {count} targets"
    ids = "".join(f"<{token}>" for token in sample.input_ids[:-50])
    assert lines[4] == f"{ids}<codes 0.8 s prompt>[[<codes 1.2 s, {count} of {30 * LEVELS} masked>]]"
    assert TRAINED in shown(drawing, color=True)[0]


def test_samples_without_text_are_frames_alone() -> None:
    text, _ = shown(masked(condition_dropout=1.0, mask_ratio=(1.0, 1.0)))
    assert text.splitlines()[4] == f"[[<codes 2.0 s, {50 * LEVELS} of {50 * LEVELS} masked>]]"


def test_the_level_of_a_response_is_told() -> None:
    for level in range(LEVELS):
        weights = tuple(float(number == level) for number in range(LEVELS))
        drawing = ar_nar(
            tasks=("tts",), level_weights=weights, condition_dropout=0.0, prompt_dropout=0.0, prompt_utterances=1,
            prompt_seconds=(0.4, 0.4), text_loss=False, prompt_loss=False,
        )  # fmt: skip
        text, _ = shown(drawing)
        pattern = rf"<17>.*<18><10><1{level + 1}><10><codes 0\.4 s prompt><10>\[\[<codes 2\.0 s, level {level}>\]\]"
        assert re.fullmatch(pattern, text.splitlines()[4])


def test_text_that_is_predicted_is_marked() -> None:
    drawing = ar_nar(tasks=("stt",), language=0.0)
    text, speech = shown(drawing, index=3)
    sample = speech.sample(3)
    said = "".join(f"<{token}>" for token in sample.labels[sample.labels != IGNORE_INDEX])
    seconds = 50 / FRAME_RATE
    assert text.splitlines()[4].replace("]][[", "") == f"<codes {seconds:.1f} s><10><11><10>[[{said}]]"
    assert np.count_nonzero(sample.labels != IGNORE_INDEX) > 4
