"""vocab.json with merges.txt, through paddlenlp; tests/parity/test_tokenizers.py compares with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.tokenizers.extend import extend_tokenizer
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from tests.data.vocabularies import BYTE_PAIR_TEXTS, write_byte_pairs

pytestmark = pytest.mark.slow  # importing paddlenlp takes seconds


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"])
def test_texts_come_back_and_tokens_have_their_ids(tmp_path, name):
    tokenizer = load_tokenizer(write_byte_pairs(tmp_path, name))
    for text in BYTE_PAIR_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (402, 400, 404)
    assert tokenizer.encode("<|im_start|><tool>") == [401, 403]
    assert tokenizer.decode([401, 403, 9999]) == "<tool>"
    assert tokenizer.control_tokens == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert [path.name for path in tokenizer.files] == ["tokenizer_config.json", "vocab.json", "merges.txt"]


def test_the_class_may_follow_from_the_model(tmp_path):
    folder = write_byte_pairs(tmp_path, "Qwen2Tokenizer")
    expected = load_tokenizer(folder).encode("I'LL 1234 go")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="tokenizer_class is missing"):
        load_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_tokenizer(folder).encode("I'LL 1234 go") == expected


def test_unknown_classes_and_broken_files_are_told(tmp_path):
    folder = write_byte_pairs(tmp_path / "a", "NoSuchTokenizer")
    with pytest.raises(ModelFileError, match="tokenizer_class NoSuchTokenizer: paddlenlp knows no such tokenizer"):
        load_tokenizer(folder)
    folder = write_byte_pairs(tmp_path / "b", "Qwen2Tokenizer")
    (folder / "vocab.json").write_text("[")
    with pytest.raises(ModelFileError, match="paddlenlp's Qwen2Tokenizer cannot load these files"):
        load_tokenizer(folder)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").unlink()
    with pytest.raises(ModelFileError, match="paddlenlp's Qwen2Tokenizer cannot load these files"):
        load_tokenizer(folder)


def test_paddlenlp_is_imported_only_for_such_a_folder_and_says_why(tmp_path, tokenizer_folder):
    folder = write_byte_pairs(tmp_path, "Qwen2Tokenizer")
    program = (
        "import sys; from erniekit.data.tokenizers.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "assert not {'paddle', 'paddlenlp'} & set(sys.modules); load_tokenizer(sys.argv[2])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tokenizer_folder), str(folder)], capture_output=True, text=True, check=True
    )
    assert f"{folder} has no tokenizer.json: importing paddlenlp for its tokenizers" in run.stderr


def test_the_words_it_has_seen_do_not_fill_the_memory(tmp_path, monkeypatch):
    from erniekit.data.tokenizers import paddlenlp

    monkeypatch.setattr(paddlenlp, "MAX_CACHED_WORDS", 50)
    tokenizer = load_tokenizer(write_byte_pairs(tmp_path, "Qwen2Tokenizer"))
    texts = [f"word{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(400)]
    together = [tokenizer.encode(text) for text in texts]
    assert len(tokenizer._backend._tokenizer.cache) <= 51
    assert together == tokenizer.encode_batch(texts)


def test_tokens_are_added(tmp_path: Path) -> None:
    folder = write_byte_pairs(tmp_path / "model", "Qwen2Tokenizer")
    before = load_tokenizer(folder)
    made = extend_tokenizer(folder, ("<|continue|>", "<|unit3|>", "<tool>"), tmp_path)
    after = load_tokenizer(made.folder)
    assert (made.first, made.count, made.kept) == (before.vocab_size, 2, 1)
    text = "six<|unit3|> apples <tool>\n"
    ids = after.encode(after.plain_text(text + "<|im_end|>"))
    assert made.first + 1 in ids and before.token_id("<tool>") in ids and before.token_id("<|im_end|>") not in ids
    assert after.decode(after.encode(text)) == text
