"""VALL-E's file: every key of its configuration has its row, and the one that it ships with becomes ours."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.config import Config
from erniekit.config.imports.settings import Setting, read_settings
from erniekit.config.imports.vall_e import convert, head, model_shape
from erniekit.config.imports.vall_e_keys import TABLE
from erniekit.config.parse import SourceLocation
from erniekit.errors import ConfigurationError

KEYS = {  # of the dataclasses of its config.py, commit 73833ee, and the names that it drops or renames
    "": "yaml_path device mode experimental silent_errors tokenizer tokenizer_path text_tokenizer text_tokenizer_path "
    "sample_rate audio_backend weights_name weights_format supported_weights_formats",
    "dataset.": "training validation noise speaker_name_getter speaker_group_getter speaker_languages use_hdf5 "
    "hdf5_name hdf5_flag use_metadata validate strict_validate workers cache min_utterances max_utterances "
    "duration_range sample_type sample_order sample_shuffle sample_max_duration_batch prompt_duration_range "
    "prompt_max_samples prompt_continuous_utterance_p prompt_similar_p prompt_similar_top_k "
    "prompt_similar_top_k_offset prompt_inject_noise_p resps_max_samples resps_append_p resps_pad_silence_p tasks_list "
    "reencode_on_concat reencode_device noise_scale retokenize_text _frames_per_second",
    "models[].": "name version size tasks langs tones experts arch_type training teacher frozen_params attention "
    "dropout path loss_factors capabilities kwargs resp_levels prom_levels interleave",
    "models[].experimental.": "hf interleave split_classifiers audio_embedding_sums audio_embedding_mode kv_heads "
    "rvq_levels_p rvq_level_range unified_position_ids tie_classifier_to_embedding causal_size masking_train_p "
    "masking_train_rvq_levels masking_ratio ignore_inputs_for_loss noncausal_masks classifiers_bias "
    "max_position_embeddings resp_parallel_training monolithic_audio_encoder predict_causally len_parallel_training "
    "len_use_logits len_loss_factor parallel_attention_mask_dropout layer_dropout_p codebook_dropout_p "
    "logit_normalization per_level_normalization audio_level_loss_factors use_segmented_attention_mask "
    "use_sliding_attention_mask use_streamlined_calc_loss use_audio_encoder_level_weights use_audio_encoder_ffn "
    "use_audio_encoder_norm audio_decoder_ffn_expansion_size audio_encoder_ffn_expansion_size token_dropout_error "
    "token_dropout_rate token_dropout_rvq_levels cfg_cond_dropout_p cfg_text_dropout_p cfg_prom_dropout_p "
    "lang_cond_dropout_p use_raw_text_p layerskip layerskip_r layerskip_p_max layerskip_e_scale p_rvq_levels "
    "p_len_train masking_ratio_fixed",
    "loras[].": "name rank alpha training embeddings parametrize rvq_levels path",
    "hyperparameters.": "batch_size gradient_accumulation_steps gradient_clipping optimizer optimizer_params "
    "learning_rate warmup_steps scheduler scheduler_params autotune autotune_params torch_optimizer torch_scheduler "
    "teacher_alpha teacher_temperature teacher_loss_fn",
    "evaluation.": "batch_size frequency size kwargs",
    "trainer.": "iterations save_tag load_tag save_on_oom save_on_quit export_on_save export_on_quit save_frequency "
    "keep_last_checkpoints load_state_dict load_states strict_loading load_module_only restart_step_count "
    "resize_modules activation_checkpointing gradient_checkpointing detect_grad_anomaly check_for_oom gc_mode wandb "
    "wandb_params weight_dtype audio_device decode_non_resp_audio amp ddp load_webui backend",
    "trainer.deepspeed.": "zero_optimization_level use_compression_training compression_bits inferencing optimizer amp "
    "loss_scale_window min_loss_scale max_loss_scale loss_scale profile config",
    "inference.": "backend weight_dtype amp normalize batch_size audio_backends",
    "optimizations.": "injects replace compile linear embedding optimizers bitsandbytes dadaptation bitnet fp8 "
    "model_offloading tensorrt unsloth",
}
SHIPPED: dict[str, Any] = {
    "sample_rate": 24_000,
    "audio_backend": "vocos",
    "models": [
        {
            "name": "ar+nar", "size": "full", "resp_levels": 8, "tasks": 9, "langs": 4, "tones": 1,
            "arch_type": "llama", "training": True, "version": 5, "attention": "auto", "dropout": 0.1,
            "loss_factors": {"text": 0.1, "prom": 0.5, "resp": 1.0}, "capabilities": ["ar", "nar"],
            "experimental": {
                "rvq_levels_p": "auto", "audio_embedding_sums": True, "unified_position_ids": False,
                "split_classifiers": True,
            },
        }
    ],
    "hyperparameters": {
        "autotune": False,
        "autotune_params": {"start_profile_step": 1, "end_profile_step": 50, "num_tuning_micro_batch_sizes": 8},
        "batch_size": 16, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "warmup_steps": 100,
        "optimizer": "Prodigy", "learning_rate": 1.0, "torch_optimizer": True, "scheduler": "", "torch_scheduler": True,
    },
    "evaluation": {
        "batch_size": 8, "frequency": 5000, "size": 8,
        "kwargs": {"max_steps": 500, "ar_temp": 0.95, "nar_temp": 0.25},
    },
    "trainer": {
        "iterations": 1_000_000, "save_tag": "step", "save_on_oom": True, "save_on_quit": True, "save_frequency": 250,
        "export_on_save": True, "keep_last_checkpoints": 4, "gradient_checkpointing": True, "strict_loading": False,
        "resize_modules": True, "weight_dtype": "float16", "amp": True, "backend": "deepspeed",
        "deepspeed": {
            "inferencing": True, "amp": False, "zero_optimization_level": 0, "use_compression_training": False,
        },
        "load_webui": False,
    },
    "inference": {"backend": "deepspeed", "normalize": False, "weight_dtype": "float32", "amp": False},
    "optimizations": {
        "injects": False, "replace": True, "linear": False, "embedding": False, "optimizers": True,
        "bitsandbytes": False, "dadaptation": False, "bitnet": False, "fp8": False,
    },
    "dataset": {
        "speaker_name_getter": "lambda p: f'{p.parts[-3]}_{p.parts[-2]}'",
        "speaker_group_getter": "lambda p: f'{p.parts[-3]}'",
        "speaker_languages": {"ja": []},
        "use_hdf5": True, "hdf5_flag": "r", "use_metadata": True, "validate": True, "workers": 2, "cache": True,
        "duration_range": [3.0, 5.0], "prompt_max_samples": 1, "prompt_duration_range": [3.0, 6.0],
        "prompt_similar_p": 1.0, "resps_max_samples": 1, "resps_append_p": 0.0, "sample_type": "path",
        "sample_order": "duration", "sample_max_duration_batch": 0, "sample_shuffle": False, "retokenize_text": False,
        "tasks_list": ["tts", "stt"], "training": [], "validation": [], "noise": [],
    },
}  # fmt: skip
ADAMW = ("hyperparameters.optimizer=Adamw", "hyperparameters.learning_rate=1.0e-4")
PATHS = ["train_dataset_path=train.jsonl"]
ADAPTERS = {"loras": [{"name": "x", "rank": 128, "alpha": 128, "training": True, "rvq_levels": [0, 1]}]}


def changed(**values: Any) -> dict[str, Any]:
    """The shipped file with other values: `dataset__workers=3`, `models__dropout=0.2`."""
    found = copy.deepcopy(SHIPPED)
    for key, value in values.items():
        *above, last = key.split("__")
        place = found
        for name in above:
            place = place[name][0] if name == "models" else place.setdefault(name, {})
        place[last] = value
    return found


def write(folder: Path, values: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return file


def parameters(folder: Path, overrides: tuple[str, ...] = ADAMW, **values: Any) -> dict[str, Any]:
    return convert(write(folder, changed(**values)), overrides).parameters


def problems(folder: Path, overrides: tuple[str, ...] = ADAMW, **values: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        convert(write(folder, changed(**values)), overrides)
    return str(caught.value)


def config_of(folder: Path, values: Any, *words: str) -> Config:
    """What is written, read as `erniekit train` reads it."""
    result = convert(write(folder, values), ADAMW)
    ours = folder / "ours.yaml"
    ours.write_text(result.yaml(head(["vall-e", "config.yaml"], result, written=False)), encoding="utf-8")
    return Config.load(ours, [*PATHS, *words])


def test_every_key_of_its_configuration_has_a_row() -> None:
    assert set(TABLE) == {f"{section}{key}" for section, keys in KEYS.items() for key in keys.split()}


def test_the_shipped_configuration_resolves(tmp_path: Path) -> None:
    config = config_of(tmp_path, SHIPPED)
    assert [line for line in config.messages if "no effect" in line and "class_temperature" not in line] == []
    assert config.basic.stage == "TTS" and config.speech.tts_objective == "ar_nar"
    assert not config.basic.continue_training and config.speech.text_frontend == "phonemes"
    assert config.speech.codebook_sampling == "8,7,6,5,4,3,2,1"
    assert config.speech.loss_factors == (0.0, 0.0, 1.0)
    assert config.speech.language_probability == 1.0
    assert config.speech.tts_tasks == ("tts", "stt") and config.speech.prompt_sources == (0.0, 1.0, 0.0)
    assert config.speech.prompt_seconds == (3.0, 6.0) and config.codes.duration_range == (3.0, 5.0)
    assert config.sft.curriculum == "duration" and not config.training.random_shuffle
    assert config.training.per_device_train_batch_size == 16 and not config.acceleration.packing
    assert config.training.adam_beta2 == 0.96 and config.training.adam_epsilon == 1e-7
    assert config.training.weight_decay == 0.01 and config.training.lr_scheduler_type == "constant"
    assert config.precision.fp16 and config.precision.fp16_opt_level == "O2"
    assert (config.precision.min_loss_scale, config.precision.max_loss_scale) == (32768, 1048576)
    assert config.precision.scale_loss == 65536
    assert config.basic.attention_probs_dropout_prob == 0.1 and config.memory.recompute
    assert config.checkpoint.save_steps == 250 and config.checkpoint.save_total_limit == 4


def test_another_optimizer_is_refused_with_what_to_add_to_the_command(tmp_path: Path) -> None:
    found = problems(tmp_path, ())
    assert "config.yaml:" in found and "`hyperparameters.optimizer`: Prodigy is not built here" in found
    assert "hyperparameters.optimizer=Adamw hyperparameters.learning_rate=1.0e-4" in found


@pytest.mark.parametrize("name", ["vall-e", "vall-e-lora"])
def test_examples_are_what_is_written(name: str, tmp_path: Path) -> None:
    found = Config.load(Path(f"examples/configs/speech/{name}.yaml")).resolved()
    adapters = {"loras": [{"rank": 128, "alpha": 128, "training": True}]} if name == "vall-e-lora" else {}
    expected = config_of(tmp_path, changed(dataset__sample_max_duration_batch=120) | adapters).resolved()
    own = {"train_dataset_path", "train_dataset_type", "train_dataset_prob", "output_dir", "logging_dir"}
    own |= {"model_name_or_path", "do_eval", "eval_dataset_path", "eval_dataset_type", "eval_steps", "eval_answers"}
    own |= {"eval_dataset_prob", "speech_judge", "max_evaluate_steps", "from_hf_hub"}
    assert {key: value for key, value in found.items() if key not in own} == {
        key: value for key, value in expected.items() if key not in own
    }


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ("quarter", (256, 1024, 12, 4)),
        ("half", (512, 2048, 12, 8)),
        ("full", (1024, 4096, 12, 16)),
        ("extended", (1024, 4096, 16, 16)),
        ("double", (1024, 4096, 24, 16)),
        ({"dim": 64, "heads": 2, "layers": 3, "ffn": 2}, (64, 128, 3, 2)),
    ],
)
def test_sizes_become_the_shape_of_the_model(tmp_path: Path, size: Any, shape: tuple[int, ...]) -> None:
    written = model_shape(convert(write(tmp_path, changed(models__size=size)), ADAMW))
    llm = written["llm_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert tuple(llm[name] for name in names) == shape
    assert llm["num_key_value_heads"] == shape[3] and llm["hidden_act"] == "gelu"
    assert written["audio_vocab_size"] == 1024 and written["num_audio_codebook"] == 8
    assert written["unified_position_ids"] is False and written["noncausal_masks"] is False
    assert written["classifiers_bias"] is True


def test_dac_has_nine_levels_and_its_own_rate(tmp_path: Path) -> None:
    found = parameters(tmp_path, audio_backend="dac", sample_rate=44_100)
    assert found["codec"] == "descript/dac_44khz" and found["codec_levels"] == 9
    assert found["codebook_sampling"] == "9,8,7,6,5,4,3,2,1"


@pytest.mark.parametrize(
    ("values", "sampling"),
    [
        ({"models__experimental__rvq_levels_p": "equal"}, "8,7,6,5,4,3,2,1"),  # a check of lists runs first there
        ({"models__experimental__rvq_levels_p": [0, 0, 3]}, "2,0,0,1,0,0,0,0"),
        ({"models__experimental__rvq_level_range": [0, 2]}, "3,2,1,0,0,0,0,0"),
        ({"models__experimental__p_rvq_levels": [1]}, "0,1,0,0,0,0,0,0"),
    ],
)
def test_levels_are_drawn_as_its_trainer_draws_them(tmp_path: Path, values: dict[str, Any], sampling: str) -> None:
    assert parameters(tmp_path, **values)["codebook_sampling"] == sampling


def test_factors_of_inputs_act_where_inputs_are_not_ignored(tmp_path: Path) -> None:
    ignored = convert(write(tmp_path, SHIPPED), ADAMW)
    assert any("text and prom have no effect there" in line for line in ignored.told)
    found = parameters(tmp_path, models__experimental__ignore_inputs_for_loss=False)
    with_them = changed(models__loss_factors={"text": 0.1, "prom": 0.5, "resp": 1.0})
    with_them["models"][0]["experimental"]["ignore_inputs_for_loss"] = False
    assert convert(write(tmp_path, with_them), ADAMW).parameters["loss_factors"] == [0.1, 0.5, 1.0]
    assert found["loss_factors"] == [0.1, 0.5, 1.0]


def test_batches_of_seconds_shuffled_and_by_speaker(tmp_path: Path) -> None:
    seconds = parameters(tmp_path, dataset__sample_max_duration_batch=120)
    assert (seconds["batch_seconds"], seconds["max_batch_samples"]) == (120.0, 16)
    assert "packing" not in seconds and "per_device_train_batch_size" not in seconds
    shuffled = parameters(tmp_path, dataset__sample_order="interleaved", dataset__sample_shuffle=True)
    assert shuffled["random_shuffle"] is True and "curriculum" not in shuffled
    speaker = parameters(tmp_path, dataset__sample_order="interleaved", dataset__sample_type="speaker")
    assert speaker["sample_order"] == "speaker"


def test_prompts_without_a_length_are_whole_recordings(tmp_path: Path) -> None:
    assert parameters(tmp_path, dataset__prompt_duration_range=[0, 0])["prompt_seconds"] == [86_400.0, 86_400.0]
    assert parameters(tmp_path)["prompt_seconds"] == [3.0, 6.0]


def test_adapters_begin_with_a_trained_model(tmp_path: Path) -> None:
    found = convert(write(tmp_path, SHIPPED | ADAPTERS), ADAMW).parameters
    assert (found["lora"], found["lora_rank"], found["lora_alpha"]) == (True, 128, 128)
    assert found["lora_codebooks"] == [0, 1] and "k_proj" not in found["lora_target_modules"]
    assert "continue_training" not in found
    assert config_of(tmp_path, SHIPPED | ADAPTERS).lora.lora_codebooks == (0, 1)


def test_models_that_are_not_trained_are_left_out(tmp_path: Path) -> None:
    other = {"name": "other", "version": 7, "training": False}
    values = SHIPPED | {"models": [other, SHIPPED["models"][0]]}
    assert convert(write(tmp_path, values), ADAMW).parameters["codec_levels"] == 8


def test_one_model_and_one_set_of_adapters_are_trained(tmp_path: Path) -> None:
    model, one = SHIPPED["models"][0], ADAPTERS["loras"][0]
    for values, told in (
        ({"models": [model, {**model, "dropout": 0.3}]}, "`models[].training`: the file has 2 models"),
        ({"loras": [one, {**one, "rank": 8}]}, "`loras[].training`: the file has 2 sets of adapters"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            convert(write(tmp_path, SHIPPED | values), ADAMW)
    untold = {"name": "x", "rank": 8}  # its adapters are trained unless the file says otherwise
    values = SHIPPED | {"loras": [{**one, "training": False}, untold]}
    assert convert(write(tmp_path, values), ADAMW).parameters["lora_rank"] == 8


def test_adamw_of_deepspeed_has_its_own_numbers(tmp_path: Path) -> None:
    found = parameters(tmp_path, hyperparameters__torch_optimizer=False)
    assert (found["adam_beta2"], found["adam_epsilon"], found["weight_decay"]) == (0.999, 1e-8, 0.0)
    given = parameters(tmp_path, hyperparameters__optimizer_params={"betas": [0.8, 0.9], "weight_decay": 0.1})
    assert (given["adam_beta1"], given["adam_beta2"], given["weight_decay"]) == (0.8, 0.9, 0.1)


def test_number_formats(tmp_path: Path) -> None:
    bf16 = parameters(tmp_path, trainer__weight_dtype="bfloat16")
    assert bf16["bf16"] is True and "scale_loss" not in bf16
    assert "fp16" not in parameters(tmp_path, trainer__weight_dtype="float32")
    local = parameters(tmp_path, trainer__backend="local")
    assert "fp16_opt_level" not in local and "min_loss_scale" not in local and local["max_loss_scale"] == 1048576
    zero = parameters(tmp_path, trainer__deepspeed__zero_optimization_level=2)
    assert zero["sharding"] == "stage2"


def test_held_out_folders_and_options_of_speaking(tmp_path: Path) -> None:
    result = convert(write(tmp_path, changed(dataset__training=["a"], dataset__validation=["b", "c"])), ADAMW)
    assert result.parameters["train_dataset_path"] == ["a"] and result.parameters["eval_dataset_path"] == ["b", "c"]
    assert (result.parameters["eval_steps"], result.parameters["eval_answers"]) == (5000, 8)
    assert result.parameters["class_temperature"] == 0.25
    assert any("ar_temp: 0.95: `erniekit speak` has it as --temperature" in line for line in result.told)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"dataset__sample_ordr": "x"}, "`dataset.sample_ordr`: unknown key; did you mean `dataset.sample_order`?"),
        ({"models__version": 7}, "`models[].version`: 7 is not possible: models of other versions"),
        ({"models__capabilities": ["ar", "nar", "len"]}, "`models[].capabilities`: len: `tts_objective: masked`"),
        ({"models__teacher": True}, "`models[].teacher`: true is not possible"),
        ({"models__training": False}, "no model is trained"),
        ({"models__experts": 8}, "`models[].experts`: 8 is not possible"),
        ({"models__experimental__audio_embedding_sums": False}, "a frame is the sum of the levels above it"),
        ({"models__experimental__audio_embedding_sums": "prom"}, "a frame is the sum of the levels above it"),
        ({"models__experimental__causal_size": 2}, "`models[].experimental.causal_size`: 2 is not possible"),
        ({"audio_backend": "nemo"}, "`audio_backend`: expected encodec, vocos, dac, got nemo"),
        ({"dataset__tasks_list": ["tts", "ns"]}, "`dataset.tasks_list`: ns: it mixes the codes"),
        ({"dataset__noise": ["n"]}, "`dataset.noise`: [n] is not possible: noise is mixed into sound"),
        ({"dataset__sample_type": "group"}, "`dataset.sample_type`: expected path or speaker, got group"),
        ({"hyperparameters__scheduler": "schedulefree"}, "expected none or warmup, got schedulefree"),
        ({"evaluation__kwargs": {"mirostat_tau": 3.0}}, "`evaluation.kwargs`: mirostat_tau: this way of sampling"),
        ({"evaluation__kwargs": {"temprature": 3.0}}, "`evaluation.kwargs`: temprature: unknown"),
        ({"optimizations__bitnet": True}, "`optimizations.bitnet`: true is not possible"),
        ({"models__size": "huge"}, "`models[].size`: expected quarter, half, full"),
        ({"models__size": {"dim": "x"}}, "`models[].size`: dim: expected one of"),
        ({"dataset__duration_range": ["a", "b"]}, "as `duration_range` expected one or more finite numbers"),
    ],
)
def test_what_is_not_built_is_refused_with_its_line(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    found = problems(tmp_path, **values)
    assert told in found and "config.yaml:" in found


def test_no_value_of_a_key_ends_in_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [None, [], {}, "x", -1, True, [1, "a"], {"a": 1}, [[]]]
    settings = read_settings(write(tmp_path, SHIPPED), TABLE, ADAMW)
    for number, key in enumerate(key for key, row in TABLE.items() if row.read or row.to):
        item = (0,) * key.count("[]")
        strange = Setting(key, item, odd[number % len(odd)], SourceLocation("f.yaml", 1))
        own = [*(setting for setting in settings if setting.key != key), strange]
        monkeypatch.setattr("erniekit.config.imports.vall_e.read_settings", lambda *_, own=own: own)
        with contextlib.suppress(ConfigurationError):
            convert(tmp_path).yaml([])


@pytest.mark.parametrize(
    ("key", "value"),
    [("models[].size", []), ("models[].capabilities", {}), ("evaluation.kwargs", [1]), ("dataset.tasks_list", [[]])],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"`{key}`")):
        convert(write(tmp_path, SHIPPED), (*ADAMW, f"{key}={value}"))


def test_every_refused_default_is_told_as_one(tmp_path: Path) -> None:
    found = problems(tmp_path, models__experimental={})
    assert "`models[].experimental.split_classifiers` (the default there): each level has a head of its own" in found
