"""The spoken-dialogue template: its ids and labels beside the rules of the published script, and its prompts."""

from __future__ import annotations

import random

import pytest

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Part, Turn
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    TemplateRefusedError,
    assemble,
    chat_template,
    encode_prompt,
    join_segments,
)
from erniekit.data.templates.spoken import SpokenTemplate
from erniekit.data.templates.transcription import Speech
from erniekit.data.tokenizers.extend import extend_tokenizer
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.data.units import Units
from erniekit.errors import ConfigurationError, ModelFileError
from tests.data.unit_vocabularies import UNITS, write_unit_tokenizer

KINDS = ("mistral", "lines", "joined")
WORDS = ("how", "many", "apples", "are", "left", "the", "river", "runs", "fine", "12", "mill.", "what?", "days,")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    cases = [(kind, special) for kind in KINDS for special in (False, True)]
    return {
        (kind, special): load_tokenizer(write_unit_tokenizer(folder / f"{kind}{special}", kind, special=special))
        for kind, special in cases
    }


def spoken(tokenizer, template="usdm"):
    made = chat_template(tokenizer, speech=Speech(dialogue_template=template))
    assert isinstance(made, SpokenTemplate)
    return made


def drawn_rounds(generator, count):
    def units():
        return [generator.randrange(UNITS) for _ in range(generator.randint(1, 12))]

    def text():
        return " ".join(generator.choices(WORDS, k=generator.randint(1, 7)))

    return [(units(), text(), text(), units()) for _ in range(count)]


def record(rounds):
    messages = []
    for heard, transcript, answer, said in rounds:
        messages.append({"role": "user", "content": [{"units": heard}, {"text": transcript}]})
        messages.append({"role": "assistant", "content": [{"text": answer}, {"units": said}]})
    return {"messages": messages}


def conversation(rounds):
    parsed = parse_record(FORMATS["messages"], record(rounds))
    assert isinstance(parsed, Conversation)
    return parsed


def ids_and_targets(template, tokenizer, dialogue):
    segments = template.render(dialogue)
    return join_segments(segments, tokenizer.encode_batch([segment.text for segment in segments]), template)


def published(tokenizer, rounds):
    """Ids and labels by the rules of the published script: one text, whose line ends and marks are counted.

    The answer of turn n stands between line ends 5n+4 and 5n+5, the transcript from mark 2n to line end 5n+3.
    """
    text = (
        "Below is a conversation between the user and the agent. Each turn includes the user's speech and its "
        "corresponding transcript, along with the agent's response text and the corresponding speech.\n"
    )
    for heard, transcript, answer, said in rounds:
        heard, said = ("".join(f"<|unit{unit}|>" for unit in units) for units in (heard, said))
        text += f"\n### User\n{heard}<|correspond|>{transcript}\n### Agent\n{answer}<|correspond|>{said}\n"
    library = tokenizer._backend._library  # with BOS in front, as transformers calls it
    ids = library.encode(text + "</s>").ids
    line_end, mark = library.encode("\n").ids[-1], library.token_to_id("<|correspond|>")
    ends = [place for place, token in enumerate(ids) if token == line_end]
    marks = [place for place, token in enumerate(ids) if token == mark]
    trained = set()
    for number in range(len(rounds)):
        trained |= set(range(ends[5 * number + 4] + 1, ends[5 * number + 5]))
        trained |= set(range(marks[2 * number] + 1, ends[5 * number + 3] + 1))
    return ids, [token if place in trained else IGNORE_INDEX for place, token in enumerate(ids)]


@pytest.mark.proves("dialogue_template")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", ["mistral", "lines"])
def test_ids_and_labels_are_those_of_the_published_script(tokenizers, kind, special):
    tokenizer, generator = tokenizers[kind, special], random.Random(0)
    newline = tokenizer.encode("\n")[-1]
    for count in [1] * 20 + [2, 3, 5]:
        rounds = drawn_rounds(generator, count)
        ids, labels = published(tokenizer, rounds)
        assert ids_and_targets(spoken(tokenizer), tokenizer, conversation(rounds)) == (ids, labels)
        own_ids, own = ids_and_targets(spoken(tokenizer, "spoken"), tokenizer, conversation(rounds))
        differing = [place for place in range(len(ids)) if own[place] != labels[place]]
        assert own_ids == ids and len(differing) == count  # the line ends behind answers, at which generation stops
        assert all(own[place] == ids[place] == newline and labels[place] == IGNORE_INDEX for place in differing)


@pytest.mark.parametrize("template", ["usdm", "spoken"])
def test_parts_are_the_same_where_line_ends_join_other_characters(tokenizers, template):
    tokenizer, generator = tokenizers["joined", False], random.Random(1)
    assert tokenizer.encode("a.\n\n### User\n").count(tokenizer.encode("\n")[-1]) < 3
    for count in (1, 1, 3):
        rounds = drawn_rounds(generator, count)
        ids, targets = ids_and_targets(spoken(tokenizer, template), tokenizer, conversation(rounds))
        said = tokenizer.decode([token for token in targets if token != IGNORE_INDEX], skip_special_tokens=False)
        end = "\n" if template == "spoken" else ""
        expected = [
            f"{transcript}\n{answer}<|correspond|>" + "".join(f"<|unit{unit}|>" for unit in units) + end
            for _, transcript, answer, units in rounds
        ]
        assert said == "".join(expected)
        assert tokenizer.decode(ids, skip_special_tokens=False).count("### Agent") == count


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_what_training_has_before(tokenizers, kind):
    tokenizer = tokenizers[kind, False]
    template = spoken(tokenizer, "spoken")
    dialogue = conversation(drawn_rounds(random.Random(2), 2))
    ids, targets = ids_and_targets(template, tokenizer, dialogue)
    asked = dialogue.turns[:3]
    prompt = encode_prompt(template, tokenizer, Conversation(asked))
    assert ids[: len(prompt)] == prompt and targets[len(prompt)] == ids[len(prompt)]
    heard = Turn(USER, "", units_and_texts=asked[2].units_and_texts[:1])
    unheard = encode_prompt(template, tokenizer, Conversation((*asked[:2], heard)))
    assert ids[: len(unheard)] == unheard == prompt[: len(unheard)]
    newline = tokenizer.encode("\n")[-1]
    transcript = ids[len(unheard) : ids.index(newline, len(unheard))]
    header = template.continuation(unheard, transcript)
    assert [*unheard, *transcript, *header] == prompt
    assert template.continuation(prompt, [5]) == []
    assert newline in template.stop_token_ids and tokenizer.eos_id in template.stop_token_ids


def test_written_units_are_read_in_a_users_message(tokenizers):
    tokenizer = tokenizers["lines", False]
    template = spoken(tokenizer, "spoken")
    parts = (Part(Units((1, 2))), Part("hello"))
    typed = Conversation((Turn(USER, "<|unit1|><|unit2|><|correspond|>hello"),))
    assert (
        template.render(typed)[-1].text
        == template.render(Conversation((Turn(USER, "", units_and_texts=parts),)))[-1].text
    )


def test_the_system_text_is_the_instruction(tokenizers):
    template = spoken(tokenizers["lines", False])
    dialogue = conversation(drawn_rounds(random.Random(3), 1))
    text = template.render(Conversation(dialogue.turns, "Talk."))[-1].text
    assert text.startswith("Talk.\n\n### User\n<|unit")


def test_parts_that_are_not_trained(tokenizers):
    tokenizer = tokenizers["lines", False]
    (heard, transcript, answer, said) = drawn_rounds(random.Random(4), 1)[0]
    messages = record([(heard, transcript, answer, said)])["messages"]
    messages[1]["content"][0]["train"] = False
    dialogue = parse_record(FORMATS["messages"], {"messages": messages})
    _, targets = ids_and_targets(spoken(tokenizer), tokenizer, dialogue)
    kept = tokenizer.decode([token for token in targets if token != IGNORE_INDEX], skip_special_tokens=False)
    assert kept == f"{transcript}\n<|correspond|>" + "".join(f"<|unit{unit}|>" for unit in said)
    segments = spoken(tokenizer).render(dialogue.untrained())
    encoded = tokenizer.encode_batch([segment.text for segment in segments])
    assert not len(assemble(segments, encoded, spoken(tokenizer)).labels)


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([Turn(USER, "hello"), Turn(ASSISTANT, "a", True)], 'not {"units": ...} and its transcript'),
        ([Turn(USER, "<|unit1|>"), Turn(ASSISTANT, "a<|unit1|>", True)], "without the transcript"),
        ([Turn(USER, "a<|unit1|>")], 'not {"units": ...} and its transcript'),
        ([Turn(USER, "<|unit1|>a"), Turn(ASSISTANT, "b", True)], "an answer that is not two parts"),
        ([Turn(USER, "<|unit1|>a\nb"), Turn(ASSISTANT, "b<|unit1|>", True)], "a line break in a text"),
        ([Turn(USER, "<|unit99|>a")], "added_token_ranges: [\"<|unit{0..99}|>\"]"),
        ([Turn(USER, "<|unit1|>a"), Turn(USER, "<|unit1|>a")], "two messages of the user"),
    ],
)  # fmt: skip
def test_other_dialogues_are_refused(tokenizers, turns, says):
    with pytest.raises(TemplateRefusedError) as caught:
        spoken(tokenizers["lines", False]).render(Conversation(tuple(turns)))
    assert says in str(caught.value)


def test_the_mark_has_to_be_a_token(tokenizer):
    with pytest.raises(ModelFileError, match=r'write added_tokens: \["<\|correspond\|>"\]'):
        chat_template(tokenizer, speech=Speech(dialogue_template="spoken"))


def test_an_added_token_that_the_template_writes_is_refused(tokenizer, tmp_path):
    folder = extend_tokenizer(tokenizer.folder, ("conversation between",), tmp_path).folder
    with pytest.raises(ConfigurationError, match="'conversation between' is written by the template of spoken"):
        spoken(load_tokenizer(folder), "spoken")
