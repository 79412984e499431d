"""Which values of a configuration decide what is drawn of recordings as codes, and how samples make steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.build import drawing as build_drawing
from erniekit.build.data import training_plan
from erniekit.build.drawing import code_drawing, interleaving_of, speech_settings_of
from erniekit.build.speech import CodecFacts
from erniekit.config import Config
from erniekit.data.ar_nar_codes import TASKS, ArNarCodes, ArNarDraws
from erniekit.data.drawing import SpokenFacts
from erniekit.data.masked_codes import MaskedCodes, MaskedDraws, draw_choices
from erniekit.data.mixing import Purpose, generator
from erniekit.data.sampler import StepPlan
from erniekit.data.token_cache import TokenArrays
from erniekit.errors import ConfigurationError
from tests.data.coded_recordings import dataset, masked, recordings
from tests.model.tiny_speech import CODES, LEVELS, omnivoice_config, vall_e_config

COUNT, FRAMES = 4000, 400
MakeConfig = Callable[..., Config]


class Tokens:
    """A tokenizer that has every token."""

    folder = Path("tokens")

    def token_id(self, text: str) -> int:
        return 1 + sum(text.encode()) % 1000

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CodecFacts(Path("codec"), LEVELS, CODES, 50.0, 16000)
    monkeypatch.setattr(build_drawing, "codec_of_run", lambda config: facts)


@pytest.fixture
def drawing(make_config: MakeConfig) -> Callable[..., MaskedCodes | ArNarCodes]:
    """How the samples of a run with some parameters are drawn."""

    def make(**values: Any) -> MaskedCodes | ArNarCodes:
        config = make_config(stage="TTS", train_dataset_type="codes", **values)
        model = vall_e_config() if config.speech.tts_objective == "ar_nar" else omnivoice_config()
        return code_drawing(config, model, Tokens())  # type: ignore[arg-type]

    return make


@pytest.fixture
def masked_draws(drawing: Callable[..., MaskedCodes]) -> Callable[..., MaskedDraws]:
    """What is drawn for many recordings that have everything but a noisy prompt."""

    def draw(**values: Any) -> MaskedDraws:
        ones = np.ones(COUNT, np.int32)
        facts = SpokenFacts(ones, ones, ones, ones, FRAMES * ones, -ones, 0 * ones, ones)
        uniform = generator(Purpose.CODE_CHOICES, 1, 0).random((COUNT, 16))
        return draw_choices(uniform, facts, drawing(**values))

    return draw


@pytest.fixture
def ar_nar_draws(drawing: Callable[..., ArNarCodes]) -> Callable[..., ArNarDraws]:
    """What is drawn for many recordings of speakers with five each."""

    def draw(**values: Any) -> ArNarDraws:
        spoken = np.zeros((COUNT, 12), np.int32)
        spoken[:, 0], spoken[:, 2], spoken[:, 4], spoken[:, 5] = 3, 1, FRAMES, -1
        spoken[:, 6] = np.arange(COUNT) // 5
        empty = np.empty(0, np.int32)
        metadata = {"most_similar": [-1] * COUNT}
        arrays = TokenArrays(empty, empty, empty, np.zeros(COUNT, np.int32), metadata, spoken=spoken.ravel())
        settings = drawing(tts_objective="ar_nar", **values)
        return settings.source(arrays, 0, None)._draws(0, COUNT, 0)

    return draw


def close(found: np.ndarray, share: float) -> bool:
    return abs(found.mean() - share) <= 4 * np.sqrt(share * (1 - share) / len(found))


@pytest.mark.proves("tts_objective")
def test_the_objective_decides_how_samples_are_drawn(drawing: Callable[..., Any]) -> None:
    assert isinstance(drawing(), MaskedCodes) and isinstance(drawing(tts_objective="ar_nar"), ArNarCodes)


@pytest.mark.proves("max_seq_len", "seed")
@pytest.mark.parametrize("objective", ["masked", "ar_nar"])
def test_the_longest_sample_and_the_seed_are_those_of_the_run(objective: str, drawing: Callable[..., Any]) -> None:
    found = drawing(tts_objective=objective, max_seq_len=77, seed=5)
    assert (found.max_seq_len, found.seed) == (77, 5)


@pytest.mark.proves("condition_dropout")
@pytest.mark.parametrize("share", [None, 0.0, 0.4])
def test_as_many_samples_as_asked_lack_their_condition(share: Any, masked_draws: Any, ar_nar_draws: Any) -> None:
    values = {} if share is None else {"condition_dropout": share}
    assert close(masked_draws(**values).drop, 0.1 if share is None else share)
    assert close(~ar_nar_draws(**values).has_text, share or 0.0)


@pytest.mark.proves("language_probability")
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_as_many_samples_as_asked_tell_their_language(share: float, masked_draws: Any, ar_nar_draws: Any) -> None:
    assert close(masked_draws(language_probability=share, condition_dropout=0.0).tells_language, share)
    assert close(ar_nar_draws(language_probability=share).tells_language, share)


@pytest.mark.proves("instruct_probability", "only_instruct_probability", "pinyin_probability")
@pytest.mark.parametrize(("told", "only", "pinyin"), [(0.0, 0.0, 0.0), (0.6, 0.25, 0.7), (1.0, 1.0, 1.0)])
def test_as_many_samples_as_asked_have_an_instruct_or_pinyin(
    told: float, only: float, pinyin: float, masked_draws: Any
) -> None:
    draws = masked_draws(
        instruct_probability=told, only_instruct_probability=only, pinyin_probability=pinyin, condition_dropout=0.0,
        code_prompt_ratio="0.1,0.3",
    )  # fmt: skip
    assert close(draws.tells_instruct, told) and close(draws.says_pinyin, pinyin)
    assert not told or close(draws.prompt[draws.tells_instruct] == 0, only)
    assert (draws.prompt[~draws.tells_instruct] > 0).all()


@pytest.mark.proves("code_mask_ratio", "code_prompt_ratio")
@pytest.mark.parametrize(("mask", "prompt"), [("0,1", "0,0.3"), ("0.5,0.5", "0.2,0.25")])
def test_ratios_lie_in_the_ranges_that_are_asked(mask: str, prompt: str, masked_draws: Any) -> None:
    draws = masked_draws(
        code_mask_ratio=mask, code_prompt_ratio=prompt, condition_dropout=0.0, instruct_probability=0.0
    )
    for found, text in ((draws.mask_ratio, mask), (draws.prompt / FRAMES, prompt)):
        low, high = map(float, text.split(","))
        assert low - 1 / FRAMES <= found.min() <= low + 0.01 and high - 0.01 <= found.max() <= high


@pytest.mark.proves("prompt_dropout")
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_as_many_samples_as_asked_lack_a_prompt(share: float, ar_nar_draws: Any) -> None:
    assert close(ar_nar_draws(prompt_dropout=share).prompts.frames.sum(axis=1) == 0, share)


@pytest.mark.proves("tts_tasks")
def test_tasks_are_as_likely_as_they_stand_there(ar_nar_draws: Any) -> None:
    assert (ar_nar_draws().task == TASKS.index("tts")).all()
    task = ar_nar_draws(tts_tasks="tts tts continuation stt").task
    for name, share in (("tts", 0.5), ("continuation", 0.25), ("stt", 0.25)):
        assert close(task == TASKS.index(name), share)


@pytest.mark.proves("prompt_seconds")
@pytest.mark.parametrize(("text", "shortest", "longest"), [("3,6", 150, 299), ("1,1", 50, 50)])
def test_prompts_are_as_long_as_asked(text: str, shortest: int, longest: int, ar_nar_draws: Any) -> None:
    frames = ar_nar_draws(prompt_seconds=text).prompts.frames.sum(axis=1)
    assert (frames.min(), frames.max()) == (shortest, longest)


@pytest.mark.proves("prompt_sources", "prompt_utterances")
def test_prompts_come_from_where_they_are_asked(ar_nar_draws: Any) -> None:
    records = np.arange(COUNT)
    assert (ar_nar_draws().prompts.record[:, 0] != records).all()
    assert (ar_nar_draws(prompt_sources="0,0,1").prompts.record[:, 0] == records).all()
    assert close(ar_nar_draws(prompt_sources="3,0,1").prompts.record[:, 0] == records, 0.25)
    for utterances in (1, 3):
        joined = ar_nar_draws(prompt_seconds="100,100", prompt_utterances=utterances).prompts
        assert (np.count_nonzero(joined.frames, axis=1) == utterances).all()


@pytest.mark.proves("codebook_sampling")
@pytest.mark.parametrize(
    ("asked", "weights"), [("auto", [8, 4, 2, 1]), ("equal", [1, 1, 1, 1]), ("0,1,0,3", [0, 1, 0, 3])]
)
def test_levels_are_as_likely_as_asked(asked: str, weights: list[int], ar_nar_draws: Any) -> None:
    level = ar_nar_draws(codebook_sampling=asked).level
    for number, weight in enumerate(weights):
        assert close(level == number, weight / sum(weights))


@pytest.mark.proves("lora_codebooks")
def test_adapters_train_the_levels_that_they_serve(ar_nar_draws: Any) -> None:
    values = {"lora": True, "continue_training": True}
    assert set(ar_nar_draws(**values).level) == {0, 1, 2, 3}
    assert set(ar_nar_draws(**values, lora_codebooks="0,2").level) == {0, 2}


@pytest.mark.proves("loss_factors")
@pytest.mark.parametrize("factors", ["0,0,1", "0.1,0,1", "0,0.5,1"])
def test_texts_and_prompts_have_targets_where_they_count(factors: str, drawing: Callable[..., Any]) -> None:
    settings, asked = drawing(tts_objective="ar_nar", loss_factors=factors), factors.split(",")
    assert (settings.text_loss, settings.prompt_loss) == (asked[0] != "0", asked[1] != "0")


@pytest.fixture
def plan(make_config: MakeConfig) -> Callable[..., StepPlan]:
    """The plan of a run over 40 recordings of 7 speakers, of whom three have most."""

    def make(**values: Any) -> StepPlan:
        config = make_config(stage="TTS", train_dataset_type="codes", max_seq_len=200, **values)
        data = dataset(masked(), recordings(33, speakers=3), recordings(7, seed=1, speakers=7))
        return training_plan(config, data)

    return make


@pytest.mark.proves("sample_order")
def test_speakers_are_heard_equally_often_where_that_is_asked(plan: Callable[..., StepPlan]) -> None:
    heard = [
        np.bincount(each.dataset.speaker_of[each.packs(0).members]) for each in (plan(), plan(sample_order="speaker"))
    ]
    assert len(set(heard[0].tolist())) > 1 and len(set(heard[1].tolist())) == 1


@pytest.mark.proves("batch_seconds", "max_batch_samples")
def test_micro_batches_hold_the_seconds_that_are_asked(plan: Callable[..., StepPlan]) -> None:
    for seconds in (3.0, 6.0):
        made = plan(batch_seconds=seconds)
        sizes = [len(pack) * made.dataset.milliseconds[pack].max() for pack in made.packs(0)]
        assert 1000 * seconds / 2 < max(sizes) <= 1000 * seconds
    assert max(map(len, plan(batch_seconds=6.0, max_batch_samples=2).packs(0))) == 2


@pytest.mark.proves("curriculum")
def test_the_first_epoch_goes_from_short_to_long_recordings_where_that_is_asked(plan: Callable[..., StepPlan]) -> None:
    for curriculum, sorted_first in (("none", False), ("duration", True)):
        made = plan(curriculum=curriculum, packing=False)
        milliseconds = made.dataset.milliseconds[made.packs(0).members]
        assert bool((np.diff(milliseconds) >= 0).all()) is sorted_first


@pytest.mark.proves("codebook_sampling")
def test_weights_are_as_many_as_the_levels(drawing: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"`codebook_sampling: 2,1`: 2 weights for 4 levels"):
        drawing(tts_objective="ar_nar", codebook_sampling="2,1")


@pytest.mark.proves("condition_dropout")
@pytest.mark.parametrize(("share", "needed"), [(0.9, True), (1.0, False)])
def test_texts_are_needed_where_they_are_read(
    share: float, needed: bool, make_config: MakeConfig, drawing: Callable[..., MaskedCodes]
) -> None:
    config = make_config(stage="TTS", train_dataset_type="codes", condition_dropout=share)
    assert speech_settings_of(config, drawing()).needs_text is needed


def test_interleaving_follows_the_run(make_config: Callable[..., Config]) -> None:
    tokens = {"<|unit0|>": 5, "<|unit1|>": 6, "<|continue|>": 7, "<|correspond|>": 8}
    tokenizer: Any = SimpleNamespace(token_id=tokens.get, bos_id=1, eos_id=2)
    usual = interleaving_of(make_config(stage="PT"), tokenizer)
    assert (usual.tokens.ids, usual.tokens.continue_id, usual.tokens.correspond_id) == ((5, 6), 7, 8)
    assert (usual.seed, usual.max_seq_len, usual.truncates, usual.segment_units) == (42, 128, True, 500)
    told = make_config(stage="PT", seed=7, max_seq_len=64, over_length_policy="drop", interleave_segment_seconds=2)
    other = interleaving_of(told, tokenizer)
    assert (other.seed, other.max_seq_len, other.truncates, other.segment_units) == (7, 64, False, 100)


@pytest.mark.proves("text_frontend")
@pytest.mark.parametrize(("frontend", "space"), [("characters", (32,)), ("phonemes", ())])
def test_texts_are_joined_by_a_space_and_phonemes_by_none(
    frontend: str, space: tuple[int, ...], drawing: Callable[..., Any]
) -> None:
    assert drawing(tts_objective="ar_nar", text_frontend=frontend).space == space
