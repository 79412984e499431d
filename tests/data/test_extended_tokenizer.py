"""Tokens that are added to a tokenizer: their ids, where they are read, and what cannot be added."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.templates.ernie import chat_template, encode_sample
from erniekit.data.tokenizers.extend import FACTS_FILE, declared_ids, extend_tokenizer
from erniekit.data.tokenizers.files import TEXT_TOKENS_KEY
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.data import added_token_texts
from tests.data.conftest import write_tokenizer
from tests.data.vocabularies import BEGIN, END, write_sentencepiece, write_tekken
from tests.tiny_runs import ROOT

UNITS = tuple(f"<|unit{number}|>" for number in range(12))
TOKENS = ("<|continue|>", "<|correspond|>", *UNITS)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "tokenizer.json": write_tokenizer,
    "SentencePiece": write_sentencepiece,
    "SentencePiece with a dummy prefix": lambda folder: write_sentencepiece(folder, add_dummy_prefix=True),
}
PIECES = st.lists(
    st.sampled_from(
        [*TOKENS, "six", " apples", "\n", "  ", "今天", "🦆", "<|unit", "12|>", "</s>", "<mask:3>", BEGIN, END]
    )
)
quick = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and the same with TOKENS."""
    root = tmp_path_factory.mktemp("tokenizers")
    folder = WRITERS[request.param](root / "model")
    return load_tokenizer(folder), load_tokenizer(extend_tokenizer(folder, TOKENS, root / "cache").folder)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_new_ids_follow_on_the_largest_one(pair: tuple[Tokenizer, Tokenizer]) -> None:
    before, after = pair
    first = before.vocab_size
    assert [after.token_id(text) for text in TOKENS] == list(range(first, first + len(TOKENS)))
    assert after.vocab_size == first + len(TOKENS)
    assert declared_ids(after.folder) == {text: first + place for place, text in enumerate(TOKENS)}
    assert (after.text_tokens, before.text_tokens) == (frozenset(TOKENS), frozenset())
    assert after.fingerprint != before.fingerprint
    assert after.structural_tokens == before.structural_tokens and after.control_tokens == before.control_tokens


@quick
@given(PIECES)
def test_added_tokens_are_read_in_texts_of_others_and_control_tokens_are_not(
    pair: tuple[Tokenizer, Tokenizer], pieces: list[str]
) -> None:
    before, after = pair
    text = "".join(pieces)
    ids = after.encode(after.plain_text(text))
    added = {after.token_id(token): token for token in TOKENS}
    assert [added[number] for number in ids if number in added] == [piece for piece in pieces if piece in TOKENS]
    controls = {after.token_id(token) for token in after.structural_tokens} - {after.token_id("<unk>")}
    assert not controls.intersection(ids)
    if not set(pieces) & set(TOKENS):
        assert ids == before.encode(before.plain_text(text))
    if "▁" not in text:
        assert after.decode(ids) == text
    assert after.encode(after.answer_text(text)) == ids or "mask" in text  # no special token is added by an answer


def test_an_answer_is_trained_on_added_tokens(pair: tuple[Tokenizer, Tokenizer]) -> None:
    _, after = pair
    turns = (Turn("user", "say <|unit3|>"), Turn("assistant", "<|unit7|><|unit1|> six", True))
    sample = encode_sample(chat_template(after), after, Conversation(turns))
    asked, answered = (after.token_id(f"<|unit{number}|>") for number in (3, 7))
    assert asked in sample.input_ids and answered in sample.labels and asked not in sample.labels


def test_the_same_tokens_again_change_nothing(pair: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    _, after = pair
    again = extend_tokenizer(after.folder, TOKENS, tmp_path)
    assert (again.folder, again.count, again.kept) == (after.folder, 0, len(TOKENS))
    more = extend_tokenizer(after.folder, (*TOKENS[3:], "<|new|>"), tmp_path)
    assert (more.count, more.first) == (1, after.vocab_size)
    assert load_tokenizer(more.folder).text_tokens == {*TOKENS, "<|new|>"}


def test_a_folder_in_the_cache_is_complete_or_written_again(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    first = extend_tokenizer(folder, TOKENS, tmp_path / "cache")
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert extend_tokenizer(folder, TOKENS, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == stamps
    for damage in (
        lambda: (first.folder / "tokenizer.json").write_text("{}"),
        lambda: (first.folder / "tokenizer_config.json").unlink(),
        lambda: (first.folder / FACTS_FILE).unlink(),
        lambda: (first.folder / FACTS_FILE).write_text("[]"),
    ):
        damage()
        assert extend_tokenizer(folder, TOKENS, tmp_path / "cache") == first
        assert load_tokenizer(first.folder).encode("<|unit3|>") == [first.first + 5]
    assert [path.name for path in (tmp_path / "cache/tokenizers").iterdir()] == [first.folder.name]


def test_other_tokens_and_other_files_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    folders = {extend_tokenizer(folder, tokens, tmp_path).folder for tokens in (TOKENS, TOKENS[1:], TOKENS[::-1])}
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert len({*folders, extend_tokenizer(folder, TOKENS, tmp_path).folder}) == 4


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="cannot write the extended tokenizer"):
        extend_tokenizer(write_tokenizer(tmp_path / "model"), TOKENS, tmp_path / "cache")


def test_of_tokens_that_begin_alike_the_longest_is_read(tmp_path: Path) -> None:
    made = extend_tokenizer(write_tokenizer(tmp_path / "model"), ("<u", "<u1", "<u12"), tmp_path)
    tokenizer = load_tokenizer(made.folder)
    assert tokenizer.encode("<u12<u1<u") == [made.first + 2, made.first + 1, made.first]
    assert made.ambiguous == (("<u", "<u1"), ("<u1", "<u12"))
    assert extend_tokenizer(write_tokenizer(tmp_path / "other"), TOKENS, tmp_path).ambiguous == ()


def test_control_tokens_stay_what_they_are(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    made = extend_tokenizer(folder, ("</s>", "<mask:3>"), tmp_path)
    assert (made.folder, made.control, made.count, made.kept) == (folder, ("</s>", "<mask:3>"), 0, 2)


def test_added_tokens_of_others_become_text(tmp_path: Path) -> None:
    """Tokens that another program has added have no structure; the template's keep theirs."""
    folder = write_tokenizer(tmp_path / "model", chat_template="{{ messages }}<tool>")
    library = json.loads((folder / "tokenizer.json").read_text())
    size = load_tokenizer(folder).vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    library["added_tokens"] += [
        {"id": size + place, "content": text, **flags} for place, text in enumerate(("<a>", "<b>", "<tool>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(library))
    before = load_tokenizer(folder)
    assert before.encode(before.plain_text("<b>")) != [size + 1]
    made = extend_tokenizer(folder, ("<b>", "<tool>"), tmp_path)
    assert (made.count, made.kept, made.control) == (0, 2, ("<tool>",)) and made.folder != folder
    after = load_tokenizer(made.folder)
    assert (after.vocab_size, after.text_tokens) == (size + 3, {"<b>"})
    assert after.encode(after.plain_text("<b>")) == [size + 1]
    assert size + 2 not in after.encode(after.plain_text("<tool><a>"))


@pytest.mark.parametrize("declared", [["</s>", "<mask:1>", "<tool>", "no such token"]])
def test_a_folder_cannot_declare_its_control_tokens_to_be_text(tmp_path: Path, declared: list[str]) -> None:
    folder = write_tokenizer(tmp_path / "model", **{TEXT_TOKENS_KEY: declared})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.text_tokens == frozenset() and {"</s>", "<mask:1>"} <= tokenizer.structural_tokens


@pytest.mark.parametrize("declared", ["<a>", [1], {"<a>": 1}])
def test_a_malformed_declaration_is_an_error_of_the_file(tmp_path: Path, declared: object) -> None:
    with pytest.raises(ModelFileError, match=f"{TEXT_TOKENS_KEY}: expected a list of tokens"):
        load_tokenizer(write_tokenizer(tmp_path / "model", **{TEXT_TOKENS_KEY: declared}))


@pytest.mark.parametrize("decoder", [[1], "a", {"x": 1}, {"1": {}}, {"1": None}])
def test_malformed_ids_are_an_error_of_the_file(tmp_path: Path, decoder: object) -> None:
    folder = write_tokenizer(tmp_path / "model", added_tokens_decoder=decoder, **{TEXT_TOKENS_KEY: ["<a>"]})
    with pytest.raises(ModelFileError, match="added_tokens_decoder"):
        declared_ids(folder)
    if not isinstance(decoder, dict):
        with pytest.raises(ModelFileError, match="added_tokens_decoder"):
            extend_tokenizer(folder, TOKENS, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (("User",), "'User' is a word of the tokenizer's vocabulary already"),
        (("<|a|></s>",), "'<|a|></s>' holds '</s>', a control token"),
        (("a<mas",), "'a<mas' ends like '<mask:0>' begins"),
        (("<|\u00e9|>",), "decodes '<|\u00e9|>' to '<|\ufffd|>'"),
        (("hello world",), "'hello world' is written by the model's chat template"),
    ],
)
def test_what_cannot_be_added_is_refused_and_leaves_nothing(
    tmp_path: Path, tokens: tuple[str, ...], reason: str
) -> None:
    folder = write_tokenizer(tmp_path / "model", chat_template="{{ messages }} hello world")
    with pytest.raises(ConfigurationError, match=reason.replace("|", r"\|")):
        extend_tokenizer(folder, ("<|ok|>", *tokens), tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.json")) == []


def test_a_token_that_sentencepiece_never_finds_is_refused(tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    folder = write_sentencepiece(tmp_path / "model", config=config)
    with pytest.raises(ConfigurationError, match="does not find '<a▁b>' in a text"):
        extend_tokenizer(folder, ("<a▁b>",), tmp_path)


def test_user_defined_pieces_keep_their_ids(tmp_path: Path) -> None:
    folder = write_sentencepiece(tmp_path / "model", user_defined_symbols=["<mask:1>", "<unused0>"])
    made = extend_tokenizer(folder, ("<unused0>", "<|new|>"), tmp_path)
    assert (made.count, made.kept, made.first) == (1, 1, 420)
    tokenizer = load_tokenizer(made.folder)
    assert tokenizer.token_id("<unused0>") in tokenizer.encode("a<unused0>b")


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    library = json.loads((folder / "tokenizer.json").read_text())
    words = library["model"]["vocab"]
    last = max(words, key=words.__getitem__)
    words[last] += 10
    (folder / "tokenizer.json").write_text(json.dumps(library))
    with pytest.raises(ModelFileError, match="gaps"):
        extend_tokenizer(folder, TOKENS, tmp_path)


def test_a_tekken_vocabulary_is_refused_and_not_copied(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "tekken")
    with pytest.raises(ModelFileError, match=r"no tokens can be added to a Tekken vocabulary: .* the first ids"):
        extend_tokenizer(folder, TOKENS, tmp_path)
    both = write_tokenizer(tmp_path / "both")
    shutil.copy(folder / "tekken.json", both)
    assert not (extend_tokenizer(both, TOKENS, tmp_path).folder / "tekken.json").exists()


def test_transformers_5_gives_the_same_ids(tmp_path: Path) -> None:
    """Compared with recorded ids; tests/parity/test_extended_tokenizers.py runs transformers 4."""
    extended = extend_tokenizer(ROOT / "examples/models/tiny-ernie", added_token_texts.TOKENS, tmp_path)
    tokenizer, recorded = load_tokenizer(extended.folder), json.loads(added_token_texts.RECORDED.read_text())
    assert [tokenizer.encode(text) for text in added_token_texts.TEXTS] == recorded["ids"]
    assert tokenizer.vocab_size == recorded["size"]
