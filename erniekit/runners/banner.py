"""The first lines of a run: version, stage, model, output folder. Needs no Paddle, so they appear at once."""

from __future__ import annotations

from erniekit.config import Config
from erniekit.environment import package_versions


def first_lines(config: Config) -> list[str]:
    """Return what a run is, before anything is loaded."""
    erniekit, *others = (
        f"{'ERNIEKit' if name == 'erniekit' else name} {version}"
        for name, version in package_versions().items()
        if name != "numpy"
    )
    model = config.basic.model_name_or_path + ("" if config.basic.continue_training else " from random weights")
    adapters = " with LoRA" if config.lora.lora else ""
    return [
        ", ".join([erniekit, *others]),
        f"  {config.stage.name} of {model}{adapters}, into {config.basic.output_dir}",
    ]
