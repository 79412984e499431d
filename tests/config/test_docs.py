"""The generated reference and the schema for editors."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from erniekit.config.foreign import FOREIGN_NAMES
from erniekit.config.json_schema import editor_schema
from erniekit.config.reference_docs import GUIDES, example_of, pages
from erniekit.config.registry import ALIASES, PARAMETERS, RULES, SECTIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "parameters"


def test_generated_files_are_fresh() -> None:
    wanted = pages()
    assert {path.name for path in FOLDER.iterdir()} == set(wanted)
    for name, text in wanted.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name} is out of date; run `erniekit docs`"


def test_every_parameter_alias_and_rule_is_documented() -> None:
    text = pages()
    for section in SECTIONS:
        page = text[f"{section.key}.md"]
        for name in section.names:
            assert f"\n## {name}\n" in page
            assert f"({section.key}.md#{name})" in text["index.md"]
        assert all(rule.text in page for rule in section.rules)
    assert sum(len(section.rules) for section in SECTIONS) == len(RULES)


def test_page_tells_everything_declared() -> None:
    page = pages()["distributed.md"]
    entry = page[page.index("## sharding\n") : page.index("## sharding_parallel_degree\n")]
    for line in (
        "| type | string |",
        "| default | `none` |",
        "| choices | `none`, `stage1`, `stage2`, `stage3` |",
        "| used by | train, eval; stages PT, SFT, DPO, KTO, RM, TTS |",
        "| needs | `sharding_parallel_degree` above 1 or `sharding_parallel_degree` -1 |",
        "sharding: stage1",
    ):
        assert line in entry
    assert "| needs | `ignore_save_lr_and_optim` false |" in pages()["checkpoint.md"]
    assert "| bounds | at least 0.0, below 1.0 |" in pages()["basic.md"]


@pytest.fixture(scope="module")
def editor() -> jsonschema.Draft202012Validator:
    schema = json.loads(pages()["erniekit.schema.json"])
    assert schema == editor_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_editor_schema_knows_every_name(editor: jsonschema.Draft202012Validator) -> None:
    read = {name for name, foreign in FOREIGN_NAMES.items() if foreign.read}
    assert set(editor.schema["properties"]) == {*PARAMETERS, *ALIASES, *read}


@pytest.mark.parametrize(
    "line",
    [
        "scale_loss: 2 ** 15",
        "learning_rate: 1e-5",
        "learning_rate: 1.0e-5",
        "pp_seg_method: [0,29,57]",
        "pp_seg_method: layer:Ernie4_5_DecoderLayer|EmptyLayer",
        "amp_custom_white_list: matmul flash_attn",
        "amp_custom_white_list: [matmul]",
        "unified_checkpoint_config: async_save",
        "train_dataset_prob: '0.8,0.2'",
        "report_to: [none]",
        "train_dataset_type: [chatml, alpaca]",
        "train_dataset_prob: 1.0",
        "train_dataset_path: a.jsonl,b.jsonl",
        "evaluation_strategy: no",
        "distributed_dataloader: False",
        "compute_type: wint4/8",
        "batch_size: 4",
        "save_total_limit: null",
        "resume_from_checkpoint: true",
        "weight_quantize_algo: fp8linear",
    ],
)
def test_editor_accepts_what_users_write(editor: jsonschema.Draft202012Validator, line: str) -> None:
    editor.validate(yaml.safe_load(line))


@pytest.mark.parametrize(
    "line",
    [
        "learing_rate: 1",
        "max_steps: many",
        "lora_rank: 0",
        "stage: XYZ",
        "do_eval: 2",
        "compute_type: int3",
        "seed: []",
    ],
)
def test_editor_marks_mistakes(editor: jsonschema.Draft202012Validator, line: str) -> None:
    assert not editor.is_valid(yaml.safe_load(line))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_editor_accepts_every_default_and_example(editor: jsonschema.Draft202012Validator, name: str) -> None:
    parameter = PARAMETERS[name]
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    editor.validate({name: default})
    if parameter.example is not None:
        editor.validate({name: parameter.example})


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "configs").rglob("*.yaml")), ids=lambda file: file.name)
def test_editor_accepts_the_examples(editor: jsonschema.Draft202012Validator, file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    schema = text.splitlines()[0].partition("$schema=")[2]
    assert (file.parent / schema).resolve() == FOLDER / "erniekit.schema.json"
    editor.validate(yaml.safe_load(text))


def test_no_example_repeats_the_default() -> None:
    """Such an example would show nothing."""
    shown = {name: example_of(item) for name, item in PARAMETERS.items()}
    assert [name for name, value in shown.items() if value == PARAMETERS[name].default] == []


def test_guides_exist() -> None:
    assert GUIDES.keys() <= {section.key for section in SECTIONS}
    assert all((ROOT / "docs" / page).is_file() for page in GUIDES.values())
