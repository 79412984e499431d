"""The recorded texts and the ids of the supported families' formats, against transformers' apply_chat_template.

Runs with transformers 4 and 5. `python -m tests.parity.test_published_templates` records anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.published_templates import DIALOGUES, FAMILIES, REFUSED
from tests.data.test_published_templates import RECORDED, answers_of, write_family

pytestmark = pytest.mark.parity

Texts = dict[str, dict[str, dict[str, dict[str, str]]]]


def recorded() -> Texts:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["texts"]


def render(family: str, folder: Path, **options: Any) -> dict[str, Any]:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    cases: dict[str, Any] = {}
    for case, record in DIALOGUES.items():
        if (family, case) in REFUSED:
            continue
        messages, tools = record["messages"], record.get("tools")
        cases[case] = {"before": {}, "with": {}}
        for position in answers_of(case):
            for name, shown, header in (("before", position, True), ("with", position + 1, False)):
                cases[case][name][str(position)] = theirs.apply_chat_template(
                    messages[:shown], tools=tools, add_generation_prompt=header, **{"tokenize": False, **options}
                )
    return cases


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_texts_and_ids_are_those_of_transformers(tmp_path, family):
    folder = write_family(tmp_path, family)
    assert render(family, folder) == recorded()[family]
    ids = render(family, folder, tokenize=True, return_dict=False)
    ours = load_tokenizer(folder)
    for case, names in recorded()[family].items():
        for name, texts in names.items():
            for position, text in texts.items():
                assert ours.encode(text) == list(ids[case][name][position]), (case, name, position)


if __name__ == "__main__":
    texts = {family: render(family, write_family(Path(tempfile.mkdtemp()), family)) for family in FAMILIES}
    content = {"made_with": f"transformers {transformers.__version__}", "texts": texts}
    RECORDED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
