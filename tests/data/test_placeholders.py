"""Placeholders of recordings: how many, where, and that nothing else of a sample changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import Conversation, Preference, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.pairs import assemble_pair, render_pair
from erniekit.data.placeholders import Recordings, clips_of, encode_prompt_with_clips, measure
from erniekit.data.templates.ernie import IGNORE_INDEX, TemplateRefusedError, assemble, encode_prompt, encode_sample
from erniekit.errors import DataError
from tests.data.recordings import ListeningTemplate, audio_inputs, clip_of, write_recording

TEXTS = st.text("abc <>mask:0\n", max_size=12)


def placed_in(turn: Turn, lengths: list[int], offsets: list[int], prefix: str) -> tuple[Turn, dict[Clip, int]]:
    clips = [Clip(f"{prefix}{number}.wav") for number in range(len(lengths))]
    places = sorted(min(offset, len(turn.content)) for offset in offsets[: len(clips)])
    found = tuple(ContentClip(place, clip) for place, clip in zip(places, clips, strict=True))
    return replace(turn, clips=found), dict(zip(clips, lengths, strict=True))


@st.composite
def dialogues(draw):
    """A dialogue of one to three rounds, with up to two clips in each question."""
    turns, lengths = [], {}
    for number in range(draw(st.integers(1, 3))):
        question = Turn("user", draw(TEXTS).replace("<", "("))
        own = draw(st.lists(st.integers(1, 10_000), max_size=2))
        offsets = draw(st.lists(st.integers(0, 12), min_size=2, max_size=2))
        turn, measured = placed_in(question, own, offsets, f"{number}-")
        turns += [turn, Turn("assistant", "an answer", draw(st.booleans()) or number == 0)]
        lengths |= measured
    return Conversation(tuple(turns)), lengths


def without_clips(conversation: Conversation) -> Conversation:
    return replace(conversation, turns=tuple(replace(turn, clips=()) for turn in conversation.turns))


def encoded(template, tokenizer, conversation):
    segments = template.render(conversation)
    return segments, tokenizer.encode_batch([segment.text for segment in segments])


@settings(max_examples=60, deadline=None)
@given(dialogues())
def test_a_sample_has_all_placeholders_of_its_clips_and_its_text_as_it_was(tokenizer, drawn):
    conversation, lengths = drawn
    inputs, template = audio_inputs(tokenizer), ListeningTemplate(tokenizer)
    recordings = Recordings(inputs, lengths)
    segments, ids = encoded(template, tokenizer, conversation)
    sample = assemble(segments, recordings.expand(ids, conversation.clips), template)
    sample = recordings.with_clips(sample, conversation.clips)

    # the text: with one placeholder for each clip it is the plain encoding
    plain = assemble(segments, ids, template)
    kept = np.ones(len(sample.input_ids), bool)
    for each in sample.clips:
        assert each.tokens == inputs.clip_tokens(each.length) and each.length == lengths[each.clip]
        own = slice(each.place, each.place + each.tokens)
        assert (sample.input_ids[own] == inputs.placeholder_id).all()
        kept[each.place + 1 : each.place + each.tokens] = False
    assert sample.input_ids[kept].tolist() == plain.input_ids.tolist()
    expected_labels = plain.labels
    at = sample.input_ids != inputs.placeholder_id
    plain_at = plain.input_ids != inputs.placeholder_id
    assert sample.labels[at].tolist() == expected_labels[plain_at].tolist()
    assert (sample.labels != inputs.placeholder_id).all()
    assert (sample.labels[~at] == IGNORE_INDEX).all()
    # every placeholder belongs to a clip, in order
    assert int((~at).sum()) == sum(each.tokens for each in sample.clips)
    assert [each.clip for each in sample.clips] == list(conversation.clips[: len(sample.clips)])
    last_trained = max(number for number, turn in enumerate(conversation.turns) if turn.trained)
    heard = [found.clip for turn in conversation.turns[:last_trained] for found in turn.clips]
    assert [each.clip for each in sample.clips] == heard


@settings(max_examples=30, deadline=None)
@given(dialogues())
def test_text_is_encoded_as_without_an_encoder(tokenizer, drawn):
    conversation = without_clips(drawn[0])
    template = ListeningTemplate(tokenizer)
    segments, ids = encoded(template, tokenizer, conversation)
    listening = Recordings(audio_inputs(tokenizer), {})
    sample = listening.with_clips(assemble(segments, listening.expand(ids, ()), template), ())
    expected = encode_sample(template, tokenizer, conversation)
    assert sample.input_ids.tolist() == expected.input_ids.tolist()
    assert sample.labels.tolist() == expected.labels.tolist() and sample.clips == ()


def heard(question: str, *clips: Clip) -> Turn:
    return Turn("user", question, clips=tuple(ContentClip(len(question), clip) for clip in clips))


ONE, TWO = Clip("one.wav"), Clip("two.wav")


def test_the_clips_of_a_pair_stand_in_its_prompt(tokenizer):
    inputs, template = audio_inputs(tokenizer), ListeningTemplate(tokenizer)
    prompt = Conversation((heard("What is this: ", ONE, TWO),))
    pair = Preference(prompt, (Turn("assistant", "a bell", True),), (Turn("assistant", "a dog", True),))
    recordings = Recordings(inputs, {ONE: 700, TWO: 9000})
    rendered = render_pair(template, pair)
    ids = tokenizer.encode_batch([segment.text for segment in rendered.segments])
    sample, length = assemble_pair(rendered, recordings.expand(ids, clips_of(pair)), template, None)
    sample = recordings.with_clips(sample, clips_of(pair))
    assert [(each.clip, each.tokens) for each in sample.clips] == [(ONE, 2), (TWO, 15)]
    assert sample.clips[1].place == sample.clips[0].place + 2  # one right after the other
    assert sample.clips[1].place + 15 < length
    assert int((sample.input_ids == inputs.placeholder_id).sum()) == 17


@pytest.mark.parametrize(("mark", "count"), [("", 0), ("<mask:0><mask:0>", 2)])
def test_a_template_must_write_one_placeholder_for_each_clip(tokenizer, mark, count):
    template = ListeningTemplate(tokenizer, mark)
    conversation = Conversation((heard("What? ", ONE), Turn("assistant", "a bell", True)))
    _, ids = encoded(template, tokenizer, conversation)
    recordings = Recordings(audio_inputs(tokenizer), {ONE: 700})
    with pytest.raises(TemplateRefusedError, match=f"1 recordings, .* template writes {count} placeholders"):
        recordings.expand(ids, conversation.clips)


def test_a_recording_in_a_trained_answer_is_refused(tokenizer):
    template, recordings = ListeningTemplate(tokenizer), Recordings(audio_inputs(tokenizer), {ONE: 700})
    answer = Turn("assistant", "a bell", True, clips=(ContentClip(0, ONE),))
    conversation = Conversation((Turn("user", "Say it"), answer))
    segments, ids = encoded(template, tokenizer, conversation)
    sample = assemble(segments, recordings.expand(ids, conversation.clips), template)
    with pytest.raises(TemplateRefusedError, match="a recording in a trained answer"):
        recordings.with_clips(sample, conversation.clips)


def test_a_recording_in_an_answer_of_a_pair_is_refused(tokenizer):
    template = ListeningTemplate(tokenizer)
    answers = [(Turn("assistant", text, True), heard("and? ", ONE), Turn("assistant", "b", True)) for text in "ac"]
    pair = Preference(Conversation((Turn("user", "q"),)), *answers)
    segments = render_pair(template, pair).segments
    ids = tokenizer.encode_batch([segment.text for segment in segments])
    with pytest.raises(TemplateRefusedError, match=r"0 recordings, .* template writes 2 placeholders"):
        Recordings(audio_inputs(tokenizer), {ONE: 700}).expand(ids, clips_of(pair))


def test_lengths_are_those_of_the_sound_at_the_models_rate(tokenizer, tmp_path):
    inputs = audio_inputs(tokenizer)
    slow = clip_of(write_recording(tmp_path / "slow.wav", 0.5, rate=8000))
    part = clip_of(write_recording(tmp_path / "long.flac", 1.0), 0.25, 0.5)
    missing = clip_of(tmp_path / "missing.wav")
    measured = measure([slow, part, missing, part], inputs)
    assert (measured[slow], measured[part]) == (8000, 4000)
    assert isinstance(measured[missing], DataError) and len(measured) == 3


def test_a_recording_that_is_too_short_for_a_state_is_told(tokenizer, tmp_path):
    inputs = replace(audio_inputs(tokenizer), tokens_of=lambda frames: frames // 4)
    clip = clip_of(write_recording(tmp_path / "click.wav", 0.02))
    error = measure([clip], inputs)[clip]
    assert isinstance(error, DataError) and "enough sound for a state of the model's encoder, got 20.0 ms" in str(error)


def test_a_prompt_has_the_ids_and_clips_of_training(tokenizer, tmp_path):
    inputs, template = audio_inputs(tokenizer), ListeningTemplate(tokenizer)
    clip = clip_of(write_recording(tmp_path / "one.wav", 0.25))
    dialogue = Conversation((heard("What is this: ", clip), Turn("assistant", "a bell", True)))
    prompt = encode_prompt_with_clips(template, tokenizer, replace(dialogue, turns=dialogue.turns[:1]), inputs)
    recordings = Recordings(inputs, {clip: 4000})
    segments, ids = encoded(template, tokenizer, dialogue)
    sample = assemble(segments, recordings.expand(ids, dialogue.clips), template)
    assert prompt.ids == sample.input_ids[: len(prompt.ids)].tolist()
    assert prompt.clips == recordings.with_clips(sample, dialogue.clips).clips
    assert [each.tokens for each in prompt.clips] == [7]  # 25 frames: 5 states of the window, 2 of the rest


def test_a_prompt_without_recordings_is_the_one_of_text(tokenizer):
    template = ListeningTemplate(tokenizer)
    conversation = Conversation((Turn("user", "How many?"),))
    for inputs in (None, audio_inputs(tokenizer)):
        prompt = encode_prompt_with_clips(template, tokenizer, conversation, inputs)
        assert prompt == (encode_prompt(template, tokenizer, conversation), ())


def test_a_prompt_with_a_recording_needs_an_encoder_and_the_file(tokenizer, tmp_path):
    template = ListeningTemplate(tokenizer)
    conversation = Conversation((heard("What? ", clip_of(tmp_path / "no.wav")),))
    with pytest.raises(DataError, match=r"no\.wav: a recording, but the model .* has no audio encoder"):
        encode_prompt_with_clips(template, tokenizer, conversation, None)
    with pytest.raises(DataError, match=r"no\.wav"):
        encode_prompt_with_clips(template, tokenizer, conversation, audio_inputs(tokenizer))
