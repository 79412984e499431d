"""A model folder as ERNIE-4.5's Paddle releases have it: a SentencePiece tokenizer and no tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.cli import main
from tests.data.vocabularies import write_sentencepiece


@pytest.fixture(scope="module")
def ernie_folder(tiny_model, tmp_path_factory):
    folder = write_sentencepiece(
        tmp_path_factory.mktemp("ernie"), config={"tokenizer_class": "Ernie4_5_Tokenizer", "pad_token": "<unk>"}
    )
    config = json.loads((tiny_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 448}))
    return folder


def test_it_trains_and_leaves_its_tokenizer_beside_the_model(train, ernie_folder):
    run = train(model_name_or_path=str(ernie_folder), max_steps=8)
    assert run.losses[-1] < run.losses[0]
    for name in ("tokenizer.model", "tokenizer_config.json"):
        assert (run.output / name).read_bytes() == (ernie_folder / name).read_bytes()
    assert not (run.output / "tokenizer.json").exists()
    assert "from the cache" not in run.said
    workers = train(model_name_or_path=str(ernie_folder), max_steps=8, dataloader_num_workers=2)
    assert workers.losses == run.losses


def test_preview_shows_its_tokens(make_config, ernie_folder):
    from erniekit.runners.preview import preview

    shown = preview(make_config(model_name_or_path=str(ernie_folder)), documents=1)
    assert "<|begin_of_sentence|>" in shown and "User:" in shown


def test_generate_and_chat_answer_alike_in_one_piece_and_in_many(train, ernie_folder, capsys):
    from erniekit.data.conversation import USER, Conversation, Turn
    from erniekit.inference.engine import ChatModel
    from erniekit.inference.sampling import Sampling

    output = train(model_name_or_path=str(ernie_folder), max_steps=4).output
    model = ChatModel.load(output)
    sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=3)
    whole = model.answer(["What is 2 + 3?"], sampling)[0]
    tokens = model.encode(Conversation((Turn(USER, "What is 2 + 3?"),), ""))
    assert tokens.ids[0] == model.tokenizer.token_id("<|begin_of_sentence|>")
    pieces = list(model.stream(tokens, sampling))
    assert whole and "".join(pieces) == whole and len(pieces) > 3
    capsys.readouterr()
    assert main(["generate", str(output), "--prompt", "What is 2 + 3?", "--max-new-tokens", "4"]) == 0
    assert model.tokenizer.token_id("<|end_of_sentence|>") not in model.encode_text("a <|end_of_sentence|>").ids


def test_validate_knows_the_steps_until_the_tokenizer_changes(make_config, ernie_folder, tmp_path):
    from erniekit.build.step_count import cached_step_count
    from erniekit.runners.preview import data_summary

    folder = Path(shutil.copytree(ernie_folder, tmp_path / "model"))
    config = make_config(model_name_or_path=str(folder), max_steps=None, num_train_epochs=1)
    data_summary(config)
    assert cached_step_count(config) is not None
    (folder / "added_tokens.json").write_text('{"<tool>": 420}')
    assert cached_step_count(config) is None
