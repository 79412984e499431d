"""Losses and gradients of AR and NAR, from our drawn samples, beside torch with sequences of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from erniekit.data.code_reader import CodeReader
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import Sample
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.decoder import Decoder
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.training.objectives.codes import ar_nar_codes
from tests.data.coded_recordings import PROMPT_ROWS, WHOLE_ROWS, WRITTEN_ROW, ar_nar, recordings
from tests.model.tiny_speech import LEVELS, speaking_model, vall_e_config
from tests.parity.vall_e_reference import Learnt, Marks, Reference, Spoken

pytestmark = pytest.mark.parity
MARKS = Marks(10, (11, 12, 13, 14), 15, (17, 18), (19, 20))  # of `ar_nar`
SPACE = 21
LEVEL_FACTORS, LOSS_FACTORS = (1.0, 0.5, 2.0, 0.25), {"text": 0.3, "prompt": 0.5, "response": 2.0, "transcript": 1.0}
RECORDINGS = recordings(4, speakers=2, seed=3, frames=(5, 12))
MATES = (2, 3, 0, 1)  # the other recording of each one's speaker


class Kind(NamedTuple):
    """What a sample is: its task, its level, and where its prompt comes from ("mate", "itself" or nowhere)."""

    task: str
    level: int = 0
    prompt: str = ""


KINDS = {
    "level 0": Kind("tts", 0, "mate"),
    "level 1": Kind("tts", 1, "mate"),
    "level 2, prompted by itself": Kind("tts", 2, "itself"),
    "level 3": Kind("tts", 3, "mate"),
    "level 0 without prompt": Kind("tts", 0),
    "level 3 without prompt": Kind("tts", 3),
    "stt": Kind("stt"),
    "continuation, level 0": Kind("continuation", 0),
    "continuation, level 2": Kind("continuation", 2),
}


def drawn(kind: Kind, index: int, both_ways: bool, one_count: bool) -> Sample:
    """Our sample of a recording; prompts are long enough for whole recordings, so nothing is left to chance."""
    settings = ar_nar(
        tasks=(kind.task,), level_weights=tuple(float(level == kind.level) for level in range(LEVELS)),
        prompt_seconds=(9.0, 9.0), prompt_utterances=1, condition_dropout=0.0, language=1.0,
        prompt_sources=(0.0, 0.0, 1.0) if kind.prompt == "itself" else (1.0, 0.0, 0.0),
        prompt_dropout=float(not kind.prompt), both_ways=both_ways, restarts_positions=not one_count,
    )  # fmt: skip
    return settings.source(RECORDINGS, 0, CodeReader(RECORDINGS)).sample(index, 0)


def learnt(kind: Kind, index: int) -> Learnt:
    """The same for torch, from the texts and codes of the recordings."""
    reader = CodeReader(RECORDINGS)
    text, _, language, _ = (ids.tolist() for ids in reader.texts(index))
    own, mate = (torch.from_numpy(reader.codes(each).astype(np.int64)) for each in (index, MATES[index]))
    if kind.task == "continuation":
        both = [*text, SPACE, *reader.texts(MATES[index])[0].tolist()]
        return Learnt(Spoken(both, own, language, True), mate, kind.level)
    voice = {"": None, "mate": mate, "itself": own}[kind.prompt]
    return Learnt(Spoken(text, voice, language), own, None if kind.task == "stt" else kind.level)


def model_of(folder: Path, **values: Any) -> tuple[Decoder, Reference]:
    config = vall_e_config(llm={"vocab_size": 256}, **values)
    layout = code_layout(config)
    assert (layout.prompts, layout.written, layout.whole) == (PROMPT_ROWS, WRITTEN_ROW, WHOLE_ROWS)
    decoder = speaking_model(config, seed=4)
    save_model_folder(decoder, folder, ())
    return decoder, Reference(folder, MARKS)


def assert_equal(decoder: Decoder, reference: Reference, kinds: Sequence[Kind], rows: list[list[Sample]]) -> None:
    """Compare the loss of a step and all gradients."""
    batch = collate(rows, [[0] * len(row) for row in rows], 0, both_ways=True, levels=LEVELS,
                    arrays=("codes", "code_labels", "code_part"))  # fmt: skip
    objective = ar_nar_codes(LEVEL_FACTORS, (LOSS_FACTORS["text"], LOSS_FACTORS["prompt"], LOSS_FACTORS["response"]))
    ours = objective.loss_for(decoder, [batch])(decoder, batch).loss_sum / objective.units(batch)
    ours.backward()
    sums = [part for number, kind in enumerate(kinds) for part in reference.losses(learnt(kind, number % 4))]
    theirs = torch.zeros(())
    for name, factor in LOSS_FACTORS.items():
        own = [part for part in sums if part.part == name]
        factors = LEVEL_FACTORS if name == "response" else (1.0,) * (LEVELS + 1)
        count = max(1, sum(part.count for part in own))
        theirs = theirs + factor * sum((factors[part.level] * part.loss for part in own), torch.zeros(())) / count
    theirs.backward()
    assert float(ours) == pytest.approx(theirs.item(), rel=1e-5)
    weights = named_weights(decoder)
    assert weights.keys() == reference.weights.keys()
    reached = 0
    for name, weight in weights.items():
        expected = reference.weights[name].grad
        expected = np.zeros(reference.weights[name].shape, np.float32) if expected is None else expected.numpy()
        found = weight.grad.numpy()
        found = found.T if decoder.config.architecture.is_linear(name) else found
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * max(1e-4, np.abs(expected).max()), err_msg=name)
        reached += bool(np.abs(expected).max() > 1e-4)
    assert reached > len(weights) // 2


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("one_count", [True, False])
def test_a_sample_has_the_loss_and_the_gradients_of_torch(
    tmp_path: Path, one_count: bool, both_ways: bool, kind: Kind
) -> None:
    decoder, reference = model_of(tmp_path, unified_position_ids=one_count, noncausal_masks=both_ways)
    assert_equal(decoder, reference, [kind], [[drawn(kind, 0, both_ways, one_count)]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("both_ways", [True, False])
def test_a_step_of_all_of_them_has_the_loss_and_the_gradients_of_torch(
    tmp_path: Path, both_ways: bool, bias: bool
) -> None:
    """Two rows, in which documents that are read causally and both ways are neighbours."""
    decoder, reference = model_of(tmp_path, noncausal_masks=both_ways, classifiers_bias=bias)
    kinds = list(KINDS.values())
    samples = [drawn(kind, number % 4, both_ways, True) for number, kind in enumerate(kinds)]
    assert_equal(decoder, reference, kinds, [samples[:5], samples[5:]])
