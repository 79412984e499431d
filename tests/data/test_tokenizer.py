from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from tests.data.conftest import write_tokenizer


def copy_of(folder, target):
    shutil.copytree(folder, target)
    return target


def test_encoding_adds_nothing_and_knows_control_tokens(tokenizer):
    ids = tokenizer.encode("<s>six</s>")
    assert ids[0] == tokenizer.bos_id == tokenizer.token_id("<s>")
    assert ids[-1] == tokenizer.eos_id == tokenizer.token_id("</s>")
    assert tokenizer.encode("six") == ids[1:-1]
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("text", ["six apples", "Die Mühle 今天", " spaces  and\nlines ", "emoji 🦆"])
def test_decoding_returns_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id], skip_special_tokens=False) == text + "</s>"


def test_truncation_and_padding_saved_in_the_file_are_switched_off(tokenizer_folder, tmp_path):
    folder = copy_of(tokenizer_folder, tmp_path / "model")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    plain, own = load_tokenizer(tokenizer_folder), load_tokenizer(folder)
    text = "The river runs past the old mill."
    assert own.encode(text) == plain.encode(text)
    assert own.encode("a") == plain.encode("a")


@pytest.mark.parametrize("pattern", [{"String": ""}, {"Regex": ""}])
def test_a_panic_of_the_library_is_an_error_of_the_file(tmp_path, pattern):
    folder = copy_of(Path(__file__).parents[2] / "examples/models/tiny-ernie", tmp_path / "model")
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "x"}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the tokenizers library broke down"):
        load_tokenizer(folder).encode("h\u00e9llo a b")


def test_ids_of_named_tokens_and_the_size(tokenizer, tokenizer_folder):
    assert tokenizer.pad_id == tokenizer.token_id("<unk>")
    assert tokenizer.token_id("<no-such-token>") is None
    vocabulary = Backend.from_file(str(tokenizer_folder / "tokenizer.json")).get_vocab()
    assert tokenizer.vocab_size == max(vocabulary.values()) + 1


def test_pad_falls_back_to_unk_then_to_eos_and_bos_may_be_missing(tmp_path):
    without_pad = load_tokenizer(write_tokenizer(tmp_path / "a", pad_token=None))
    assert without_pad.pad_id == without_pad.token_id("<unk>")
    bare = load_tokenizer(write_tokenizer(tmp_path / "b", pad_token=None, unk_token=None, bos_token=None))
    assert bare.pad_id == bare.eos_id
    assert bare.bos_id is None


def test_named_tokens_may_be_objects_or_in_the_special_tokens_map(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token=None, bos_token={"content": "<s>", "lstrip": False})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.token_id("<s>"), tokenizer.token_id("</s>"))


def test_control_tokens_are_found_in_text(tokenizer):
    assert tokenizer.find_control_token("2 < 3 and <mask:8> is none") is None
    assert tokenizer.find_control_token("a <mask:7> b </s>") == "<mask:7>"


def test_the_fingerprint_follows_the_vocabulary_and_the_named_tokens(tokenizer_folder, tmp_path):
    same = load_tokenizer(copy_of(tokenizer_folder, tmp_path / "same")).fingerprint
    assert same == load_tokenizer(tokenizer_folder).fingerprint
    other_eos = write_tokenizer(tmp_path / "eos", eos_token="<s>")
    other_words = write_tokenizer(tmp_path / "words", ("<unk>", "<s>", "</s>", "<|begin_of_sentence|>"))
    assert len({same, load_tokenizer(other_eos).fingerprint, load_tokenizer(other_words).fingerprint}) == 3


def test_files_to_copy_beside_a_model(tokenizer_folder):
    names = [path.name for path in load_tokenizer(tokenizer_folder).files]
    assert names == ["tokenizer.json", "tokenizer_config.json"]


def test_errors_name_the_file(tokenizer_folder, tmp_path):
    def failure(folder):
        with pytest.raises(ModelFileError) as caught:
            load_tokenizer(folder)
        return str(caught.value)

    assert failure(tmp_path / "none") == f"{tmp_path}/none: no such model folder"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}/tokenizer.json: No such file" in failure(empty)
    (empty / "tokenizer.model").write_bytes(b"")
    assert failure(empty) == f"{empty}/tokenizer.model: not a SentencePiece model: the file is empty"
    (empty / "tokenizer.json").write_text("{}")
    assert failure(empty).startswith(f"{empty}/tokenizer.json: not a tokenizer that the tokenizers library can read")

    broken = copy_of(tokenizer_folder, tmp_path / "broken")
    config = broken / "tokenizer_config.json"
    config.write_text("{")
    assert failure(broken).startswith(f"{config}: cannot be read as JSON: ")
    config.write_text("[]")
    assert failure(broken) == f"{config}: expected a JSON object, got list"
    config.write_text("{}")
    assert failure(broken) == f"{config}: eos_token is missing; a model without it cannot stop"
    config.write_text('{"eos_token": "<end>"}')
    assert failure(broken) == f"{config}: eos_token is '<end>', which is missing from tokenizer.json"
    config.write_text('{"eos_token": "</s>", "chat_template": 3}')
    assert failure(broken).startswith(f"{config}: chat_template: expected a string, or a list")


def test_where_the_chat_template_comes_from(tmp_path):
    folder = write_tokenizer(
        tmp_path, chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert load_tokenizer(folder).chat_templates == {"tools": "t", "default": "d"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert load_tokenizer(folder).chat_templates == {"default": "j"}
    (folder / "chat_template.jinja").write_text("own")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_templates, tokenizer.template_path) == ({"default": "own"}, folder / "chat_template.jinja")
    assert folder / "chat_template.jinja" in tokenizer.files
