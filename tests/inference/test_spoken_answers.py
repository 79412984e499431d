"""Answers in spoken dialogues: a transcript, then the answer to it; and units that are shown as their tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from erniekit.data.conversation import Source
from erniekit.data.templates.ernie import chat_template
from erniekit.data.templates.transcription import Speech
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.inference import engine
from erniekit.inference.answer_eval import _select_eval_prompts
from erniekit.inference.batch import answer_records
from erniekit.inference.engine import ChatModel, trained_speech
from erniekit.inference.prompts import read_prompts
from erniekit.inference.sampling import Sampling
from tests.data.unit_vocabularies import write_unit_tokenizer

SPOKEN = Speech(dialogue_template="spoken")


@pytest.fixture(params=["mistral", "lines", "joined"])
def model(request, tmp_path, monkeypatch):
    """A model that says `said` to the prompts that it gets, which `asked` keeps."""
    tokenizer = load_tokenizer(write_unit_tokenizer(tmp_path / "model", request.param, special=True))
    decoder = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096, vocab_size=1 << 20))
    made = ChatModel(decoder, tokenizer, chat_template(tokenizer, speech=SPOKEN), speech=SPOKEN)
    asked, said = [], []

    def answer(prompts):
        if not prompts:
            return []
        asked.append([list(prompt) for prompt in prompts])
        return [tokenizer.encode(text) for text in said[len(asked) - 1]]

    def answer_requests(decoder, requests, **_):
        return answer([request.prompt for request in requests])

    monkeypatch.setattr(engine, "answer_requests", answer_requests)
    monkeypatch.setattr(engine, "stream", lambda decoder, prompt, *more: iter(answer([prompt])[0]))
    return SimpleNamespace(model=made, asked=asked, said=said, tokenizer=tokenizer)


def prompts(tmp_path, *contents):
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]
    (tmp_path / "ask.jsonl").write_text("\n".join(lines))
    return [prompt.conversation for prompt in read_prompts(tmp_path / "ask.jsonl")]


def test_the_answer_to_a_transcript_follows_it(model, tmp_path):
    unheard, heard = prompts(tmp_path, [{"units": [1, 2]}], [{"units": [1, 2]}, {"text": "how many?"}])
    model.said += [["how many?", "six<|correspond|><|unit3|>"], ["six<|correspond|><|unit3|><|unit4|>"]]
    encoded = [model.model.encode(each) for each in (unheard, heard)]
    answers = model.model.answer_batch(encoded, Sampling(max_new_tokens=50))
    assert model.asked[0] == [each.ids for each in encoded]
    assert model.asked[1] == [encoded[1].ids]  # what the transcript and the header behind it make of the first prompt
    texts = [model.model._units.decode(answer).replace(" ", "") for answer in answers]  # one puts spaces before texts
    assert texts[0] == "howmany?\n###Agent\nsix<|correspond|><|unit3|><|unit4|>"
    assert texts[1] == "six<|correspond|><|unit3|>"


def test_a_stream_goes_on_in_the_same_way(model, tmp_path):
    (unheard,) = prompts(tmp_path, [{"units": [1, 2]}])
    model.said += [["how many?"], ["six<|correspond|><|unit3|>"]]
    pieces = list(model.model.stream(model.model.encode(unheard), Sampling(max_new_tokens=50)))
    assert "### Agent" in "".join(pieces) and "".join(pieces).endswith("six<|correspond|><|unit3|>")
    assert len(model.asked) == 2


def test_a_transcript_that_was_cut_is_the_answer(model, tmp_path):
    (unheard,) = prompts(tmp_path, [{"units": [1, 2]}])
    model.said += [["how many?"]]
    encoded = model.model.encode(unheard)
    length = len(model.tokenizer.encode("how many?"))
    (answer,) = model.model.answer_batch([encoded], Sampling(max_new_tokens=length))
    assert len(model.asked) == 1 and len(answer) == length


def test_prompts_and_references_show_their_units(tmp_path):
    record = {"messages": [{"role": "user", "content": [{"units": [1, 2]}, {"text": "?"}]},
                           {"role": "assistant", "content": [{"text": "six"}, {"units": [3]}]}]}  # fmt: skip
    (tmp_path / "ask.jsonl").write_text(json.dumps(record))
    (prompt,) = read_prompts(tmp_path / "ask.jsonl")
    assert (prompt.text, prompt.reference) == ("<|unit1|><|unit2|>?", "six<|unit3|>")
    dialogue = {"messages": [*record["messages"], {"role": "user", "content": [{"units": [4]}]}, record["messages"][1]]}
    (tmp_path / "ask.jsonl").write_text(json.dumps(dialogue))
    (prompt,) = read_prompts(tmp_path / "ask.jsonl")
    model = SimpleNamespace(speech=Speech("<u{}>"), answer_encoded=lambda *_, **__: ["seven"])
    (written,) = answer_records(model, [prompt], [None], Sampling())
    assert [written[name] for name in ("prompt", "answer", "reference")] == ["<u4>", "seven", "six<u3>"]
    assert [turn["content"] for turn in written["messages"]] == ["<u1><u2>?", "six<u3>", "<u4>"]


def test_a_trained_folder_says_how_its_dialogues_were(tmp_path):
    assert trained_speech(tmp_path) == Speech()
    (tmp_path / "training_config.yaml").write_text("dialogue_template: spoken\nunit_token: <u{}>\n")
    assert trained_speech(tmp_path) == Speech("<u{}>", dialogue_template="spoken")


@pytest.mark.parametrize(("speech", "expected"), [(Speech(), "six<|unit3|>"), (SPOKEN, "six<|correspond|><|unit3|>")])
def test_answers_are_compared_with_what_the_template_trains(tmp_path, speech, expected):
    record = {"messages": [{"role": "user", "content": [{"units": [1, 2]}, {"text": "?"}]},
                           {"role": "assistant", "content": [{"text": "six"}, {"units": [3]}]}]}  # fmt: skip
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    (prompt,) = _select_eval_prompts(Source(tmp_path / "data.jsonl", "messages"), -1, speech)
    assert prompt.expected == expected
