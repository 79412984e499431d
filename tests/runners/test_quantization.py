"""Runs with weights in few bits, and runs through 8-bit floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.reference import table_path
from erniekit.errors import CheckpointError, ConfigurationError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.fp8 import AVERAGES_FILE
from erniekit.model.quantization.settings import WEIGHT_ONLY, Fp8, WeightOnly

Train = Callable[..., Any]
FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 16, "apply_online_actscale_step": 2}
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


@pytest.mark.parametrize("algorithm", WEIGHT_ONLY)
def test_adapters_learn_beside_weights_in_few_bits(algorithm: str, train_adapters: Train) -> None:
    plain, packed = train_adapters(max_steps=8), train_adapters(max_steps=8, weight_quantize_algo=algorithm)
    assert packed.losses != plain.losses
    assert packed.losses[-1] < packed.losses[0] - 0.1
    assert packed.losses[-1] == pytest.approx(plain.losses[-1], rel=0.05)
    assert "14 linear weights in 0.0 MiB" in packed.said


def test_mixture_of_formats(train: Train, moe_model: Path, tmp_path: Path) -> None:
    base = train(model_name_or_path=str(moe_model), output_dir=str(tmp_path / "base"), max_steps=1)
    values = {"lora": True, "model_name_or_path": str(base.output), "continue_training": True}
    run = train(**values, compute_type="wint4/8", device="cpu")
    assert "quantisation: int8, those of experts int4;" in run.said
    assert run.losses != train(**values, weight_quantize_algo="weight_only_int8").losses


def test_resuming_is_exact_and_notices_other_weights(train_adapters: Train, tmp_path: Path) -> None:
    options = {**SAVING, "weight_quantize_algo": "nf4"}
    whole = train_adapters(**options)
    values = {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": str(whole.output / "checkpoint-3")}
    resumed = train_adapters(**options, **values)
    assert resumed.losses == whole.losses[3:]
    with pytest.raises(CheckpointError, match="on top of other weights"):
        train_adapters(**{**options, **values, "output_dir": str(tmp_path / "b"), "weight_quantize_algo": "none"})


def test_what_weights_in_few_bits_cannot_do_is_refused(train: Train, train_adapters: Train) -> None:
    with pytest.raises(ConfigurationError, match="weight_only_int8 stores quantized weights, which cannot be trained"):
        train(weight_quantize_algo="weight_only_int8")
    with pytest.raises(ConfigurationError, match="`lora_init`: pissa needs the singular values"):
        train_adapters(weight_quantize_algo="nf4", lora_init="pissa")


def test_fp8_resumes_to_the_bit_with_its_averages(train: Train, tmp_path: Path) -> None:
    whole = train(**SAVING, **FP8)
    assert "FP8: 14 linear layers, e4m3, inputs rotated in blocks of 16, exact gradients" in whole.said
    stored = json.loads((whole.output / "checkpoint-3" / AVERAGES_FILE).read_text())
    assert len(stored) == 14 and {steps for _, steps in stored.values()} == {3}
    values = {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": str(whole.output / "checkpoint-3")}
    resumed = train(**SAVING, **FP8, **values)
    assert resumed.losses == whole.losses[3:]
    assert (resumed.output / AVERAGES_FILE).read_bytes() == (whole.output / AVERAGES_FILE).read_bytes()


def test_fp8_learns_as_plain_training_does(train: Train) -> None:
    plain, rounded = train(max_steps=12), train(max_steps=12, **FP8)
    assert rounded.losses[-1] == pytest.approx(plain.losses[-1], rel=0.03)


@pytest.mark.parametrize("values", [{"weight_quantize_algo": "nf4"}, FP8], ids=["nf4", "FP8"])
def test_recomputation_changes_neither_losses_nor_averages(values: dict[str, Any], train_adapters: Train) -> None:
    """Dropout included; a layer that is computed twice observes its activations twice."""

    def run(**recompute: Any) -> tuple[list[float], bytes]:
        found = train_adapters(**values, max_steps=3, hidden_dropout_prob=0.1, lora_dropout=0.1, **recompute)
        averages = found.output / AVERAGES_FILE
        return found.losses, averages.read_bytes() if averages.exists() else b""

    plain = run()
    for granularity, reentrant in (("full", True), ("full_attn", False), ("core_attn", True)):
        again = run(recompute=True, recompute_granularity=granularity, recompute_use_reentrant=reentrant)
        assert again == plain, granularity
    assert bool(plain[1]) == (values is FP8)


def test_fp8_beside_adapters_keeps_its_averages_with_them(train_adapters: Train) -> None:
    run = train_adapters(**FP8, max_steps=8)
    assert run.losses[-1] < run.losses[0] - 0.1
    assert len(json.loads((run.output / AVERAGES_FILE).read_text())) == 14


def test_blocks_that_do_not_fit_the_model_are_told(train: Train) -> None:
    with pytest.raises(
        ConfigurationError, match=r"down_proj \(48 inputs\)\s+set hadamard_block_size: 16, or apply_hadamard: false"
    ):
        train(**{**FP8, "hadamard_block_size": 32})
    message = "`hadamard_block_size` (config.yaml"
    assert message in train(**FP8, apply_hadamard=False).said and message not in train(**FP8).said


def test_pre_training_is_through_fp8_as_its_parameters_say(train: Train, tmp_path: Path) -> None:
    text = tmp_path / "corpus.jsonl"
    text.write_text(json.dumps({"text": "A line of text to go on with."}) + "\n", encoding="utf-8")
    run = train(**FP8, stage="PT", train_dataset_type="text", train_dataset_path=str(text), quant_input_grad=True)
    assert "inputs rotated in blocks of 16, gradients of inputs in e5m2" in run.said
    assert "has no effect with stage PT" not in run.said


def test_evaluation_uses_the_averages(
    train: Train, make_config: Callable[..., Any], records: Path, logged: list[str]
) -> None:
    from erniekit.runners.evaluate import run_evaluation

    run = train(**FP8)
    logged.clear()
    values = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records), "continue_training": True}
    values |= {"model_name_or_path": str(run.output), "output_dir": str(run.output)}
    rounded = run_evaluation(make_config(**values, **FP8))
    plain = run_evaluation(make_config(**values))
    assert rounded.loss != plain.loss and rounded.loss == pytest.approx(plain.loss, rel=0.01)
    (run.output / "manifest.json").unlink()
    (run.output / AVERAGES_FILE).write_text(
        json.dumps(
            {path: [1e-3, steps] for path, (_, steps) in json.loads((run.output / AVERAGES_FILE).read_text()).items()}
        )
    )
    assert run_evaluation(make_config(**values, **FP8)).loss > plain.loss * 1.01


def test_a_reference_in_fp8_has_a_table_of_its_own(tiny_base: Path, tmp_path: Path) -> None:
    config, pairs = ModelConfig.from_folder(tiny_base), _Pairs()
    ways = [None, WeightOnly("nf4"), Fp8(hadamard_block=16), Fp8(hadamard_block=8)]
    models = [build_model(config, tiny_base, quantization=way) for way in ways]
    assert len({table_path(tmp_path, pairs, model) for model in models}) == len(ways)


class _Pairs:
    fingerprint = "of the pairs"

    def __len__(self) -> int:
        return 3
