"""SentencePiece folders: ids of transformers, recorded by tests/parity/test_tokenizers.py, and our own rules."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import Source
from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import ErnieTemplate, chat_template
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ModelFileError
from tests.data.vocabularies import BEGIN, END, ERNIE, MASKS, NAMED, write_sentencepiece

RECORDED = Path(__file__).parent / "recorded_sentencepiece.json"
MODES = ("True-True", "False-True", "False-False")  # legacy, add_prefix_space
CASES = [f"{dummy_prefix}-{mode}" for dummy_prefix in ("without", "with") for mode in MODES]


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sentencepiece(tmp_path_factory.mktemp("spm"))


def copy_with(folder: Path, target: Path, **config: object) -> Path:
    shutil.copytree(folder, target)
    values = json.loads((target / "tokenizer_config.json").read_text())
    merged = {name: value for name, value in {**values, **config}.items() if value is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(merged))
    return target


@pytest.mark.parametrize("name", CASES)
def test_ids_equal_the_recorded_ones_of_transformers(recorded, name, tmp_path):
    case = recorded["cases"][name]
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(recorded["models"][case["model"]]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(case["config"]))
    tokenizer = load_tokenizer(tmp_path)
    for text, ids in zip(recorded["texts"], case["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("dummy_prefix", [False, True])
def test_decoding_is_the_inverse_of_encoding(dummy_prefix, tmp_path_factory):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("spm"), add_dummy_prefix=dummy_prefix))
    alphabet = st.sampled_from(["a", "six", " ", "  ", "\n", "ü", "今", "🦆", END, "</s>", *MASKS[:2]])

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.lists(alphabet, max_size=10))
    def check(parts):
        text = "".join(parts)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text

    check()


def test_a_space_beside_a_control_token_is_kept(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(f"left. {END}") != tokenizer.encode(f"left.{END}")
    assert tokenizer.decode(tokenizer.encode(f"left. {END}")) == "left. "


def test_many_texts_get_the_ids_of_each(folder):
    tokenizer = load_tokenizer(folder)
    texts = [f"{number} apples{END} and {number}" for number in range(1000)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_an_ernie_folder_needs_no_more_than_its_class(folder, tmp_path):
    named = dict.fromkeys([*NAMED, *ERNIE])
    tokenizer = load_tokenizer(copy_with(folder, tmp_path / "a", tokenizer_class="Ernie4_5_Tokenizer", **named))
    ids = [tokenizer.token_id(token) for token in ("<s>", "</s>", "<unk>")]
    assert [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id] == ids == [1, 2, 0]
    assert isinstance(chat_template(tokenizer), ErnieTemplate)
    assert tokenizer.encode(f"{BEGIN}x{END}")[0] == tokenizer.token_id(BEGIN) == 3
    assert tokenizer.find_control_token(f"a {END}") == END
    with pytest.raises(ModelFileError, match="no chat template"):
        chat_template(load_tokenizer(copy_with(folder, tmp_path / "b", **named)))


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "spiece.model"])
def test_the_model_may_have_another_usual_name(folder, tmp_path, name):
    other = copy_with(folder, tmp_path / "other")
    (other / "tokenizer.model").rename(other / name)
    tokenizer = load_tokenizer(other)
    assert tokenizer.encode("six apples") == load_tokenizer(folder).encode("six apples")
    assert [path.name for path in tokenizer.files] == ["tokenizer_config.json", name]


def test_tokens_that_were_added_later_have_ids_behind_the_model(folder, tmp_path):
    added = copy_with(folder, tmp_path / "added", additional_special_tokens=["<tool>"])
    (added / "added_tokens.json").write_text('{"<tool>": 420, "<plain>": 421}')
    tokenizer = load_tokenizer(added)
    assert tokenizer.vocab_size == 422
    assert tokenizer.encode("<tool><plain>") == [420, 421]
    assert tokenizer.decode([420, 421]) == "<plain>"
    assert "<tool>" in tokenizer.control_tokens and "<plain>" not in tokenizer.control_tokens
    (added / "added_tokens.json").unlink()
    with pytest.raises(ModelFileError, match="'<tool>' is neither in the vocabulary nor in added_tokens_decoder"):
        load_tokenizer(added)


def test_ids_that_no_token_has_are_left_out(folder):
    """The embedding of a model may have rows to spare, and a random model answers with them."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("six"), 9999]) == "six"


def test_a_character_of_several_bytes_appears_when_it_is_complete(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("🦆")
    assert len(ids) > 1 and tokenizer.decode(ids) == "🦆"
    assert all("\ufffd" in tokenizer.decode(ids[:count]) for count in range(1, len(ids)))


def test_the_fingerprint_follows_every_file_that_decides_ids(folder, tmp_path):
    first = load_tokenizer(folder).fingerprint
    assert load_tokenizer(copy_with(folder, tmp_path / "same")).fingerprint == first
    others = [copy_with(folder, tmp_path / "legacy", legacy=False), copy_with(folder, tmp_path / "added")]
    (others[1] / "added_tokens.json").write_text('{"<tool>": 420}')
    others.append(write_sentencepiece(tmp_path / "model", add_dummy_prefix=True))
    assert len({first, *(load_tokenizer(other).fingerprint for other in others)}) == 4


def test_the_token_cache_is_built_anew_for_another_model(folder, tmp_path, write_jsonl):
    record = {"src": ["how many apples?"], "tgt": ["six apples are left."]}
    source = Source(write_jsonl([record]), "erniekit", 1.0)

    def ids(model: Path) -> list[int]:
        tokenizer = load_tokenizer(model)
        dataset = open_dataset(
            [source], tokenizer, chat_template(tokenizer), max_seq_len=64, over_length="drop",
            cache_dir=tmp_path / "cache",
        )  # fmt: skip
        return dataset.sample(0).input_ids.tolist()

    other = write_sentencepiece(tmp_path / "other", vocab_size=380)
    first, second = ids(folder), ids(other)
    assert first != second
    assert ids(folder) == first and ids(other) == second


@pytest.mark.parametrize("content", [b"", b"text", b"\x0a\x05"])
def test_a_file_that_is_no_model_is_named(folder, tmp_path, content):
    broken = copy_with(folder, tmp_path / "broken")
    (broken / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"broken/tokenizer\.model: not a SentencePiece model"):
        load_tokenizer(broken)
