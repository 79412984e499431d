"""Every documented parameter of the original is declared, in its section, with its type and default."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from erniekit.config.registry import ALIASES, PARAMETERS, section_of

with (Path(__file__).parent / "reference.csv").open(encoding="utf-8") as file:
    REFERENCE = list(csv.DictReader(file))

UNDOCUMENTED = (
    "stage", "batch_size", "fine_tuning", "compute_type", "packing", "mix_strategy", "optim", "use_sp_callback",
    "num_nextn_predict_layers", "buffer_size", "max_shard_size", "hf_hub_id", "max_model_len", "port",
    "max_new_tokens", "top_p", "temperature", "use_attn_mask_start_row_indices", "resume_from_checkpoint",
    "overwrite_output_dir", "device", "max_grad_norm", "report_to", "normalize_logps", "dpop_lambda",
    "lora_path", "lora_target_modules", "lora_dropout", "dora", "lora_init", "ckpt_quant_stage",
    "hadamard_block_size", "quant_input_grad", "quant_weight_grad",
    "actscale_moving_rate", "fp8_format_type", "multi_token_pred_lambda", "no_recompute_layers",
    "moe_aux_loss_lambda", "moe_z_loss_lambda", "moe_orthogonal_loss_lambda", "fuse_rms_norm", "fuse_swiglu",
    "logging_strategy", "init_from_checkpoint", "fp16", "over_length_policy", "decay_steps", "wsd_decay_type",
    "data_cache_dir", "repetition_penalty", "top_k",
)  # fmt: skip


def test_the_reference_has_109_parameters() -> None:
    assert len({row["name"] for row in REFERENCE}) == 109


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: row["name"])
def test_documented_parameter_is_declared_where_documented(row: dict[str, str]) -> None:
    assert section_of(row["name"]).title.split()[0] == row["section"]


@pytest.mark.parametrize("row", [row for row in REFERENCE if row["default"] != "Required"], ids=lambda row: row["name"])
def test_documented_default_is_kept(row: dict[str, str]) -> None:
    parameter = PARAMETERS[row["name"]]
    documented: object = row["default"]
    if row["type"] == "bool" and row["default"] in ("True", "False"):
        documented = row["default"] == "True"
    read = parameter.read(documented)
    assert (tuple(read) if isinstance(read, list) else read) == parameter.default


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: row["name"])
def test_documented_type_can_be_written(row: dict[str, str]) -> None:
    parameter = PARAMETERS[row["name"]]
    types = {"bool": bool, "int": int, "float": float}
    if row["name"] == "apply_online_actscale_step":  # documented as bool with the default 200
        assert parameter.default == 200
    elif row["type"] == "str":
        assert isinstance(parameter.default, (str, tuple))
    elif row["default"] == "None":
        assert parameter.nullable
    else:
        assert type(parameter.default) is types[row["type"]]


@pytest.mark.parametrize("name", UNDOCUMENTED)
def test_undocumented_key_of_upstream_files_is_declared(name: str) -> None:
    assert name in PARAMETERS or name in ALIASES
