"""Tekken vocabularies against mistral-common, whose package ships two real ones.

`python -m tests.parity.test_tekken` records the ids and the small vocabulary that the plain run checks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mistral_common
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.test_tekken_tokenizer import RECORDED, TEXTS
from tests.data.vocabularies import VOXTRAL_TOKENS, tekken_values, write_tekken

pytestmark = pytest.mark.parity

PUBLISHED = sorted((Path(mistral_common.__file__).parent / "data").glob("tekken_*.json"))
PIECES = st.sampled_from(
    ["[INST]", "</s>", "<SPECIAL_40>", " ", "  ", "\n", "\r\n", "six", "Ä", "ü", "🦆", "1", "'s", "/"]
)
CODE = Path(__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda path: path.stem)
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tekken")
    shutil.copy(request.param, folder / "tekken.json")
    return load_tokenizer(folder), Tekkenizer.from_file(folder / "tekken.json")


def test_names_and_sizes(both):
    ours, theirs = both
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (theirs.n_words, theirs.bos_id, theirs.eos_id)
    assert ours.pad_id == theirs.pad_id
    for number in range(theirs.num_special_tokens):
        assert ours.token_id(theirs.id_to_piece(number)) == number


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=12).map("".join)))
def test_ids_of_any_text(both, text):
    ours, theirs = both
    ids = theirs.encode(text, bos=False, eos=False)
    assert ours.encode(ours.plain_text(text)) == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_ids_of_chosen_texts(both):
    ours, theirs = both
    texts = [*TEXTS, CODE, CODE.upper(), "今天天气很好。" * 50, "\n" * 40 + " " * 300]
    expected = [theirs.encode(text, bos=False, eos=False) for text in texts]
    assert ours.encode_batch([ours.plain_text(text) for text in texts]) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 131071), max_size=20))
def test_decoding_of_any_ids(both, ids):
    ours, theirs = both
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, False) == theirs.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)


if __name__ == "__main__":
    import tempfile

    values = tekken_values(tokens=VOXTRAL_TOKENS)
    with tempfile.TemporaryDirectory() as name:
        reference = Tekkenizer.from_file(write_tekken(Path(name), values) / "tekken.json")
    ids = [reference.encode(text, bos=False, eos=False) for text in TEXTS]
    recorded = {"mistral_common": mistral_common.__version__, "texts": TEXTS, "ids": ids, "tekken": values}
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
