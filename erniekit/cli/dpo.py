"""`erniekit dpo CONFIG [name=value ...]`: `erniekit train` with `stage: DPO`."""

from __future__ import annotations

from erniekit.cli.ranks import parse_with_overrides
from erniekit.cli.train import load_config, train, train_parser
from erniekit.config import Config
from erniekit.config.stages import STAGES
from erniekit.errors import ConfigurationError


def run(arguments: list[str]) -> int:
    parser = train_parser(
        "dpo",
        "Train a model on pairs of a preferred and a rejected answer: `erniekit train` with stage: DPO.",
        "Example: erniekit dpo examples/configs/quickstart/dpo.yaml beta=0.2",
    )
    options = parse_with_overrides(parser, arguments)
    config = load_config(options, implied={"stage": "DPO"})
    require_pairs(config)
    return train("dpo", config, options)


def require_pairs(config: Config) -> None:
    """Raise ConfigurationError if the stage is not the one of `erniekit dpo`."""
    if config.stage is not STAGES["DPO"]:
        raise ConfigurationError(
            f"{config.origin('stage')}: `stage`: `erniekit dpo` cannot train stage {config.stage.name}\n"
            "  Use `erniekit train`, or set stage: DPO."
        )
