"""Messages with units of speech: how they are read, what templates make of them, and parts that are not trained."""

from __future__ import annotations

import json

import pytest

from erniekit.data.conversation import Conversation, Part
from erniekit.data.formats.problems import MalformedError, NothingToTrainError
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    TemplateRefusedError,
    chat_template,
    encode_prompt,
    join_segments,
)
from erniekit.data.templates.transcription import Speech
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.data.units import Units
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.unit_vocabularies import write_unit_tokenizer
from tests.data.vocabularies import VOXTRAL_TOKENS, tekken_values, write_tekken

JINJA = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def record(user, assistant, **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant, **more}]}


def parsed(user, assistant, **more):
    dialogue = parse_record(FORMATS["messages"], record(user, assistant, **more))
    assert isinstance(dialogue, Conversation)
    return dialogue


def refusal(user, assistant, error=MalformedError):
    with pytest.raises(error) as caught:
        parsed(user, assistant)
    return f"{caught.value.field}: expected {caught.value.expected}, got {caught.value.got}"


def trained_and_all(template, tokenizer, dialogue):
    segments = template.render(dialogue)
    ids, targets = join_segments(segments, tokenizer.encode_batch([part.text for part in segments]), template)
    kept = [token for token in targets if token != IGNORE_INDEX]
    return tokenizer.decode(kept, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def jinja(tmp_path_factory):
    def load(special=False):
        folder = write_unit_tokenizer(tmp_path_factory.mktemp("units"), "lines", special=special)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": JINJA}))
        tokenizer = load_tokenizer(folder)
        return tokenizer, chat_template(tokenizer)

    return load


# Reading


def test_parts_need_no_type():
    user, assistant = parsed([{"units": [1, 2]}, {"text": "a"}, {"text": "b"}], [{"text": "c"}, {"units": "3 4"}]).turns
    assert user.units_and_texts == (Part(Units((1, 2))), Part("ab")) and user.content == "ab"
    assert assistant.units_and_texts == (Part("c"), Part(Units((3, 4)))) and assistant.trained
    typed = parsed([{"type": "units", "units": [1, 2]}, {"type": "text", "text": "ab"}], "c").turns[0]
    assert typed == user
    assert parsed([{"text": "a"}, {"text": "b"}], "c").turns[0] == parsed("ab", "c").turns[0]
    assert user.written() == "<|unit1|><|unit2|>ab" and user.written("[{}]") == "[1][2]ab"


def test_a_recording_without_a_type(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"x")
    made = [
        parse_record(FORMATS["messages"], record([part, {"text": "What?"}], "a"), [str(tmp_path)])
        for part in ({"audio": "a.wav"}, {"type": "audio", "audio": "a.wav"})
    ]
    assert made[0] == made[1] and len(made[0].clips) == 1


def test_an_answer_without_a_trained_part_is_not_trained():
    first = {"role": "assistant", "content": [{"text": "a", "train": False}, {"units": [1], "train": False}]}
    messages = [{"role": "user", "content": "q"}, first, *record("r", "b")["messages"]]
    dialogue = parse_record(FORMATS["messages"], {"messages": messages})
    assert [turn.trained for turn in dialogue.turns] == [False, False, False, True]
    assert "nothing would be trained" in refusal("q", first["content"], NothingToTrainError)


@pytest.mark.parametrize(
    ("user", "assistant", "says"),
    [
        ([{"units": []}], "a", "messages[0].content[0].units: expected at least one unit, got none"),
        ([{"units": [1, -2]}], "a", "messages[0].content[0].units[1]: expected a unit: a whole number from 0, got -2"),
        ([{"units": [True]}], "a", "got True"),
        ([{"units": [1.0]}], "a", "got 1.0"),
        ([{"units": "1 x"}], "a", "got 'x'"),
        ([{"units": [10**10]}], "a", "got 10000000000"),
        ([{"units": {"codes": 1}}], "a", "got {'codes': 1}"),
        ([{"units": [1], "text": "a"}], "a", "messages[0].content[0]: expected one of units, audio and text"),
        ([{"type": "text", "text": "a", "units": [1]}], "a", "got units and text"),
        ([{"type": "units"}], "a", "parts of type text, audio or units"),
        ([{"units": [1], "text": "b"}], "a", "one of units, audio and text in a part, got units and text"),
        ([{"units": [1], "train": False}], "a", "`train` in the assistant's messages only"),
        ("q", [{"text": "a", "train": 2}], "messages[1].content[0].train: expected 0 or 1, got 2"),
        ("q", [{"audio": "a.wav"}], "recordings in messages of the user only"),
    ],
)
def test_what_is_wrong_is_named(user, assistant, says):
    assert says in refusal(user, assistant)


def test_system_texts_and_pairs_take_no_such_parts():
    system = {"role": "system", "content": [{"units": [1]}]}
    with pytest.raises(MalformedError) as caught:
        parse_record(FORMATS["messages"], {"messages": [system, *record("q", "a")["messages"]]})
    assert caught.value.expected == "units in messages of the user and the assistant only"
    pair = {"prompt": "q", "chosen": record("q", [{"text": "a", "train": 0}, {"text": "b"}])["messages"][1:],
            "rejected": record("q", "c")["messages"][1:]}  # fmt: skip
    with pytest.raises(MalformedError) as caught:
        parse_record(FORMATS["messages preferences"], pair)
    assert "answers of a pair without `train`" in caught.value.expected


# Templates


@pytest.mark.parametrize("special", [False, True])
def test_a_jinja_template_gets_the_tokens_of_units(jinja, special):
    tokenizer, template = jinja(special)
    dialogue = parsed([{"text": "say "}, {"units": [1, 19]}], [{"text": "six"}, {"units": [3]}])
    trained, everything = trained_and_all(template, tokenizer, dialogue)
    assert trained == "six<|unit3|></s>"
    assert everything == "<|user|>say <|unit1|><|unit19|></s><|assistant|>six<|unit3|></s>"
    prompt = encode_prompt(template, tokenizer, Conversation(dialogue.turns[:1]))
    assert [tokenizer.token_id(f"<|unit{unit}|>") in prompt for unit in (1, 19, 3)] == [True, True, False]


def test_a_users_text_does_not_become_units_where_these_are_control_tokens(jinja):
    tokenizer, template = jinja(True)
    unit = tokenizer.token_id("<|unit1|>")
    written = encode_prompt(template, tokenizer, Conversation(parsed("<|unit1|>", "a").turns[:1]))
    parts = [{"text": "<|unit1|>"}, {"units": [2]}]
    mixed = encode_prompt(template, tokenizer, Conversation(parsed(parts, "a").turns[:1]))
    assert unit not in written and unit not in mixed and tokenizer.token_id("<|unit2|>") in mixed


PARTS = [{"text": "heard ", "train": False}, {"text": "six"}, {"units": [3], "train": False}, {"units": [4]}]


def test_parts_of_an_answer_are_trained_or_not(jinja):
    tokenizer, template = jinja()
    assert trained_and_all(template, tokenizer, parsed("q", PARTS))[0] == "six<|unit4|></s>"
    untrained_end = trained_and_all(template, tokenizer, parsed("q", PARTS[:3]))
    assert untrained_end == ("six", "<|user|>q</s><|assistant|>heard six<|unit3|></s>")
    read = parsed("q", PARTS)
    dialogue = Conversation((*read.untrained().turns, *parsed("r", "b").turns))
    trained, everything = trained_and_all(template, tokenizer, dialogue)
    assert trained == "b</s>" and "heard six<|unit3|><|unit4|></s>" in everything
    ids = [segment.text for segment in template.render(read)]
    assert [segment.text for segment in template.render(dialogue)][: len(ids)] == ids  # whatever is trained


def test_ernies_template(tmp_path):
    units = tuple(f"<|unit{number}|>" for number in range(5))
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, (*CONTROL_TOKENS, *units)))
    template = chat_template(tokenizer)
    trained, everything = trained_and_all(template, tokenizer, parsed([{"units": [1]}], PARTS))
    assert trained == "six<|unit4|></s>"  # the end of the answer's first part is not that of the turn
    assert everything.endswith("<|unit1|>\nAssistant: heard six<|unit3|><|unit4|><|end_of_sentence|>")


def test_mistrals_template(tmp_path):
    tokens = {6 + number: f"<|unit{number}|>" for number in range(30, 33)}
    values = tekken_values("v3", {**VOXTRAL_TOKENS, **tokens})
    tokenizer = load_tokenizer(write_tekken(tmp_path, values))
    template = chat_template(tokenizer, speech=Speech("<|unit3{}|>"))
    trained, everything = trained_and_all(
        template, tokenizer, parsed([{"units": [1]}, {"text": "?"}], [{"text": "a", "train": 0}, {"units": [2, 0]}])
    )
    assert trained == "<|unit32|><|unit30|></s>" and "[INST]<|unit31|>?[/INST]" in everything


def test_a_unit_without_a_token_is_named_with_the_line_to_write(jinja):
    _, template = jinja()
    dialogue = parsed([{"units": [1, 25]}], "a")
    (refused,) = template.render_many([dialogue])
    assert isinstance(refused, TemplateRefusedError)
    assert (
        'unit 25, for which the tokenizer has no token <|unit25|>: write `added_token_ranges: ["<|unit{0..25}|>"]`'
        in str(refused)
    )


@pytest.mark.proves("unit_token")
def test_another_unit_token_changes_the_samples(jinja):
    tokenizer, template = jinja()
    other = chat_template(tokenizer, speech=Speech("<|unit1{}|>"))
    assert other.fingerprint != template.fingerprint
    assert "<|unit14|>" in other.render(parsed([{"units": [4]}], "a"))[0].text
