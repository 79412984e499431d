"""Plain documents and raw prompts begin with the ids of transformers' `tokenizer(text)`."""

from __future__ import annotations

import pytest
import transformers

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.test_document_prefix import ORDERS, write_post_processor

pytestmark = pytest.mark.parity
TEXT = "The river runs\n  past the old mill "


@pytest.mark.parametrize("order", ["BOS", "nothing"])
def test_ids_equal_those_of_transformers(order, tmp_path):
    folder = write_post_processor(tmp_path, ORDERS[order])
    ours, theirs = load_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert [*ours.document_prefix, *ours.encode(TEXT)] == theirs(TEXT)["input_ids"]
