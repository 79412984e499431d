"""What the loop reads from the configuration, as frozen objects, so that it can be run without a configuration file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.training.early_stopping import BestSettings
from erniekit.training.optim.adamw import OptimizerSettings
from erniekit.training.optim.schedules import Schedule


@dataclass(frozen=True)
class TrainingSettings:
    """Names are parameter names; `docs/parameters/` says what they mean."""

    output_dir: Path
    total_steps: int
    seed: int = 42
    max_grad_norm: float = 1.0
    dropout_warmup_steps: int = 0
    release_grads: bool = False
    logging_strategy: str = "steps"  # steps | epoch | no
    logging_steps: int = 10
    evaluation_strategy: str = "no"  # steps | epoch | no; "no" also stands for do_eval: false
    eval_steps: int = 0
    max_evaluate_steps: int = 0
    best: BestSettings = field(default_factory=BestSettings)
    save_strategy: str = "no"  # steps | epoch | no
    save_steps: int = 0
    save_total_limit: int | None = None
    async_save: bool = False
    ckpt_quant_stage: str = "O0"  # also stands for disable_ckpt_quant: true
    ignore_save_lr_and_optim: bool = False
    ignore_load_lr_and_optim: bool = False


def is_due(strategy: str, every: int, finished_steps: int, *, epoch_ended: bool, last: bool) -> bool:
    """Whether something with this strategy (steps, epoch, no) happens after `finished_steps` updates.

    After the `last` update everything that happens at all happens once more, so that the end of a run is covered.
    """
    if strategy == "no":
        return False
    return last or (epoch_ended if strategy == "epoch" else every > 0 and finished_steps % every == 0)


def settings_from(config: Config, total_steps: int) -> TrainingSettings:
    """The loop's settings from a validated configuration; `total_steps` is known once the data has been read."""
    value = config.__getitem__
    return TrainingSettings(
        output_dir=Path(value("output_dir")).expanduser(),
        total_steps=total_steps,
        seed=value("seed"),
        max_grad_norm=value("max_grad_norm"),
        dropout_warmup_steps=value("dropout_warmup_steps"),
        release_grads=value("release_grads"),
        logging_strategy=value("logging_strategy"),
        logging_steps=value("logging_steps"),
        evaluation_strategy=value("evaluation_strategy") if value("do_eval") else "no",
        eval_steps=value("eval_steps"),
        max_evaluate_steps=value("max_evaluate_steps"),
        best=BestSettings(
            metric_for_best_model=value("metric_for_best_model"),
            greater_is_better=value("greater_is_better"),
            patience=value("early_stopping_patience"),
            threshold=value("early_stopping_threshold"),
            load_best_model_at_end=value("load_best_model_at_end"),
        ),
        save_strategy=value("save_strategy"),
        save_steps=value("save_steps"),
        save_total_limit=value("save_total_limit"),
        async_save="async_save" in value("unified_checkpoint_config"),
        ckpt_quant_stage="O0" if value("disable_ckpt_quant") else value("ckpt_quant_stage"),
        ignore_save_lr_and_optim=value("ignore_save_lr_and_optim"),
        ignore_load_lr_and_optim=value("ignore_load_lr_and_optim"),
    )


def schedule_from(config: Config, total_steps: int) -> Schedule:
    """The learning-rate schedule from a validated configuration.

    Raises:
        ConfigurationError: warm-up and decay do not fit into the run, whose length is only known with the data.
    """
    value = config.__getitem__
    if value("lr_scheduler_type") == "wsd" and value("warmup_steps") + value("decay_steps") > total_steps:
        raise ConfigurationError(
            f"warmup_steps {value('warmup_steps')} + decay_steps {value('decay_steps')} exceed the {total_steps} steps "
            "of this run\n  Shorten one of them, or train longer (num_train_epochs, max_steps)."
        )
    return Schedule(
        kind=value("lr_scheduler_type"),
        peak_lr=value("learning_rate"),
        total_steps=total_steps,
        warmup_steps=value("warmup_steps"),
        min_lr=value("min_lr"),
        num_cycles=value("num_cycles"),
        lr_end=value("lr_end"),
        power=value("power"),
        decay_steps=value("decay_steps"),
        decay_shape=value("wsd_decay_type"),
    )


def optimizer_settings_from(config: Config, num_layers: int) -> OptimizerSettings:
    """AdamW's constants from a validated configuration."""
    value = config.__getitem__
    return OptimizerSettings(
        weight_decay=value("weight_decay"),
        beta1=value("adam_beta1"),
        beta2=value("adam_beta2"),
        epsilon=value("adam_epsilon"),
        layerwise_lr_decay_bound=value("layerwise_lr_decay_bound"),
        num_layers=num_layers,
        lora_plus_scale=value("lora_plus_scale") if value("lora") else 1.0,
    )
