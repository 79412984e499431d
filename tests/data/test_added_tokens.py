from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.tokenizers.files import AddedToken, AddedTokens, added_tokens
from erniekit.errors import ModelFileError

PLAIN = AddedTokens([AddedToken("<a>", 10, special=True), AddedToken("<a><b>", 11), AddedToken("b", 12)])


def shown(parts):
    return [part.content if isinstance(part, AddedToken) else (part,) for part in parts]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["<a>", "<b>", "b", "x", " ", "<", ">"]), max_size=12))
def test_the_parts_of_a_text_make_the_text(pieces):
    text = "".join(pieces)
    parts = PLAIN.split(text)
    assert "".join(part.content if isinstance(part, AddedToken) else part for part in parts) == text
    assert all(parts)


def test_at_one_place_the_longest_token_wins():
    assert shown(PLAIN.split("x<a><b>y<a>b")) == [("x",), "<a><b>", ("y",), "<a>", "b"]
    assert AddedTokens([]).split("x<a>") == ["x<a>"] and AddedTokens([]).split("") == []


def test_a_token_may_swallow_the_white_space_beside_it():
    tokens = AddedTokens([AddedToken("<l>", 1, lstrip=True), AddedToken("<r>", 2, rstrip=True)])
    assert shown(tokens.split("a <l> b <r> c")) == [("a",), "<l>", (" b ",), "<r>", ("c",)]


def test_a_single_word_counts_only_between_spaces():
    tokens = AddedTokens([AddedToken("cat", 1, single_word=True), AddedToken("<s>", 2)])
    assert shown(tokens.split("a cat <s>")) == [("a ",), "cat", (" ",), "<s>"]
    assert shown(tokens.split("<s>concatenate cat")) == ["<s>", ("concatenate ",), "cat"]


def test_encoding_and_decoding_go_around_the_tokens():
    def encode(texts):
        return [[ord(letter) for letter in text] for text in texts]

    def decode(ids):
        return "".join(map(chr, ids))

    assert PLAIN.encode_batch([PLAIN.split("xy<a>z"), PLAIN.split("")], encode) == [[120, 121, 10, 122], []]
    assert PLAIN.decode([120, 10, 122, 12], False, decode) == "x<a>zb"
    assert PLAIN.decode([120, 10, 122, 12], True, decode) == "xzb"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": "a"}},
        {"added_tokens_decoder": {"1": {"special": True}}},
        {"additional_special_tokens": "a"},
        {"eos_token": "absent"},
    ],
)
def test_malformed_tables_are_told(tmp_path, config):
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        added_tokens(tmp_path, config, {"a": 0}.get)


def test_ids_come_from_the_configuration_then_the_file_then_the_vocabulary(tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<b>": 8}))
    settings = {"eos_token": "a", "pad_token": {"content": "<b>", "lstrip": True}}
    found = added_tokens(tmp_path, settings, {"a": 3}.get)
    assert found == {"<b>": AddedToken("<b>", 8, True, lstrip=True), "a": AddedToken("a", 3, True)}
    settings["added_tokens_decoder"] = {"9": {"content": "<b>", "special": False}, "10": {"content": "c"}}
    found = added_tokens(tmp_path, settings, {"a": 3}.get)
    assert found["<b>"] == AddedToken("<b>", 9, True) and found["c"] == AddedToken("c", 10)
