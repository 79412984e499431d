"""`erniekit validate` and `erniekit train` give the same verdict on a configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build import preflight as preflights
from erniekit.build.checks import dense_mask_size
from erniekit.build.preflight import preflight
from erniekit.cli import main
from erniekit.config import Config
from erniekit.errors import CheckpointError, UserError
from tests.model.tiny_audio import VOXTRAL
from tests.tiny_runs import ROOT

Change = Callable[[Path], None]


class _BuildingBeginsError(Exception):
    """Raised where a run that passed every check would build its model."""


def _json(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(stored | values))


def _declare(folder: Path) -> None:
    """Say that a run has added a token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    library = json.loads((folder / "tokenizer.json").read_text())
    library["added_tokens"].append({"id": 471, "content": "<|b|>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(library))
    decoder = {"471": {"content": "<|b|>", **flags}}
    _json(folder, "tokenizer_config.json", erniekit_added_tokens=["<|b|>"], added_tokens_decoder=decoder)


def _tie_no_embeddings(folder: Path) -> None:
    _json(folder, tie_word_embeddings=False)


def _listen(folder: Path) -> None:
    """Make the folder that of a model with an audio encoder of 3 heads, without weights."""
    text = {**VOXTRAL["text_config"], "vocab_size": 4096}
    audio = {**VOXTRAL["audio_config"], "hidden_size": 12, "intermediate_size": 24, "num_attention_heads": 3}
    values = {**VOXTRAL, "audio_token_id": 5, "text_config": text, "audio_config": audio}  # a control token
    (folder / "config.json").write_text(json.dumps(values))
    (folder / WEIGHTS).unlink()


WEIGHTS = "model.safetensors"
BASE = {"continue_training": True}
LORA = BASE | {"lora": True}
SIZES = {"codec_levels": 8, "codebook_size": 1024}
TTS = {"stage": "TTS", "train_dataset_path": str(ROOT / "examples/data/codes-train.jsonl")}
ANSWERS = {"stage": "GRPO", "max_completion_len": 8, "num_generations": 2, "per_device_train_batch_size": 2}
SCORED: dict[str, Any] = {"architectures": ["Ernie4_5ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}

# (what is done to a copy of the model folder, parameters, a word of the message; "" where the run begins)
CASES: dict[str, tuple[Change, dict[str, Any], str]] = {
    "random weights": (lambda folder: (folder / WEIGHTS).unlink(), {}, ""),
    "stored weights": (lambda folder: None, BASE, ""),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), BASE, "holds no *.safetensors weights"),
    "units without tokens": (lambda folder: None, {"train_dataset_type": "aligned_units"}, "no token <|unit0|>"),
    "a cut file": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 20), BASE, "not a safetensors file"),
    "weights of another shape": (lambda folder: _json(folder, intermediate_size=64), BASE, "expected [64, 32]"),
    "a weight too few": (_tie_no_embeddings, BASE, "lm_head.weight: missing"),
    "pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), BASE, "are pickled",
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), {}, "config.json: no such file"),
    "an empty config.json": (lambda folder: (folder / "config.json").write_text(""), {}, "config.json"),
    "layers below none": (lambda folder: _json(folder, num_hidden_layers=-1), {}, "num_hidden_layers"),
    "an unknown model": (lambda folder: _json(folder, model_type="ernie4_5_moe_vl"), {}, "is not supported"),
    "a vocabulary too small": (lambda folder: _json(folder, vocab_size=100), {}, "do not belong together"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), {}, "tokenizer"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), {}, "tokenizer"),
    "no end token": (
        lambda folder: (folder / "tokenizer_config.json").write_text("{}"), {}, "eos_token is missing",
    ),
    "a broken chat template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), {}, "chat_template",
    ),
    "a damaged generation_config.json": (
        lambda folder: (folder / "generation_config.json").write_text("["), {}, "generation_config.json",
    ),
    "a half-written model": (
        lambda folder: (folder / ".erniekit-publishing").write_text("{}"), BASE, "half-written",
    ),
    "adapters as the model": (
        lambda folder: _json(folder, "adapter_config.json", base_model_name_or_path="b"), {}, "holds adapters",
    ),
    "too few positions": (lambda folder: _json(folder, max_position_embeddings=64), {}, "max_position_embeddings 64"),
    "prediction layers": (lambda folder: None, {"num_nextn_predict_layers": 1}, "multi-token prediction layers"),
    "more ranks than heads": (lambda folder: None, {"tensor_parallel_degree": 8}, "cannot be divided"),
    "a target without layers": (lambda folder: None, LORA | {"lora_target_modules": "q_prj"}, "names no linear"),
    "a part that is not there": (lambda folder: None, {"freeze_config": "freeze_audio"}, "has no audio encoder"),
    "nothing to train": (lambda folder: None, {"freeze_config": "freeze_llm"}, "leaves nothing to train"),
    "no adapters to train": (lambda folder: None, LORA | {"freeze_config": "freeze_llm"}, "leaves nothing to train"),
    "a model that listens": (_listen, {"freeze_config": "freeze_audio", "audio_lr_ratio": 0.1}, ""),
    "images of a model that listens": (_listen, {"freeze_config": "freeze_vision"}, "voxtral has no vision encoder"),
    "all parts of a model that listens": (
        _listen, {"freeze_config": "freeze_audio freeze_aligner freeze_llm"}, "leaves nothing to train",
    ),
    "a layer of an encoder without its name": (_listen, LORA | {"lora_target_modules": "fc1"}, "begin with that"),
    "too many singular values": (lambda folder: None, LORA | {"lora_init": "pissa", "lora_rank": 17}, "only 16 singu"),
    "no adapters": (lambda folder: None, LORA | {"lora_path": "{folder}"}, "is not a folder of adapters"),
    "adapters": (lambda folder: None, LORA, ""),
    "quantized weights": (lambda folder: None, LORA | {"weight_quantize_algo": "nf4"}, ""),
    "blocks that do not divide": (
        lambda folder: None, {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 64}, "hadamard_block_size",
    ),
    "a file as the model": (lambda folder: None, {"model_name_or_path": __file__}, "is a file"),
    "no such model": (lambda folder: None, {"model_name_or_path": "absent"}, "absent does not exist"),
    "no such data": (lambda folder: None, {"train_dataset_path": "absent.jsonl"}, "absent.jsonl does not exist"),
    "no such checkpoint": (lambda folder: None, {"resume_from_checkpoint": "checkpoint-3"}, "does not exist"),
    "no checkpoint": (lambda folder: None, {"resume_from_checkpoint": "{folder}"}, "is not a checkpoint-<step> folder"),
    "the model's own folder as output": (lambda folder: None, BASE | {"output_dir": "{folder}"}, "would overwrite"),
    "a file as output": (lambda folder: None, {"output_dir": __file__}, "it is a file"),
    "another model in the output": (lambda folder: None, {"output_dir": "{other}"}, "already contains"),
    "added tokens": (lambda folder: None, BASE | {"added_token_ranges": ["<|unit{0..99}|>"]}, ""),
    "an added token that is a word": (
        lambda folder: None, {"added_tokens": ["Reverse"]}, "'Reverse' is a word of the tokenizer's vocabulary",
    ),
    "a start with other tokens": (
        lambda folder: _declare(folder.parent / "other"),
        BASE | {"init_from_checkpoint": "{other}"}, "grew in another way",
    ),
    "a start with the same tokens": (
        lambda folder: _declare(folder), BASE | {"added_tokens": ["<|b|>"]}, "",
    ),
    "a reference with another vocabulary": (
        lambda folder: None,
        {"stage": "DPO", "ref_model_name_or_path": "{other}"}, "their tokenizers differ",
    ),
    "a reference that gives scores": (
        lambda folder: _json(folder.parent / "other", **SCORED),
        {"stage": "DPO", "ref_model_name_or_path": "{other}"}, "is a reward model, which gives a text a score",
    ),
    "a teacher that gives scores": (
        lambda folder: _json(folder.parent / "other", **SCORED),
        {"stage": "DISTILL", "teacher_model_name_or_path": "{other}"}, "Write a teacher that predicts tokens",
    ),
    "a reward model that is none": (
        lambda folder: None, ANSWERS | {"rewards": "reward_model:{folder}"}, "it is no reward model",
    ),
    "a rule as a reward": (lambda folder: None, ANSWERS | {"rewards": "exact_match"}, ""),
    "half a group": (
        lambda folder: None, ANSWERS | {"rewards": "exact_match", "num_generations": 4}, "num_generations",
    ),
    "a decoder that learns to speak": (lambda folder: None, TTS | BASE | SIZES, ""),
    "one that learns to speak level by level": (lambda folder: None, TTS | SIZES | {"tts_objective": "ar_nar"}, ""),
    "codes of an unknown codec": (lambda folder: None, TTS, "it is not known of which codec"),
    "adapters of new tables": (lambda folder: None, TTS | LORA | SIZES, "the code tables are new"),
    "codes of a hub": (
        lambda folder: None, TTS | SIZES | {"train_dataset_path": "org/name"}, "org/name does not exist",
    ),
}  # fmt: skip


@pytest.fixture
def configured(
    make_config: Callable[..., Config], tiny_base: Path, tmp_path: Path
) -> Callable[[str], tuple[Config, str]]:
    def configure(case: str) -> tuple[Config, str]:
        change, values, said = CASES[case]
        folder, other = tmp_path / "model", tmp_path / "other"
        shutil.copytree(tiny_base, folder)
        shutil.copytree(tiny_base, other)
        _json(other, vocab_size=1000)
        change(folder)
        words = {
            name: value.format(folder=folder, other=other) if isinstance(value, str) else value
            for name, value in values.items()
        }
        return make_config(**{"model_name_or_path": str(folder), **words}), said

    return configure


@pytest.mark.parametrize("case", CASES)
def test_validate_and_train_agree(
    case: str,
    configured: Callable[[str], tuple[Config, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from erniekit.runners import train

    def building_begins(*_: Any, **__: Any) -> None:
        raise _BuildingBeginsError

    monkeypatch.setattr(train, "open_run_folder", building_begins)
    config, said = configured(case)
    verdict = main(["validate", str(tmp_path / "config.yaml"), "--world-size", "1"])
    error = capsys.readouterr().err
    assert verdict == (2 if said else 0), error
    assert said in error
    with pytest.raises((UserError, _BuildingBeginsError)) as refused:
        train.run_training(config)
    assert isinstance(refused.value, _BuildingBeginsError) == (not said), refused.value
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tensor_parallel_degree": 2}, "does not divide audio_config: attention heads 3"),
        ({"pipeline_parallel_degree": 2}, ""),
        ({"pipeline_parallel_degree": 4}, "2 layers cannot be divided equally"),
        ({"lora": True, "continue_training": True, "freeze_config": "freeze_llm"}, "leaves no adapter"),
    ],
    ids=str,
)
def test_layouts_of_a_model_that_hears(
    values: dict[str, Any], told: str, make_config: Callable[..., Config], tiny_base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_base, tmp_path / "model")
    _listen(folder)
    try:
        said = "\n".join(preflight(make_config(model_name_or_path=str(folder), **values)).notes)
        assert not told and "trained: audio encoder (" in said
    except UserError as error:
        assert told and told in str(error), error


def test_every_problem_is_shown_at_once(
    make_config: Callable[..., Config], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing files stand beside wrong values; problems of the model beside those of the layout and the folders."""
    make_config(train_dataset_path="absent.jsonl")
    assert main(["validate", str(tmp_path / "config.yaml"), "max_steps=many", "lerning_rate=1"]) == 2
    error = capsys.readouterr().err
    for part in ("absent.jsonl does not exist", "expected an integer, got many", "did you mean `learning_rate`?"):
        assert part in error
    values = {"continue_training": True, "max_seq_len": 100_000, "tensor_parallel_degree": 3, "output_dir": __file__}
    with pytest.raises(UserError) as refused:
        preflight(make_config(**values))
    for part in ("holds no *.safetensors", "max_position_embeddings", "does not divide", "it is a file"):
        assert part in str(refused.value)


def test_groups_are_those_that_are_learned_from(
    make_config: Callable[..., Config], tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(ROOT / "examples/data/grpo-eval.jsonl")
    halves = ANSWERS | {"rewards": "exact_match", "num_generations": 4, "do_eval": True, "eval_dataset_path": data}
    make_config(model_name_or_path=str(tiny_base), train_dataset_path=data, **halves)
    assert main(["validate", str(tmp_path / "config.yaml")]) == 2 and "num_generations" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "config.yaml"), "do_train=false"]) == 0


def test_validate_looks_at_each_verb(
    make_config: Callable[..., Config], tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_config(model_name_or_path=str(tiny_base), output_dir=str(tmp_path / "run"))
    file = str(tmp_path / "config.yaml")

    def verdict(verb: str, *words: str) -> str:
        code = main(["validate", file, "--verb", verb, *words])
        printed = capsys.readouterr()
        assert (code == 0) == (f"valid for `erniekit {verb}`" in printed.out), printed
        return printed.err

    for verb in ("train", "preview", "pack", "chat", "generate"):
        assert verdict(verb) == ""
    assert "cannot train stage PT" in verdict("dpo", "stage=PT")
    assert "this run has not been trained" in verdict("export")
    assert "this run has not been trained" in verdict("eval", f"eval_dataset_path={file}")
    shutil.copytree(tiny_base, tmp_path / "run")
    assert "already contains a model" in verdict("train") and verdict("export") == ""
    held_out = f"eval_dataset_path={ROOT / 'examples/data/sft-eval.jsonl'}"
    assert verdict("eval", held_out) == ""
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in verdict("export") and "model.safetensors" in verdict("eval", held_out)
    assert "there is no such folder" in verdict("generate", "model_name_or_path=absent")


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({}, "overwrite_output_dir", False),
        ({"overwrite_output_dir": True}, "overwrite_output_dir", True),
        ({"resume_from_checkpoint": "checkpoint-3"}, "resume_from_checkpoint", "checkpoint-3"),
    ],
    ids=str,
)
def test_the_output_is_checked_as_it_is_opened(
    values: dict[str, Any],
    argument: str,
    seen: Any,
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(preflights, "check_output_folder", lambda folder, **named: told.update(named))
    preflights._check_output(make_config(**values), None, None, None)
    assert told[argument] == seen


def test_only_a_run_that_trains_writes(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(preflights, "_check_output", lambda config, *parts: told.append(config.basic.do_train))
    for values in ({}, {"do_train": False, "do_eval": True, "eval_dataset_path": __file__, "eval_answers": 0}):
        preflight(make_config(**values))
    assert told == [True]


def test_a_reference_is_opened_where_the_loss_has_one(
    make_config: Callable[..., Config], tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(preflights, "reference_config", lambda config, model: told.append(config.dpo.loss_type))
    for loss in ("sigmoid", "simpo"):
        preflight(make_config(model_name_or_path=str(tiny_base), stage="DPO", loss_type=loss))
    assert told == ["sigmoid"]


def test_answers_come_from_the_model_that_is_named(monkeypatch: pytest.MonkeyPatch, tiny_base: Path) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        preflights, "answering_folders", lambda named, adapters: told.append((named, adapters)) or (named, None)
    )
    monkeypatch.setattr(preflights.ModelConfig, "from_folder", lambda folder, ignored: told.append(ignored))
    base = {"model_name_or_path": str(tiny_base)}
    for values in ({}, {"lora_path": "adapters", "lora": True}, {"ignore_config_keys": ["a"]}):
        preflight(Config.from_mapping(base | values, verb="chat"))
    assert told == [(tiny_base, None), (), (tiny_base, Path("adapters")), (), (tiny_base, None), ("a",)]


def test_what_only_the_data_tells_is_refused_with_it(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("erniekit.build.checks.available_memory", lambda: 4096)
    make_config(max_steps=None, lr_scheduler_type="wsd", decay_steps=1000)
    words = ["validate", str(tmp_path / "config.yaml"), "--data"]
    assert main(words[:-1]) == 0
    assert main(words) == 2
    assert "decay_steps 1000 exceed the 8 steps" in capsys.readouterr().err
    assert main([*words, "lr_scheduler_type=linear", "use_flash_attention=false"]) == 2
    assert "the dense mask of max_seq_len 128 takes" in capsys.readouterr().err


def test_the_size_of_a_dense_mask_is_that_of_attention(make_config: Callable[..., Config]) -> None:
    from types import SimpleNamespace

    import numpy as np

    from erniekit.model.attention import dense_mask_bytes

    long, short = (SimpleNamespace(longest=np.array([length])) for length in (200, 7))
    config = make_config(use_flash_attention=False, per_device_eval_batch_size=3)
    assert dense_mask_size(config, short, long) == dense_mask_bytes(3, 128)  # type: ignore[arg-type]


def test_a_run_that_would_go_on_with_other_batches_is_refused(
    train: Callable[..., Any], make_config: Callable[..., Config]
) -> None:
    train(save_strategy="steps", save_steps=2)
    resumed = {"save_strategy": "steps", "resume_from_checkpoint": True}
    preflight(make_config(**resumed), world_size=1)
    preflight(make_config(**resumed, per_device_train_batch_size=1, gradient_accumulation_steps=2), world_size=1)
    for name, value in (("seed", 43), ("per_device_train_batch_size", 3), ("max_seq_len", 64)):
        with pytest.raises(CheckpointError, match=rf"(?s)would train on other samples.*{name} was"):
            preflight(make_config(**resumed, **{name: value}), world_size=1)
    with pytest.raises(UserError, match="it has a full model, but this run trains adapters"):
        preflight(make_config(**resumed, lora=True, continue_training=True), world_size=1)
    preflight(make_config(**resumed, gradient_accumulation_steps=4))  # on a number of ranks that is not known here


@pytest.mark.proves("media_dir")
def test_folders_of_recordings_are_looked_at_before_codes_are_made(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"audio_path": "a.wav", "text": "a"}\n', encoding="utf-8")
    values = {"output_dir": str(tmp_path / "out"), "train_dataset_path": str(tmp_path / "data.jsonl")}
    preflight(Config.from_mapping(values, verb="codes"))
    with pytest.raises(UserError, match="media_dir: expected folders that exist"):
        preflight(Config.from_mapping(values | {"media_dir": str(tmp_path / "missing")}, verb="codes"))


@pytest.mark.parametrize(
    ("values", "looked_at"),
    [
        ({"init_from_checkpoint": "start"}, ["init_from_checkpoint: start"]),
        ({"lora": True, "lora_path": "adapters"}, ["lora_path: adapters"]),
        ({"lora_path": "adapters"}, []),
    ],
    ids=str,
)
def test_tokens_of_what_a_run_starts_from_are_looked_at(
    values: dict[str, Any], looked_at: list[str], make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        preflights, "refuse_other_tokens",
        lambda config, folder, start, parameter: told.append(f"{parameter}: {start}"),
    )  # fmt: skip
    preflights._starts_with_own_tokens(make_config(**BASE, **values), Path("model"))
    assert told == looked_at


@pytest.mark.parametrize(("values", "notes"), [({}, ["on the parts"]), ({"lora": True}, [])], ids=str)
def test_nothing_is_told_of_parts_whose_adapters_are_refused(
    values: dict[str, Any],
    notes: list[str],
    make_config: Callable[..., Config],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = preflights.ModelConfig.from_folder(tiny_model)
    monkeypatch.setattr(preflights, "adapter_plan", lambda config, model: None)
    monkeypatch.setattr(preflights, "part_notes", lambda config, model, settings: ["on the parts"])
    assert preflights._check_shares(make_config(**BASE, **values), model, None, None, preflights.Findings()) == notes
