"""Stage TTS: whose codes a run reads, which model writes them, and how its samples are drawn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.checks import as_weights_have_it
from erniekit.build.drawing import code_drawing
from erniekit.build.model import open_tokenizer, read_model_config
from erniekit.build.parts import frozen_parts, part_notes
from erniekit.build.speech import codec_of_run, speaking_config, trained_levels
from erniekit.build.speech_tokens import control_tokens_of
from erniekit.config import Config
from erniekit.data.media.codes_folder import CodesFacts, write_facts
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.errors import ConfigurationError, ModelFileError, UserError
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights, save_model_folder
from tests.model.tiny import tiny_config
from tests.model.tiny_speech import omnivoice_config, speaking_model

MakeConfig = Callable[..., Config]
SIZE = 471  # ids of the tokenizer in examples/models/tiny-ernie, whose model has 512 rows


def write_codes(folder: Path, **changes: Any) -> Path:
    """A folder with the `codes.json` of a fitted codec of two levels."""
    folder.mkdir(parents=True)
    facts = {"codec": "codec", "fingerprint": "a" * 8, "sampling_rate": 16_000, "frame_rate": 62.5, "levels": 2}
    write_facts(folder, CodesFacts(**{**facts, "codebook_size": 32, "request": {}, "complete": True, **changes}))
    return folder


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    return write_codes(tmp_path / "codes")


@pytest.fixture
def speech(make_config: MakeConfig, codes: Path) -> MakeConfig:
    def make(**values: Any) -> Config:
        stage = {"stage": "TTS", "train_dataset_path": str(codes), "train_dataset_type": "codes"}
        return make_config(**{**stage, **values})

    return make


def write_codec_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    frames = {"sampling_rate": 16_000, "hop_length": 256}
    values = {"model_type": "residual_kmeans", "levels": 4, "codebook_size": 32, "frames": frames, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_codec_is_the_one_that_made_the_codes(speech: MakeConfig, codes: Path) -> None:
    found = codec_of_run(speech())
    assert found == (codes / "codec", 2, 32, 62.5, 16_000, "a" * 8)
    assert str(found) == f"2 levels of 32, 62.5 frames a second (codec {codes / 'codec'})"


def test_the_codes_of_parts_and_of_an_index_are_found(speech: MakeConfig, tmp_path: Path) -> None:
    write_codes(tmp_path / "parts/part-1-of-2")
    assert codec_of_run(speech(train_dataset_path=str(tmp_path / "parts"))).levels == 2
    index = tmp_path / "parts/part-1-of-2/data.lst"
    index.write_text("")
    assert codec_of_run(speech(train_dataset_path=str(index))).levels == 2


def test_the_codec_of_held_out_codes_is_as_good(speech: MakeConfig, codes: Path, tmp_path: Path) -> None:
    other = tmp_path / "records.jsonl"
    other.write_text("")
    assert codec_of_run(speech(train_dataset_path=str(other), eval_dataset_path=str(codes))).levels == 2
    with pytest.raises(ConfigurationError):
        codec_of_run(speech(train_dataset_path=str(other)))


@pytest.mark.proves("codec")
def test_a_codec_that_is_named_comes_first(speech: MakeConfig, tmp_path: Path, codes: Path) -> None:
    named = write_codec_config(tmp_path / "named")
    found = codec_of_run(speech(codec=str(named)))
    assert (found.folder, found.levels, found.fingerprint) == (named, 2, "")  # as many levels as the codes have
    other = write_codec_config(tmp_path / "other", codebook_size=16)
    with pytest.raises(ConfigurationError, match=r"codes\.json: 32 codes of a level, and the codec in .*other has 16"):
        codec_of_run(speech(codec=str(other)))
    with pytest.raises(UserError, match="2 levels"):
        codec_of_run(speech(codec=str(write_codec_config(tmp_path / "small", levels=1))))


@pytest.mark.proves("codec_levels", "codebook_size")
def test_sizes_that_are_written_are_compared(speech: MakeConfig, tmp_path: Path) -> None:
    assert codec_of_run(speech(codec_levels=2, codebook_size=32)).levels == 2
    with pytest.raises(ConfigurationError, match=r"`codec_levels: 3`, and the codec in .* has 2"):
        codec_of_run(speech(codec_levels=3))
    with pytest.raises(ConfigurationError, match=r"`codebook_size: 31`, and the codec in .* has 32"):
        codec_of_run(speech(codebook_size=31))
    named = str(write_codec_config(tmp_path / "named"))
    assert codec_of_run(speech(train_dataset_path="absent.jsonl", codec=named, codec_levels=3)).levels == 3
    with pytest.raises(ConfigurationError, match=r"codes\.json: 2 levels, and the codec in .*named has 3"):
        codec_of_run(speech(codec=named, codec_levels=3))


def test_sizes_stand_for_a_codec_that_is_not_here_yet(speech: MakeConfig, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "later.jsonl")
    with pytest.raises(ConfigurationError, match=r"no codes\.json beside the data"):
        codec_of_run(speech(train_dataset_path=elsewhere))
    config = speech(train_dataset_path=elsewhere, codec="models/later", codec_levels=8, codebook_size=1024)
    found = codec_of_run(config)
    assert found == (Path("models/later"), 8, 1024, 0, 0, "")
    assert code_layout(read_model_config(config)).levels == 8
    with pytest.raises(ConfigurationError, match="`codec`: models/later is not here yet"):
        code_drawing(config, read_model_config(config), open_tokenizer(config)[0])


def test_the_codec_in_the_folder_of_the_model_is_the_last_choice(
    speech: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    write_codec_config(tmp_path / "model/audio_tokenizer")
    config = speech(train_dataset_path=str(tmp_path / "own.jsonl"), model_name_or_path=str(tmp_path / "model"))
    assert codec_of_run(config).levels == 4


def test_codes_of_several_codecs_are_refused(speech: MakeConfig, codes: Path, tmp_path: Path) -> None:
    other = write_codes(tmp_path / "more", fingerprint="b")
    config = speech(train_dataset_path=f"{codes},{other}", train_dataset_type="codes,codes")
    with pytest.raises(ConfigurationError, match="of different codecs"):
        codec_of_run(config)


@pytest.mark.parametrize(("objective", "kind"), [("masked", "omnivoice"), ("ar_nar", "vall_e")])
def test_a_plain_decoder_is_wrapped(speech: MakeConfig, objective: str, kind: str) -> None:
    config = speech(tts_objective=objective, seed=7)
    model = read_model_config(config)
    layout = code_layout(model)
    assert (layout.kind, layout.levels, layout.codebook_size) == (kind, 2, 32)
    assert model.model_type == f"{kind}:ernie4_5" and model.wrapped is not None and model.wrapped.seed == 7
    assert model.wrapped.config.model_type == "ernie4_5"
    tokenizer, template = open_tokenizer(config)
    assert template is None and tokenizer.token_id("<|text_start|>") is not None
    assert tokenizer.vocab_size == SIZE + (7 if kind == "omnivoice" else 9) <= model.vocab_size


@pytest.mark.proves("audio_codebook_weights")
def test_weights_of_levels_are_those_of_the_run_or_equal(speech: MakeConfig) -> None:
    assert read_model_config(speech()).own["audio_codebook_weights"] == [1, 1]
    assert read_model_config(speech(audio_codebook_weights="3,1")).own["audio_codebook_weights"] == [3, 1]


def test_what_cannot_be_wrapped_is_refused(speech: MakeConfig) -> None:
    with pytest.raises(ConfigurationError, match="the code tables are new and adapters would leave them random"):
        read_model_config(speech(lora=True, continue_training=True))
    config = speech()
    with pytest.raises(ModelFileError, match=r"as the decoder of omnivoice cannot be used:\n.*is not defined here"):
        speaking_config(tiny_config(model_type="gpt_oss", head_dim=4), config, codec_of_run(config))


@pytest.fixture
def speaker(tiny_model: Path, tmp_path: Path) -> Path:
    """The folder of a model that writes codes already."""
    files = load_tokenizer(tiny_model).files
    config = omnivoice_config(num_audio_codebook=2, audio_vocab_size=33, audio_mask_id=32, audio_codebook_weights=None,
                              llm={"vocab_size": 512})  # fmt: skip
    save_model_folder(speaking_model(config), tmp_path / "speaker", files)
    return tmp_path / "speaker"


def test_a_model_that_writes_codes_is_taken_as_it_is(speech: MakeConfig, speaker: Path, codes: Path) -> None:
    config = speech(model_name_or_path=str(speaker), continue_training=True)
    model = read_model_config(config)
    assert model.wrapped is None and code_layout(model).levels == 2
    found = named_weights(build_model(as_weights_have_it(model, speaker), speaker))
    assert found["audio_heads.weight"].shape == [66, 16]


@pytest.mark.proves("tts_objective")
def test_the_objective_fits_the_family(speech: MakeConfig, speaker: Path) -> None:
    with pytest.raises(ConfigurationError, match="`tts_objective: ar_nar` trains models of the family vall_e"):
        read_model_config(speech(model_name_or_path=str(speaker), tts_objective="ar_nar"))


def test_the_codec_fits_the_model(speech: MakeConfig, speaker: Path, tmp_path: Path) -> None:
    more = write_codes(tmp_path / "more", levels=3)
    with pytest.raises(ConfigurationError, match=r"the model writes 2 levels of 32 codes, and the codec in .* has 3"):
        read_model_config(speech(model_name_or_path=str(speaker), train_dataset_path=str(more)))


def test_a_checkpoint_holds_the_codes_of_a_wrapped_model(speech: MakeConfig, speaker: Path, tiny_model: Path) -> None:
    model = read_model_config(speech())
    assert as_weights_have_it(model, tiny_model).wrapped is not None
    assert as_weights_have_it(model, speaker).wrapped is None


def test_masked_samples_are_drawn_with_the_tokens_of_the_run(speech: MakeConfig) -> None:
    config = speech(code_mask_ratio="0.2,0.9", max_seq_len=100)
    drawing = code_drawing(config, read_model_config(config), open_tokenizer(config)[0])
    assert (drawing.levels, drawing.codebook_size, drawing.mask_id, drawing.frame_rate) == (2, 32, 32, 62.5)
    assert drawing.mask_ratio == (0.2, 0.9) and drawing.max_seq_len == 100
    assert list(drawing.tokens[:7]) == [(SIZE + number,) for number in range(7)]


def test_samples_of_levels_are_drawn_with_the_rows_of_the_model(speech: MakeConfig) -> None:
    config = speech(tts_objective="ar_nar", tts_tasks="tts stt")
    model = read_model_config(config)
    drawing, layout = code_drawing(config, model, open_tokenizer(config)[0]), code_layout(model)
    assert drawing.tasks == ("tts", "stt") and drawing.level_weights == pytest.approx((2 / 3, 1 / 3))
    assert (drawing.prompt_rows, drawing.written_row, drawing.whole_rows) == ((0, 32), 64, (97,))
    assert layout.rows == 129
    assert len({drawing.separator, *drawing.level_ids, *drawing.text_ends, *drawing.language_ends}) == 7


@pytest.mark.proves("lora_codebooks", "codebook_sampling")
def test_adapters_of_levels_train_no_other(speech: MakeConfig) -> None:
    def weights(**values: Any) -> tuple[float, ...]:
        return trained_levels(speech(tts_objective="ar_nar", **values), 3)

    assert weights() == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert weights(codebook_sampling="equal") == pytest.approx((1 / 3,) * 3)
    with_adapters = {"lora": True, "continue_training": True}
    assert weights(**with_adapters, lora_codebooks="0,2") == pytest.approx((0.8, 0, 0.2))
    with pytest.raises(ConfigurationError, match="there is no level 5"):
        weights(**with_adapters, lora_codebooks="5")
    with pytest.raises(ConfigurationError, match="2 weights for 3 levels"):
        weights(codebook_sampling="2,1")
    with pytest.raises(ConfigurationError, match="never draws"):
        weights(**with_adapters, codebook_sampling="1,1,0", lora_codebooks="2")


@pytest.mark.proves("tts_objective")
@pytest.mark.parametrize("levels", [10**12, 0, "2", None])
def test_a_damaged_number_of_levels_makes_no_tokens(speech: MakeConfig, tmp_path: Path, levels: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vall_e", "num_audio_codebook": levels}))
    assert len(control_tokens_of(speech(tts_objective="ar_nar"), tmp_path)) == 7 + 2


def test_tables_of_codes_are_told_and_frozen_as_a_part(speech: MakeConfig) -> None:
    config = speech(freeze_config="freeze_audio")
    model = read_model_config(config)
    assert frozen_parts(config, model) == {"audio"}
    (line,) = part_notes(config, model, None)
    assert line.startswith("trained: decoder (") and "; frozen: code tables (2,112 parameters)" in line
