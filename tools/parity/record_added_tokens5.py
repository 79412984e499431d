#!/usr/bin/env python3
"""Record the ids that transformers 5 gives texts with added tokens, for the plain test run.

    .venv-transformers5/bin/python tools/parity/record_added_tokens5.py        part of `make oracle-5`

It opens the tokenizer of examples/models/tiny-ernie with TOKENS of tests/data/added_token_texts.py, as
`extend_tokenizer` writes it. Needs neither Paddle nor torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from erniekit.data.tokenizers.extend import extend_tokenizer  # noqa: E402
from tests.data.added_token_texts import RECORDED, TEXTS, TOKENS  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        extended = extend_tokenizer(ROOT / "examples/models/tiny-ernie", TOKENS, Path(cache))
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(extended.folder))
    values = {
        "transformers": transformers.__version__,
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
        "size": len(tokenizer),
    }
    RECORDED.write_text(json.dumps(values) + "\n", encoding="utf-8")
    print(f"{RECORDED}: {len(TEXTS)} texts, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
