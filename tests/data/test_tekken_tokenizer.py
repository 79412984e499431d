"""Tekken vocabularies: ids as mistral-common gives them, special tokens, and files that are refused."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from tests.data.vocabularies import VOXTRAL_TOKENS, tekken_values, write_byte_pairs, write_tekken

RECORDED = Path(__file__).with_name("recorded_tekken.json")  # by `python -m tests.parity.test_tekken`
TEXTS = (
    "", " ", "\n", "six apples", "Die Mühle 今天", "  spaces  and\nlines ", "emoji 🦆 x", "ﬁ ½",
    "tab\tand \u00a0 space", "12 + 30 = 42.", "a\r\n\r\n b", "def f(x):\n    return x\n", "[INST] a [/INST]",
    "<s>[AUDIO]</s>", "lang:en", "<SPECIAL_20>", "e\u0301 \u202e x \x00", "[SPECIAL", "HTTPServer isn't",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tekken(tmp_path_factory.mktemp("tekken"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_of_texts_are_those_of_mistral_common(tmp_path):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(write_tekken(tmp_path, recorded["tekken"]))
    assert [tokenizer.encode(tokenizer.plain_text(text)) for text in recorded["texts"]] == recorded["ids"]
    assert [tokenizer.decode(ids) for ids in recorded["ids"]] == recorded["texts"]


def test_many_texts_are_encoded_as_few(tokenizer):
    texts = [*TEXTS] * 20
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_special_tokens_have_the_first_ids(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 11, 340)
    assert tokenizer.document_prefix == (1,)
    assert tokenizer.token_id("[AUDIO]") == 24 and tokenizer.token_id("<SPECIAL_20>") == 20
    assert tokenizer.encode("\x00") == [40]
    assert tokenizer.encode("<s>[INST]\x00[/INST]") == [1, 3, 40, 4]


def test_old_files_without_a_list_have_the_default_tokens(tmp_path):
    tokenizer = load_tokenizer(write_tekken(tmp_path, tekken_values("v3")))
    assert tokenizer.control_tokens == {text for number, text in VOXTRAL_TOKENS.items() if number < 20}
    assert tokenizer.token_id("<SPECIAL_39>") == 39


def test_words_of_a_user_are_text(tokenizer):
    for text in TEXTS:
        for guard in (tokenizer.plain_text, tokenizer.answer_text):
            ids = tokenizer.encode(guard(text))
            assert all(number >= 40 for number in ids) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<SPECIAL_20>") == tokenizer.encode(tokenizer.plain_text("<SPECIAL_20>"))


def test_decoding_skips_special_tokens_or_shows_them(tokenizer):
    ids = [1, 3, *tokenizer.encode("six"), 20, 2]
    assert tokenizer.decode(ids) == "six"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[INST]six<SPECIAL_20></s>"
    assert tokenizer.decode([*tokenizer.encode("six"), 340, 10_000]) == "six"  # places of a padded vocabulary
    assert tokenizer.decode([40 + 0xE4, 40 + 0xBB]) == "\ufffd"  # half of a character


def test_the_files_of_a_trained_model_and_the_fingerprint(folder, tokenizer, tmp_path):
    assert [path.name for path in tokenizer.files] == ["tekken.json"]
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    other = write_tekken(tmp_path, tekken_values("v11", VOXTRAL_TOKENS))
    assert load_tokenizer(other).fingerprint != tokenizer.fingerprint


def test_tokenizer_json_wins_where_both_are_there(folder, tiny_tokenizer_json, tmp_path):
    shutil.copy(folder / "tekken.json", tmp_path)
    write = tmp_path / "tokenizer.json"
    write.write_text(tiny_tokenizer_json, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size != 340 and {path.name for path in tokenizer.files} >= {"tekken.json", "tokenizer.json"}


def test_tekken_wins_over_vocab_json(folder, tmp_path):
    write_byte_pairs(tmp_path, "GPT2Tokenizer")
    shutil.copy(folder / "tekken.json", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    assert load_tokenizer(tmp_path).vocab_size == 340


@pytest.fixture(scope="module")
def tiny_tokenizer_json():
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made.add_special_tokens(["</s>"])
    return made.to_str()


# Files that are refused.


def _vocab(values, place, **fields):
    values["vocab"][place] = {**values["vocab"][place], **fields}


DAMAGES = {
    "no config": (lambda values: values.pop("config"), "expected `config`"),
    "vocab is an object": (lambda values: values.update(vocab={}), "`vocab`, a list"),
    "no pattern": (lambda values: values["config"].pop("pattern"), "config.pattern: expected a regular expression"),
    "a broken pattern": (lambda values: values["config"].update(pattern="("), "config.pattern: not a regular"),
    "a pattern with holes": (lambda values: values["config"].update(pattern="[a-z]+"), "leaves out characters"),
    "an empty match": (lambda values: values["config"].update(pattern="a*"), "the tiktoken library broke down"),
    "a size of text": (lambda values: values["config"].update(default_vocab_size="340"), "default_vocab_size"),
    "a true size": (lambda values: values["config"].update(default_vocab_size=True), "default_vocab_size"),
    "a size too large": (lambda values: values["config"].update(default_vocab_size=10**12), "got 1,000,000,000,000"),
    "a size without bytes": (lambda values: values["config"].update(default_vocab_size=100), "256 to"),
    "a huge number of special tokens": (
        lambda values: values["config"].update(default_num_special_tokens=10**12, default_vocab_size=2 * 10**12),
        "more than 100,000",
    ),
    "too few special places": (
        lambda values: values["config"].update(default_num_special_tokens=10, default_vocab_size=300), "40 are more",
    ),
    "no rank": (lambda values: values["vocab"][3].pop("rank"), r"vocab\[3\]: expected `rank`"),
    "an entry that is a text": (lambda values: values["vocab"].__setitem__(3, "a"), r"vocab\[3\]: expected `rank`"),
    "a rank twice": (lambda values: _vocab(values, 5, rank=4), r"vocab\[5\]: expected rank 5, got 4"),
    "bad base64": (lambda values: _vocab(values, 270, token_bytes="a-b!"), r"vocab\[270\]: expected `rank` and"),
    "bytes twice": (lambda values: _vocab(values, 270, token_bytes="AA=="), r"the same bytes as vocab\[0\]"),
    "no bytes": (lambda values: _vocab(values, 270, token_bytes=""), r"vocab\[270\]: token_bytes: no bytes"),
    "another byte": (
        lambda values: _vocab(values, 7, token_bytes=base64.b64encode(b"ab").decode()), "expected the byte 7",
    ),
    "special tokens of a wrong type": (lambda values: values.update(special_tokens={}), "special_tokens: expected a"),
    "a special token without text": (
        lambda values: values["special_tokens"][3].pop("token_str"), r"special_tokens\[3\]",
    ),
    "a special token elsewhere": (lambda values: values["special_tokens"][3].update(rank=9), r"special_tokens\[3\]"),
    "a special token twice": (
        lambda values: values["special_tokens"][30].update(token_str="<s>"), "'<s>' is there twice",
    ),
    "no end": (lambda values: values["special_tokens"][2].update(token_str="x"), "'</s>' is missing"),
    "a new file without a list": (
        lambda values: (values.pop("special_tokens"), values["config"].update(version="v11")), "only files up to v7",
    ),
    "no version and no list": (
        lambda values: (values.pop("special_tokens"), values["config"].pop("version")), "config.version: expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage, tmp_path):
    values = tekken_values(tokens=VOXTRAL_TOKENS)
    change, message = DAMAGES[damage]
    change(values)
    with pytest.raises(ModelFileError, match=message) as raised:
        load_tokenizer(write_tekken(tmp_path, values))
    assert str(raised.value).startswith(str(tmp_path / "tekken.json"))


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"config": 1}', "[" * 100_000, "\udcff"])
def test_a_file_that_is_not_tekken_is_named(content, tmp_path):
    (tmp_path / "tekken.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFileError, match=r"tekken\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ModelFileError, match=r"pip install 'erniekit\[audio\]'"):
        load_tokenizer(folder)


def test_reading_needs_no_numpy(folder):
    program = (
        "import sys\nfrom erniekit.data.tokenizers.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(folder)!r}).encode('six')\n"
        "assert not {'numpy', 'paddle', 'requests'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
