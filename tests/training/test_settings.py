"""The sections of a configuration are the settings of a run: a parameter arrives where training reads it."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.config.sections.checkpoint import moment_quantization, saves_asynchronously
from erniekit.errors import ConfigurationError
from erniekit.training.optim.schedules import check_schedule_fits

QUICKSTART = Path("examples/configs/quickstart/sft.yaml")


def load(*overrides: str) -> Config:
    return Config.load(QUICKSTART, list(overrides), verb="train")


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("output_dir=/tmp/elsewhere", "output_dir", Path("/tmp/elsewhere")),
        ("output_dir=~/run", "output_dir", Path.home() / "run"),
        ("seed=7", "training.seed", 7),
        ("max_grad_norm=0.5", "training.max_grad_norm", 0.5),
        ("dropout_warmup_steps=9", "basic.dropout_warmup_steps", 9),
        ("release_grads=true", "memory.release_grads", True),
        ("logging_strategy=epoch", "basic.logging_strategy", "epoch"),
        ("logging_steps=3", "basic.logging_steps", 3),
        ("evaluation_strategy=epoch", "evaluation.evaluation_strategy", "epoch"),
        ("do_eval=false", "basic.do_eval", False),
        ("eval_steps=11", "evaluation.eval_steps", 11),
        ("max_evaluate_steps=2", "evaluation.max_evaluate_steps", 2),
        ("save_strategy=epoch", "checkpoint.save_strategy", "epoch"),
        ("save_steps=13", "checkpoint.save_steps", 13),
        ("save_total_limit=5", "checkpoint.save_total_limit", 5),
        ("ignore_save_lr_and_optim=true", "checkpoint.ignore_save_lr_and_optim", True),
        ("ignore_load_lr_and_optim=true", "checkpoint.ignore_load_lr_and_optim", True),
        ("lr_scheduler_type=linear", "training.lr_scheduler_type", "linear"),
        ("learning_rate=0.5", "training.learning_rate", 0.5),
        ("warmup_steps=17", "training.warmup_steps", 17),
        ("min_lr=1e-4", "training.min_lr", 1e-4),
        ("num_cycles=1.5", "training.num_cycles", 1.5),
        ("lr_end=1e-5", "training.lr_end", 1e-5),
        ("power=2", "training.power", 2.0),
        ("decay_steps=19", "training.decay_steps", 19),
        ("wsd_decay_type=cosine", "training.wsd_decay_type", "cosine"),
        ("weight_decay=0.3", "training.weight_decay", 0.3),
        ("adam_beta1=0.8", "training.adam_beta1", 0.8),
        ("adam_beta2=0.97", "training.adam_beta2", 0.97),
        ("adam_epsilon=1e-6", "training.adam_epsilon", 1e-6),
        ("layerwise_lr_decay_bound=0.5", "training.layerwise_lr_decay_bound", 0.5),
    ],
)
def test_a_parameter_arrives(override: str, field: str, value: object) -> None:
    read = attrgetter(field)
    assert read(load()) != value
    assert read(load(override)) == value


def test_what_follows_from_several_parameters_of_checkpoints() -> None:
    assert moment_quantization(load().checkpoint) == "O0"
    assert moment_quantization(load("ckpt_quant_stage=O1").checkpoint) == "O1"
    assert moment_quantization(load("ckpt_quant_stage=O1", "disable_ckpt_quant=true").checkpoint) == "O0"
    assert not saves_asynchronously(load().checkpoint)
    assert saves_asynchronously(load("unified_checkpoint_config=async_save").checkpoint)


def test_wsd_that_does_not_fit_into_the_run() -> None:
    config = load("lr_scheduler_type=wsd", "warmup_steps=40", "decay_steps=61")
    with pytest.raises(ConfigurationError, match=r"warmup_steps 40 \+ decay_steps 61 exceed the 100 steps"):
        check_schedule_fits(config.training, 100)
    check_schedule_fits(config.training, 101)
