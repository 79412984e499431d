"""Export a trained model to a folder that others load: Hugging Face files or a saved program.

Weights stream from the trained files to the new ones, so that only one tensor at a time is in memory. The result is
loaded back and compared with the trained model on a few prompts before the folder gets its name.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.checks import has_tokenizer
from erniekit.build.quantization import base_of_adapters
from erniekit.config import Config
from erniekit.data.templates.ernie import published_files
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.errors import ModelFileError
from erniekit.export.logit_difference import PROMPTS, compare, encode, fits_in_memory, prompt_logits
from erniekit.export.model_card import (
    MODEL_CARD_FILE,
    USE_PROGRAM,
    USE_REWARD_MODEL,
    USE_SPEAKER,
    USE_WEIGHTS,
    model_card,
    use_of_listener,
)
from erniekit.export.onnx import check_onnx_packages, write_onnx
from erniekit.export.publish import check_target, publish
from erniekit.export.quantized import Float8Format, linear_weight_shapes, weight_format_from
from erniekit.export.speech import copy_codec, copy_text_reading, refuse_adapters_of_levels
from erniekit.export.static_program import write_program
from erniekit.export.trained_model import TrainedModel, find_trained_model, trained_config
from erniekit.export.trained_weights import (
    TYPE_NAMES,
    open_trained_weights,
    reference_types,
    stored_types,
    write_weights,
)
from erniekit.hub.upload import check_upload, upload
from erniekit.json_files import read_json_object
from erniekit.manifest import MANIFEST
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.model_config import CONFIG_FILE, ModelConfig, stored_type
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.device import use_device
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.lora.lora import load_adapters, merge_adapters
from erniekit.model.native import use_kernels
from erniekit.model.processor_files import write_processor_files
from erniekit.model.quantization.fp8 import read_averages, write_averages
from erniekit.model.quantization.settings import Fp8
from erniekit.model.storage.packed_tensors import CONFIG_KEY
from erniekit.model.weights import copy_companion_file

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"
HUGGING_FACE, INFERENCE, ONNX = FORMATS = "hf", "inference", "onnx"
SPEAKS = "writes codes, and programs (--format FORM) write text only"

_USE = {
    HUGGING_FACE: USE_WEIGHTS,
    INFERENCE: USE_PROGRAM.replace("OPENING", "from erniekit.export.static_program import open_program as open_it"),
    ONNX: USE_PROGRAM.replace("OPENING", "from erniekit.export.onnx import open_onnx as open_it"),
}

Facts = Mapping[str, str]  # about the files written, for the model card


def _use(architecture: Architecture, parameters: Mapping[str, Any], form: str) -> str:
    """Return how to use the files of a model; Markdown."""
    if architecture.audio is not None:
        return use_of_listener(architecture.transformers_class, parameters)
    return USE_SPEAKER if architecture.codes is not None else _USE[form]


def export_model(
    named: Path, target: Path, config: Config, *, form: str = HUGGING_FACE, dtype: str | None = None
) -> None:
    """Export the trained model that `named` refers to into the folder `target`; merge adapters into their base model.

    Args:
        named: a configuration file of a run, its `output_dir`, or a checkpoint; full weights or adapters.
        form: "hf" for what `transformers` and this project load, "inference" for a program of Paddle's inference
            engine, "onnx" for ONNX.
        dtype: "float32", "bfloat16" or "float16"; None for the type that the base model is stored in. Programs
            compute in float32.

    Raises:
        UserError: there is no complete model, the target is not empty, a file is damaged, the disk is full, or the
            exported model does not compute the same logits as the trained model.
    """
    for line in config.messages:
        logger.info(line)
    repository = config.checkpoint.hf_hub_id
    model = find_trained_model(named, config)
    sources = [folder for folder in (model.folder, model.base) if folder]
    # In a configuration file the parameter is about the run's output_dir, not about this folder.
    asked = config.origin("overwrite_output_dir") == "command line"
    check_target(target, sources, overwrite=asked and config.basic.overwrite_output_dir)
    if target.is_dir() and any(target.iterdir()):
        logger.info(f"overwrite_output_dir: replacing the model in {target}")
    if form == ONNX:
        check_onnx_packages()
    if repository:
        check_upload(repository)
    use_device(config.basic.device)
    use_kernels(config.acceleration.cpu_kernels)
    shape = trained_config(model)
    architecture = shape.architecture
    if shape.scored and form != HUGGING_FACE:
        what = f"gives scores, and programs (--format {form}) write text only; leave --format out"
        raise ModelFileError(f"{model.model_folder}: the model {what}")
    listens, speaks = architecture.audio is not None, architecture.codes is not None
    if (listens or speaks) and form != HUGGING_FACE:
        what = "listens to recordings, and programs (--format FORM) read text only" if listens else SPEAKS
        raise ModelFileError(f"{model.model_folder}: the model {what.replace('FORM', form)}; leave --format out")
    if speaks:
        refuse_adapters_of_levels(model)
    tokenizer_folder = next((folder for folder in sources if has_tokenizer(folder)), model.folder)
    tokenizer = load_tokenizer(tokenizer_folder)

    def write(folder: Path) -> None:
        if form == HUGGING_FACE:
            facts = _write_hugging_face(folder, model, tokenizer, config, dtype)
        else:
            facts = _write_program(folder, model, tokenizer, form)
        trained_dialogues = model.parameters.get("stage") != "PT" and not speaks
        for source in published_files(tokenizer) if trained_dialogues else tokenizer.files:
            copy_companion_file(source, folder)
        card = model_card(
            name=target.resolve().name,
            base=model.base_name,
            base_folder=model.base,
            is_adapter_merged=model.is_adapter,
            parameters=model.parameters,
            results=model.results,
            facts=facts,
            use=USE_REWARD_MODEL if shape.scored else _use(architecture, model.parameters, form),
            library="transformers" if form == HUGGING_FACE and not speaks else None,
            listens=listens,
        )
        (folder / MODEL_CARD_FILE).write_text(card, encoding="utf-8")

    publish(target, write)
    logger.info(f"{target}: complete")
    if repository:
        upload(target, repository)


def open_trained_decoder(model: TrainedModel, model_config: ModelConfig, fp8_settings: Fp8 | None = None) -> Decoder:
    """Load the trained model into memory, with its adapters on top of the base weights.

    Args:
        fp8_settings: compute through these 8-bit floats; None: compute as the model is stored, for adapters on top
            of weights quantized as in training.

    Raises:
        ModelFileError: the adapters belong to another base model.
    """
    base = base_of_adapters(model.parameters) if model.is_adapter else None
    decoder = build_model(model_config, model.model_folder, quantization=fp8_settings or base)
    if fp8_settings is not None:
        decoder.activation_scales.restore(read_averages(model.folder))
    if model.is_adapter and not load_adapters(decoder, model.folder):
        raise ModelFileError(
            f"{model.folder}: these adapters were trained on top of other weights than those in {model.model_folder}.\n"
            "  Set the folder of their base model as base_model_name_or_path into "
            f"{model.folder / ADAPTER_CONFIG_FILE}, and remove {MANIFEST} there, which lists the file as it was."
        )
    return decoder


def _write_hugging_face(
    folder: Path, model: TrainedModel, tokenizer: Tokenizer, config: Config, dtype: str | None
) -> Facts:
    weights = open_trained_weights(model)
    reference, reference_dtypes = reference_types(model, weights.config)
    architecture = weights.config.architecture
    form = weight_format_from(config, model, architecture)
    quantized_weights = linear_weight_shapes(weights.config) if form else {}
    floats = [name for name in weights.shapes if name not in quantized_weights]
    types = stored_types(architecture, floats, reference_dtypes, dtype)
    counts = Counter(TYPE_NAMES[stored] for stored in types.values())
    usual = counts.most_common(1)[0][0]
    reason = "as asked for" if dtype else f"as {reference} is stored; --dtype chooses another"
    logger.info(f"dtype: {usual}, {reason}")
    if form is not None:
        logger.info(f"linear weights: {form}")
    fp8_settings = form.fp8_settings() if isinstance(form, Float8Format) else None
    measure = _logit_comparison(model, weights.config, tokenizer, fp8_settings)
    written = write_weights(folder, weights, types, int(config.checkpoint.max_shard_size * 10**9), form)
    size = sum(path.stat().st_size for path in written)
    logger.info(f"weights: {len(weights.shapes):,} tensors, {size / 1e9:.3g} GB, files: {len(written)}")
    quantized = {CONFIG_KEY: form.config(quantized_weights)} if form else {}
    _write_json(folder / CONFIG_FILE, {**weights.config.to_json(), **stored_type(usual), **quantized})
    if isinstance(form, Float8Format):
        write_averages(folder, form.averages)  # read by FP8 runs; others read `input_scale`
    _write_json(folder / GENERATION_CONFIG_FILE, _generation_config(model, weights.config, tokenizer))
    if architecture.audio is not None:
        sources = [source for source in (model.folder, model.base) if source]
        write_processor_files(folder, sources, architecture.audio(weights.config))
    if architecture.codes is not None:
        copy_codec(model, folder)
        copy_text_reading(model, folder)
    difference = measure(folder)
    logger.info(f"logits compared with the trained model's: {difference}")
    return {
        **_shape_facts(weights.config),
        "stored as": ", ".join(f"{name} ({count:,} tensors)" for name, count in counts.most_common()),
        **({"linear weights": str(form)} if form else {}),
        "logits compared with the trained model's": difference,
    }


def _logit_comparison(
    model: TrainedModel, model_config: ModelConfig, tokenizer: Tokenizer, fp8_settings: Fp8 | None
) -> Callable[[Path], str]:
    """Compute the trained model's logits; return a function that compares an exported folder with them.

    Args:
        fp8_settings: 8-bit floats through which both models compute, with the scales measured in training.

    Raises:
        ModelFileError: the adapters belong to another base model.
    """
    if not fits_in_memory(model_config):
        size = 4e-9 * model_config.parameter_count()
        return lambda folder: f"not measured: {size:.3g} GB of float32 weights do not fit into memory"
    prompts = [encode(tokenizer, text) for text in PROMPTS]
    expected = _expected_logits(open_trained_decoder(model, model_config, fp8_settings), prompts, model)

    def measure(folder: Path) -> str:
        exported = build_model(ModelConfig.from_folder(folder), folder, quantization=fp8_settings)
        return str(compare(expected, prompt_logits(exported, prompts))) + ", both through 8-bit floats" * bool(
            fp8_settings
        )

    return measure


def _expected_logits(decoder: Decoder, prompts: Sequence[Sequence[int]], model: TrainedModel) -> list[np.ndarray]:
    logits = prompt_logits(decoder, prompts)
    if not all(np.isfinite(values).all() for values in logits):
        raise ModelFileError(
            f"{model.folder}: the model computes logits that are not finite, so its weights are damaged or its "
            "training has diverged.\n  Export an earlier checkpoint of it."
        )
    return logits


def _write_program(folder: Path, model: TrainedModel, tokenizer: Tokenizer, form: str) -> Facts:
    model_config = trained_config(model)
    decoder = open_trained_decoder(model, model_config)
    prompts = [encode(tokenizer, text) for text in PROMPTS]
    expected = _expected_logits(decoder, prompts, model)
    if model.is_adapter:
        merge_adapters(decoder)
    if any(map(model_config.is_moe_layer, range(model_config.num_hidden_layers))):
        logger.info(
            "mixture of experts: a program computes every expert for every token, because groups have no fixed size"
        )
    write_files = write_onnx if form == ONNX else write_program
    difference = write_files(decoder, folder, prompts, expected)
    logger.info(f"logits compared with the trained model's: {difference}")
    _write_json(folder / GENERATION_CONFIG_FILE, _generation_config(model, model_config, tokenizer))
    return {
        **_shape_facts(model_config),
        "form": "ONNX" if form == ONNX else "Paddle inference program",
        "logits compared with the trained model's": str(difference),
    }


def _generation_config(model: TrainedModel, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the trained model's file holds; where that and the configuration name no end token, the tokenizer's,
    because `transformers` generates without end then."""
    path = model.file(GENERATION_CONFIG_FILE)
    stored = config.to_json()
    ids: dict[str, Any] = {
        name: stored[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in stored
    }
    return {"eos_token_id": tokenizer.eos_id, **ids, **({} if path is None else read_json_object(path))}


def _shape_facts(model_config: ModelConfig) -> Facts:
    return {"model type": model_config.model_type, "parameters": f"{model_config.parameter_count():,}"}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
