"""From parameters to the settings of a run: every parameter that this room reads arrives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.training.settings import optimizer_settings_from, schedule_from, settings_from

QUICKSTART = Path("examples/configs/quickstart/sft.yaml")


def load(*overrides: str) -> Config:
    return Config.load(QUICKSTART, list(overrides), verb="train")


def settings(config: Config) -> dict[str, object]:
    return (
        asdict(settings_from(config, 100))
        | asdict(schedule_from(config, 100))
        | asdict(optimizer_settings_from(config, num_layers=4))
    )


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("output_dir=/tmp/elsewhere", "output_dir", Path("/tmp/elsewhere")),
        ("output_dir=~/run", "output_dir", Path.home() / "run"),
        ("seed=7", "seed", 7),
        ("max_grad_norm=0.5", "max_grad_norm", 0.5),
        ("dropout_warmup_steps=9", "dropout_warmup_steps", 9),
        ("release_grads=true", "release_grads", True),
        ("logging_strategy=epoch", "logging_strategy", "epoch"),
        ("logging_steps=3", "logging_steps", 3),
        ("evaluation_strategy=epoch", "evaluation_strategy", "epoch"),
        ("do_eval=false", "evaluation_strategy", "no"),
        ("eval_steps=11", "eval_steps", 11),
        ("max_evaluate_steps=2", "max_evaluate_steps", 2),
        ("save_strategy=epoch", "save_strategy", "epoch"),
        ("save_steps=13", "save_steps", 13),
        ("save_total_limit=5", "save_total_limit", 5),
        ("ignore_save_lr_and_optim=true", "ignore_save_lr_and_optim", True),
        ("ignore_load_lr_and_optim=true", "ignore_load_lr_and_optim", True),
        ("lr_scheduler_type=linear", "kind", "linear"),
        ("learning_rate=0.5", "peak_lr", 0.5),
        ("warmup_steps=17", "warmup_steps", 17),
        ("min_lr=1e-4", "min_lr", 1e-4),
        ("num_cycles=1.5", "num_cycles", 1.5),
        ("lr_end=1e-5", "lr_end", 1e-5),
        ("power=2", "power", 2.0),
        ("decay_steps=19", "decay_steps", 19),
        ("wsd_decay_type=cosine", "decay_shape", "cosine"),
        ("weight_decay=0.3", "weight_decay", 0.3),
        ("adam_beta1=0.8", "beta1", 0.8),
        ("adam_beta2=0.97", "beta2", 0.97),
        ("adam_epsilon=1e-6", "epsilon", 1e-6),
        ("layerwise_lr_decay_bound=0.5", "layerwise_lr_decay_bound", 0.5),
    ],
)
def test_a_parameter_arrives(override: str, field: str, value: object) -> None:
    assert settings(load())[field] != value
    assert settings(load(override))[field] == value


def test_wsd_that_does_not_fit_into_the_run() -> None:
    config = load("lr_scheduler_type=wsd", "warmup_steps=40", "decay_steps=61")
    with pytest.raises(ConfigurationError, match=r"warmup_steps 40 \+ decay_steps 61 exceed the 100 steps"):
        schedule_from(config, 100)
    assert schedule_from(config, 101).total_steps == 101
