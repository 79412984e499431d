"""Files of other programs are named in one sentence; files for other verbs than train are known by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.config.recognition import likely_verb
from erniekit.errors import ConfigurationError


def refusal(tmp_path: Path, text: str, name: str = "theirs.yaml") -> str:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        Config.load(file)
    return str(raised.value).removeprefix(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "stage: VL-SFT\nuse_moe: true\nvit_lr_ratio: 0.9\nmax_seq_len: 8192\n",
            "this is a file for a vision-language",
        ),
        ("stage: OCR-VL-SFT\ntrain_dataset_path: t\n", "this is a file for a vision-language model"),
        ("model_name_or_path: m\nenable_mm: true\nport: 8188\n", "this is a file for a vision-language model"),
        ("env:\n  a: 1\nmodel_args:\n  b: 2\ntrainer_args:\n  c: 3\n", "this is a file of ERNIE's pre-training suite"),
        ("stage: ernie_pretrain\nernie_model_config:\n  a: 1\n", "this is a file of ERNIE's pre-training suite"),
        ("stage: PT\ndataset_type: pretrain\ninput_dir: ./data\nsplit: 998,2\n", "this file trains from indexed .bin"),
        ("basic: {}\ntrain_sft: {}\nexecute: {}\n", "this is the configuration of ERNIE's web interface"),
        ("actor_rollout_ref: {}\nalgorithm: {}\n", "this is a file of verl"),
        ("tokenizer: {}\ncheckpointer: {}\nepochs: 1\n", "this is a file of torchtune"),
        (
            "tokenizer: naive\naudio_backend: vocos\nmodels: []\ntrainer: {}\ndataset: {}\n",
            "this is the configuration of a VALL-E trainer; `erniekit import vall-e CONFIG.yaml`",
        ),
        ("llm_name_or_path: m\naudio_mask_id: 1024\n", "this is the training configuration of OmniVoice; `erniekit"),
    ],
)
def test_a_file_of_another_program_is_named_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    told = refusal(tmp_path, text)
    assert told.startswith(sentence) and "\n" not in told


def test_json_files_of_a_model_are_known(tmp_path: Path) -> None:
    config = '{"architectures": ["X"], "model_type": "x", "hidden_size": 8, "vocab_size": 9}'
    assert refusal(tmp_path, config, "config.json").startswith("this is the config.json of a model")
    assert "DeepSpeed" in refusal(tmp_path, '{"zero_optimization": {"stage": 2}}', "ds.json")


def test_a_file_of_llama_factory_gets_its_words_here(tmp_path: Path) -> None:
    told = refusal(
        tmp_path,
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: a,b\ncutoff_len: 2048\nplot_loss: true\n"
        "per_device_train_batch_size: 1\nmystery: 1\n",
    )
    first, *rows = told.splitlines()
    assert first.startswith("this is a file of LLaMA-Factory")
    assert {row.split()[0]: " ".join(row.split()[1:]) for row in rows} == {
        "model_name_or_path": "the same",
        "stage": "the same",
        "finetuning_type": "fine_tuning: LoRA or Full",
        "dataset": "train_dataset_path: a,b",
        "cutoff_len": "max_seq_len: 2048",
        "plot_loss": "every run draws loss.png",
        "per_device_train_batch_size": "the same",
        "mystery": "no such parameter",
    }


def test_a_file_of_axolotl_with_nested_data_is_known(tmp_path: Path) -> None:
    told = refusal(tmp_path, "base_model: m\ndatasets:\n  - path: d\n    type: alpaca\nmicro_batch_size: 2\n")
    assert told.startswith("this is a file of axolotl") and "per_device_train_batch_size: 2" in told


def test_our_own_files_are_not_mistaken(tmp_path: Path) -> None:
    """A few foreign names beside our own are problems of our file, each with its line."""
    told = refusal(tmp_path, "train_dataset_path: t\ndataset: d\ncutoff_len: 8\nfinetuning_type: lora\n")
    assert told.startswith("5 problems in the configuration")


@pytest.mark.parametrize(
    ("names", "verb"),
    [
        ({"model_name_or_path", "output_dir", "max_shard_size", "hf_hub_id", "fine_tuning", "sharding"}, "export"),
        ({"model_name_or_path", "output_dir", "fine_tuning", "device"}, "export"),
        ({"model_name_or_path", "output_dir", "max_model_len", "port", "top_p"}, "chat"),
        ({"eval_dataset_path", "do_eval", "max_shard_size"}, "train"),
        ({"stage", "max_shard_size", "model_name_or_path"}, "train"),
        ({"seed"}, "train"),
        ({"train_dataset_path", "output_dir", "codec", "seed"}, "codes"),
        ({"train_dataset_path", "output_dir", "codec", "model_name_or_path"}, "train"),
    ],
)
def test_the_verb_of_a_file_is_known_by_its_names(names: set[str], verb: str) -> None:
    assert likely_verb(names) == verb
