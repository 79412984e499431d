"""The tokens of a segment's text, put together of those of its words, are those of the joined text: for any segment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from erniekit.data.aligned_samples import _joined, _word_tokens
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import DataError
from tests.data.conftest import SENTENCES, write_tokenizer
from tests.data.independent_interleaving import interval
from tests.data.test_interleave import MARKS, UNITS, VOCABULARY, open_aligned, record_of, write_records
from tests.data.vocabularies import write_sentencepiece, write_tekken

WORDS = [*VOCABULARY, "12", "30", "=", "don't", "Fluss.", "é", "I'm", "(sort)"]


def split_like_qwen(folder: Path) -> Path:
    """Byte-level BPE behind the pattern of newer families, in which a space before digits is a token of its own."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    return rewritten(
        folder,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    )


def without_pre_tokenizer(folder: Path) -> Path:
    """BPE over the whole text, with the normalizer of Llama and Mistral: a mark for spaces, and one before the text."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return rewritten(folder, pre_tokenizers.Split("▁", "merged_with_next"), marks)


def across_words(folder: Path) -> Path:
    """BPE whose tokens go across spaces."""
    return rewritten(folder, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def rewritten(folder: Path, split: pre_tokenizers.PreTokenizer, marks: normalizers.Normalizer | None = None) -> Path:
    write_tokenizer(folder)
    library = Library(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = split
    if marks is not None:
        library.normalizer = marks
    special = ["<unk>", "<s>", "</s>", *UNITS, *MARKS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    "write",
    [
        write_tokenizer,
        split_like_qwen,
        without_pre_tokenizer,
        lambda folder: write_sentencepiece(folder, add_dummy_prefix=True),
        lambda folder: write_sentencepiece(folder, add_dummy_prefix=False),
        lambda folder: write_sentencepiece(folder, add_dummy_prefix=True, model_type="unigram", vocab_size=330),
        write_tekken,
    ],
    ids=["GPT-2", "Qwen", "Llama", "SentencePiece", "without prefix", "unigram", "Tekken"],
)
def test_any_run_of_words_is_encoded_as_their_joined_text(write: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model"))
    known = _word_tokens(tokenizer, WORDS)
    runs = [WORDS[start:end] for start, end in combinations(range(len(WORDS) + 1), 2)]
    encoded = tokenizer.encode_batch([" ".join(run) for run in runs])
    assert [_joined([known[word] for word in run]) for run in runs] == encoded


def test_a_tokenizer_that_joins_words_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(across_words(tmp_path / "model"))
    words = ["Winter", "days", "are", "short,", "summer", "days", "are", "long;"]
    grid = [interval(word, number / 2, (number + 1) / 2) for number, word in enumerate(words)]
    path = write_records(tmp_path / "a.jsonl", [record_of(grid, [1] * 200)])
    with pytest.raises(DataError, match=r"a\.jsonl:1: words: expected words that the tokenizer encodes alike"):
        open_aligned(path, tokenizer, tmp_path / "cache")
