from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.templates.ernie import IGNORE_INDEX, Segment, chat_template, encode_prompt, encode_sample
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from tests.data.conftest import write_tokenizer


def dialogue(*answers: tuple[str, bool], system: str = "") -> Conversation:
    turns: list[Turn] = []
    for number, (answer, trained) in enumerate(answers):
        turns += [Turn("user", f"question {number}"), Turn("assistant", answer, trained)]
    return Conversation(tuple(turns), system)


def test_random_dialogues_have_the_recorded_segments(template):
    recorded = json.loads(Path(__file__).with_name("recorded_ernie_template.json").read_text(encoding="utf-8"))
    for case in recorded["dialogues"]:
        conversation = Conversation(tuple(Turn(*turn) for turn in case["turns"]), case["system"])
        assert [[part.text, part.trained] for part in template.render(conversation)] == case["segments"]


def test_ernie_format_with_system_text(template):
    text = "".join(part.text for part in template.render(dialogue(("a", True), ("b", True), system="Be brief.")))
    assert text == (
        "<|begin_of_sentence|>Be brief.\nUser: question 0\nAssistant: a<|end_of_sentence|>"
        "User: question 1\nAssistant: b<|end_of_sentence|>"
    )


def test_ernie_format_without_system_text(template):
    assert template.render(dialogue(("a", True)))[0].text == "<|begin_of_sentence|>User: question 0\nAssistant: "


def test_answers_are_segments_of_their_own_whether_trained_or_not(template):
    segments = template.render(dialogue(("a", False), ("b", True)))
    assert segments[1] == Segment("a<|end_of_sentence|>", False)
    assert segments[3] == Segment("b<|end_of_sentence|>", True)


def test_labels_are_shifted_and_every_answer_ends_in_eos(template, tokenizer):
    sample = encode_sample(template, tokenizer, dialogue(("six apples", True), ("two", True)))
    end_of_turn = tokenizer.token_id("<|end_of_sentence|>")
    first, second = tokenizer.encode("six apples"), tokenizer.encode("two")
    targets = [int(label) for label in sample.labels if label != IGNORE_INDEX]
    assert targets == [*first, tokenizer.eos_id, *second, tokenizer.eos_id]
    # a label is the token that follows, except that the end of a turn is read as <|end_of_sentence|>
    for position in range(len(sample.labels) - 1):
        if sample.labels[position] == tokenizer.eos_id:
            assert sample.input_ids[position + 1] == end_of_turn
        elif sample.labels[position] != IGNORE_INDEX:
            assert sample.labels[position] == sample.input_ids[position + 1]
    assert sample.labels[-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in sample.input_ids


def test_untrained_turns_have_no_target_not_even_their_end(template, tokenizer):
    sample = encode_sample(template, tokenizer, dialogue(("six apples", False), ("two", True)))
    assert [label for label in sample.labels if label != IGNORE_INDEX] == [*tokenizer.encode("two"), tokenizer.eos_id]


def test_nothing_is_kept_behind_the_last_target(template, tokenizer):
    both = encode_sample(template, tokenizer, dialogue(("six", True), ("two", False)))
    first = encode_sample(template, tokenizer, dialogue(("six", True)))
    assert both.input_ids.tolist() == first.input_ids.tolist()
    assert both.labels.tolist() == first.labels.tolist()


def test_an_answer_that_holds_the_text_of_the_pad_token_keeps_its_targets(template, tokenizer):
    # masking is by position: the id that pads elsewhere is a target here
    segments = [Segment("q", False), Segment("a<unk>b<|end_of_sentence|>", True)]
    from erniekit.data.templates.ernie import assemble

    sample = assemble(segments, tokenizer.encode_batch([part.text for part in segments]), template)
    assert tokenizer.pad_id in sample.labels


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(
        st.tuples(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12)), min_size=1, max_size=4
    ),
    system=st.text(max_size=8),
    labels=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_prompt_is_a_prefix_of_the_training_tokens_whatever_is_trained(template, tokenizer, texts, system, labels):
    labels[len(texts) - 1] = True
    turns: list[Turn] = []
    for (question, answer), trained in zip(texts, labels, strict=False):
        turns += [Turn("user", question), Turn("assistant", answer, trained)]
    sample = encode_sample(template, tokenizer, Conversation(tuple(turns), system))
    for end in range(1, len(turns), 2):
        prompt = encode_prompt(template, tokenizer, Conversation(tuple(turns[:end]), system))
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        answer = tokenizer.encode(turns[end].content)
        assert sample.input_ids[len(prompt) :][: len(answer)].tolist() == answer


def test_generation_stops_at_eos_and_at_the_end_of_a_turn(template, tokenizer):
    assert template.stop_token_ids == (tokenizer.eos_id, tokenizer.token_id("<|end_of_sentence|>"))


def test_a_folder_without_any_template_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path, control_tokens=("<unk>", "<s>", "</s>"))
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja"):
        chat_template(load_tokenizer(folder))


def test_two_questions_in_a_row_have_one_header_of_the_answer(template):
    turns = (Turn("user", "q"), Turn("user", "r"), Turn("assistant", "a", True), Turn("user", "s"), Turn("user", "t"))
    text = "".join(segment.text for segment in template.render(Conversation(turns)))
    assert text == (
        "<|begin_of_sentence|>User: q\nUser: r\nAssistant: a<|end_of_sentence|>User: s\nUser: t\nAssistant: "
    )
