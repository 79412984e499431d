"""Whether a tokenizer belongs to a model: its size, and the token in whose places recordings stand."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.build.tokenizer import check_vocabulary, renders_dialogues
from erniekit.config import Config
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from tests.data.vocabularies import write_tekken
from tests.model.tiny import CONFIG, config_file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tekken(tmp_path_factory.mktemp("tekken")))


def config(model_type: str, vocab_size: int = 340, **changes: object) -> ModelConfig:
    values = config_file({**CONFIG, "model_type": model_type, "vocab_size": vocab_size})
    return ModelConfig.from_json({**values, **changes})


@pytest.mark.parametrize("size", [340, 341, 400])
def test_a_vocabulary_may_be_padded(tokenizer: Tokenizer, size: int) -> None:
    check_vocabulary(config("llama", size), tokenizer)
    check_vocabulary(config("voxtral", size, audio_token_id=24), tokenizer)


def test_a_vocabulary_too_small_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelFileError, match=r"340 tokens but config.json says vocab_size 339"):
        check_vocabulary(config("llama", 339), tokenizer)


@pytest.mark.parametrize("place", [20, 40, 339])
def test_a_placeholder_that_any_text_may_hold_is_refused(tokenizer: Tokenizer, place: int) -> None:
    with pytest.raises(ModelFileError, match=f"token {place} stands for recordings, .* is no special token"):
        check_vocabulary(config("voxtral", audio_token_id=place), tokenizer)
    with pytest.raises(ModelFileError, match=f"token {place} stands for recordings"):
        check_vocabulary(config("qwen2_audio", audio_token_index=place), tokenizer)


@pytest.mark.proves("train_dataset_type", "eval_dataset_type")
def test_ready_tokens_and_units_alone_need_no_chat_template() -> None:
    own: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t", "stage": "SFT"}

    def renders(**values: Any) -> bool:
        return renders_dialogues(Config.from_mapping(own | values))

    assert renders() and renders(train_dataset_type="messages")
    assert not renders(train_dataset_type="token_ids")
    held_out = {"train_dataset_type": "token_ids", "do_eval": True, "eval_dataset_path": "e"}
    assert not renders(**held_out, eval_dataset_type="aligned_units")
    assert renders(**held_out, eval_dataset_type="messages")
