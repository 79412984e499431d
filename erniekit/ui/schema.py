"""The declared parameters as the form and the reference of the page need them."""

from __future__ import annotations

from typing import Any

from erniekit.config.parameter import Parameter
from erniekit.config.reference_docs import alias_target, attribute_rows, example_line
from erniekit.config.registry import SECTIONS
from erniekit.config.values import BOOLEAN, FLAG

# What most people set, in this order; the form shows them first, and the others by section.
FIRST = (
    "model_name_or_path", "stage", "output_dir", "train_dataset_path", "train_dataset_type", "eval_dataset_path",
    "eval_dataset_type", "max_seq_len", "packing", "num_train_epochs", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "lora", "lora_rank", "bf16",
    "device", "logging_steps", "eval_steps", "save_steps",
)  # fmt: skip


def schema() -> dict[str, Any]:
    """Return all sections with their parameters and aliases, as JSON holds them, and the names that come first."""
    sections = [
        {
            "key": section.key,
            "title": section.title,
            "summary": section.summary,
            "parameters": [_parameter(declared) for declared in section.parameters],
            "aliases": [
                {"name": alias.name, "meaning": alias.meaning, "target": alias_target(alias)}
                for alias in section.aliases
            ],
            "rules": [rule.text for rule in section.rules],
        }
        for section in SECTIONS
    ]
    return {"sections": sections, "first": FIRST}


def _parameter(declared: Parameter) -> dict[str, Any]:
    kind = "boolean" if declared.kind in (BOOLEAN, FLAG) else "choice" if declared.choices else "text"
    return {
        "name": declared.name,
        "meaning": declared.meaning,
        "kind": "text" if declared.kind.is_list else kind,
        "number": declared.kind.schema.get("type") in ("integer", "number"),
        "choices": list(declared.choices),
        "default": declared.default_text if not declared.required_for else "",
        "required": "train" in declared.required_for,
        "unit": declared.unit,
        "stages": list(declared.stages),
        "verbs": list(declared.verbs),
        "rows": attribute_rows(declared),
        "example": example_line(declared),
    }
