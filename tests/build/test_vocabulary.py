"""The tokens that a run adds: its tokenizer, the rows of its model, its records, and what it goes on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.checks import as_weights_have_it, check_weights
from erniekit.build.data import training_dataset
from erniekit.build.model import open_tokenizer, read_model_config
from erniekit.build.step_count import cache_step_count, cached_step_count
from erniekit.build.vocabulary import refuse_other_tokens, run_tokenizer_folder
from erniekit.config import Config
from erniekit.data.tokenizers.files import TOKENIZER_FILE, read_json
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import CheckpointError, ModelFileError
from erniekit.inference.engine import ChatModel
from tests.log_capture import captured_log

MakeConfig = Callable[..., Config]
SIZE = 471  # ids of the tokenizer in examples/models/tiny-ernie, whose model has 512 rows
UNITS = {"added_tokens": ["<|continue|>"], "added_token_ranges": ["<|unit{0..9}|>"]}


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """Records that hold units, and a control token."""
    records = [{"src": ["<|unit3|> what? </s>"], "tgt": [f"<|unit{number}|><|continue|> six"]} for number in range(6)]
    path = tmp_path / "spoken.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.proves("added_tokens", "added_token_ranges")
def test_the_tokens_of_a_run_are_read_in_its_records(make_config: MakeConfig, spoken: Path) -> None:
    def labels(**values: Any) -> list[int]:
        config = make_config(train_dataset_path=str(spoken), **values)
        dataset = training_dataset(config, *open_tokenizer(config))
        return [int(label) for label in dataset.sample(2).labels if label >= SIZE]

    assert labels() == []
    assert labels(added_tokens=["<|continue|>"]) == [SIZE]
    assert labels(added_token_ranges=["<|unit{0..9}|>"]) == [SIZE + 2]
    assert labels(**UNITS) == [SIZE + 3, SIZE]
    assert labels(added_token_ranges=["<|unit{2..2}|>", "<|unit{0..1}|>"]) == [SIZE]


@pytest.mark.proves("new_token_init", "train_added_tokens")
def test_the_model_is_told_of_its_new_rows(make_config: MakeConfig) -> None:
    def vocabulary(**values: Any) -> Any:
        return read_model_config(make_config(continue_training=True, **values)).vocabulary

    assert vocabulary() is None and vocabulary(added_tokens=["</s>"]) is None
    found = vocabulary(**UNITS)
    assert (found.first, found.count, found.init, found.trained) == (SIZE, 11, "normal", True)
    assert vocabulary(**UNITS, new_token_init="mean").init == "mean"
    assert vocabulary(**UNITS, lora=True).trained
    assert not vocabulary(**UNITS, lora=True, train_added_tokens=False).trained
    assert vocabulary(**UNITS, train_added_tokens=False).trained  # all weights are


def test_a_model_has_rows_for_all_tokens(make_config: MakeConfig) -> None:
    assert read_model_config(make_config(**UNITS)).vocab_size == 512
    assert read_model_config(make_config(added_token_ranges=["<|unit{0..99}|>"])).vocab_size == 576


def test_what_became_of_the_tokens_is_told(make_config: MakeConfig) -> None:
    def told(**values: Any) -> str:
        with captured_log() as lines:
            open_tokenizer(make_config(**values))
        return "\n".join(lines)

    assert told() == ""
    assert told(**UNITS) == f"added tokens: 11 new, ids {SIZE} to {SIZE + 10}"
    assert "1 new, ids 471 to 471; 1 that the tokenizer has already" in told(added_tokens=["</s>", "<|a|>"])
    assert told(added_tokens=["</s>"], lora=True, continue_training=True).startswith(
        "added tokens: 1 that the tokenizer has already, whose rows stay frozen beside adapters"
    )
    assert "'</s>': control tokens of the model stay so" in told(added_tokens=["</s>"])
    assert "'<|u1' begins with '<|u'" in told(added_tokens=["<|u", "<|u1"])


@pytest.fixture
def trained(train: Callable[..., Any], spoken: Path) -> Path:
    return train(train_dataset_path=str(spoken), max_steps=1, **UNITS).output


def test_what_a_run_leaves_knows_its_tokens(trained: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """With and without the parameters; so does what answers with it."""
    wanted = [SIZE + 6, SIZE]
    assert load_tokenizer(trained).encode("<|unit5|><|continue|>") == wanted
    for values in ({}, UNITS):
        config = make_config(model_name_or_path=str(trained), continue_training=True, **values)
        tokenizer, _ = open_tokenizer(config)
        assert tokenizer.encode(tokenizer.plain_text("<|unit5|><|continue|>")) == wanted
        assert tokenizer.folder == trained == run_tokenizer_folder(config, trained)
        assert read_model_config(config).vocabulary is None
    model = ChatModel.load(trained)
    assert model.encode_text("<|unit5|><|continue|>").ids[-2:] == wanted
    more = make_config(model_name_or_path=str(trained), **UNITS | {"added_token_ranges": ["<|unit{0..12}|>"]})
    assert open_tokenizer(more)[0].token_id("<|unit10|>") == SIZE + 11


def test_a_model_with_added_tokens_gets_more(trained: Path, make_config: MakeConfig) -> None:
    """Its files have no rows for the second ones; those of a checkpoint of such a run do."""
    values: dict[str, Any] = {"model_name_or_path": str(trained), "continue_training": True}
    config = make_config(**values, added_token_ranges=["<|unit{0..99}|>"])
    model = read_model_config(config)
    assert model.vocabulary is not None
    assert (model.vocabulary.first, model.vocabulary.count, model.vocab_size) == (SIZE + 11, 90, 576)
    check_weights(model, trained)
    assert as_weights_have_it(model, trained).vocabulary == model.vocabulary
    assert as_weights_have_it(model, run_tokenizer_folder(config, trained)).vocabulary is None


def test_other_tokens_than_those_of_a_checkpoint_are_named(
    trained: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    another = tmp_path_factory.mktemp("another-tokenizer")

    def refused(kind: type[Exception], parameter: str, **values: Any) -> str:
        config = make_config(**values)
        with pytest.raises(kind) as caught:
            refuse_other_tokens(config, Path(config.basic.model_name_or_path), trained, parameter)
        return str(caught.value)

    same = make_config(**UNITS)
    refuse_other_tokens(same, Path(same.basic.model_name_or_path), trained, "resume_from_checkpoint")
    other = refused(CheckpointError, "resume_from_checkpoint", added_token_ranges=["<|unit{0..9}|>"])
    assert "'<|continue|>': token 471 there, no token in this run" in other
    assert "'<|unit0|>': token 472 there, token 471 in this run" in other and "- and 8 more" in other
    assert 'Write added_tokens: ["<|continue|>"] and added_token_ranges: ["<|unit{0..9}|>"], or' in other
    moved = {**UNITS, "model_name_or_path": str(another)}
    library = read_json(Path(same.basic.model_name_or_path) / TOKENIZER_FILE)
    library["model"]["vocab"]["zzq"] = SIZE
    shutil.copytree(same.basic.model_name_or_path, another, dirs_exist_ok=True)
    (another / TOKENIZER_FILE).write_text(json.dumps(library))
    assert "so it is another tokenizer: use the model folder" in refused(ModelFileError, "lora_path", **moved)
    assert "no token in this run" in refused(ModelFileError, "lora_path")
    longer = UNITS | {"added_token_ranges": ["<|unit{0..10}|>"]}
    assert "'<|unit10|>': no token there, token 482" in refused(ModelFileError, "init_from_checkpoint", **longer)


def test_a_checkpoint_without_added_tokens_is_not_resumed_with_some(tiny_base: Path, make_config: MakeConfig) -> None:
    """A model without them may get some; a checkpoint has the rows that it has."""
    config = make_config(**UNITS)
    model = Path(config.basic.model_name_or_path)
    refuse_other_tokens(config, model, tiny_base, "init_from_checkpoint")
    with pytest.raises(CheckpointError, match="no token there, token 471 in this run"):
        refuse_other_tokens(config, model, tiny_base, "resume_from_checkpoint")


@pytest.mark.parametrize("values", [UNITS, {"dialogue_template": "spoken"}, {"unit_token": "<u{}>"}])
def test_the_steps_of_a_run_are_those_with_its_tokens_and_template(make_config: MakeConfig, values: Any) -> None:
    cache_step_count(make_config(), 7)
    assert cached_step_count(make_config()) == 7
    assert cached_step_count(make_config(**values)) is None


@pytest.mark.proves("seed")
def test_the_seed_draws_new_rows(make_config: MakeConfig) -> None:
    config = make_config(added_tokens=["<new>"], seed=17)
    vocabulary = read_model_config(config).vocabulary
    assert vocabulary is not None and vocabulary.seed == 17
