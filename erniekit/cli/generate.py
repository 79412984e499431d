"""`erniekit generate MODEL --prompt TEXT`: answer prompts with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.quantization import quantization_from
from erniekit.build.tokenizer import speech_of
from erniekit.cli.ranks import model_argument, parse_with_overrides
from erniekit.config import Config
from erniekit.config.object_urls import is_url
from erniekit.config.sections.basic import template_variables
from erniekit.config.sections.generation import GenerationParameters
from erniekit.environment import import_paddle
from erniekit.errors import ConfigurationError
from erniekit.hub.cache import HUBS, chosen_hub
from erniekit.hub.download import find_model_folder
from erniekit.hub.fetched import fetch_model
from erniekit.model.quantization.settings import Fp8, WeightOnly
from erniekit.terminal import escape_control_characters

if TYPE_CHECKING:
    from erniekit.data.media.clip import Clip
    from erniekit.data.templates.transcription import Speech
    from erniekit.inference.engine import ChatModel

CONFIGURATIONS = (".yaml", ".yml", ".json")
HELP = {
    "max_new_tokens": "longest answer",
    "temperature": "0 always takes the most likely token (greedy)",
    "top_p": "sample from this much probability",
    "top_k": "sample from this many tokens; 0 is off",
    "repetition_penalty": "1 is off",
    "max_model_len": "maximum tokens of prompt and answer together; a longer dialogue forgets its oldest turns",
}


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit generate",
        description="Answer prompts with a trained model.",
        epilog='Example: erniekit generate output/quickstart/sft --prompt "What is 2 + 3?" --temperature 0',
    )
    add_model_arguments(parser)
    prompt_group = parser.add_mutually_exclusive_group()
    prompt_group.add_argument("--prompt", action="append", help="a user's message; may be given several times")
    prompt_group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt on each line; or .jsonl with records in the format messages, erniekit or alpaca",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the answers to --prompts to this file, as JSON lines (default: print them)",
    )
    parser.add_argument(
        "--audio",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="recordings that stand before each --prompt in the user's message; without a prompt one recording is "
        "transcribed (several, or long ones: erniekit transcribe)",
    )
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    options = parse_with_overrides(parser, arguments)
    _check_words(parser, options)
    parameters = generation_parameters(options)
    if options.prompts:
        return _answer_file(options, parameters)
    select_device(parameters)
    from erniekit.inference.engine import sampling_from

    model = load_model(options, parameters)
    sampling = sampling_from(parameters.generation, parameters.training.seed)
    prompts = options.prompt or [""]
    answers = model.answer(prompts, sampling, system=options.system, raw=options.raw, clips=_clips(options.audio))
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answers) > 1:
            print(f"> {escape_control_characters(prompt)}")
        print(escape_control_characters(answer))
    return 0


def _check_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message about options that do not go together."""
    if not (options.prompt or options.prompts or options.audio):
        parser.error("one of the arguments --prompt --prompts --audio is required")
    if options.audio and options.prompts:
        parser.error("--audio belongs to --prompt; the records of --prompts name their own recordings (`audios`)")
    if options.audio and len(options.audio) > 1 and not options.prompt:
        parser.error(
            "--audio with several recordings needs --prompt TEXT; `erniekit transcribe` writes down each of them"
        )
    if options.raw and (options.system or options.audio):
        other = "--system" if options.system else "--audio"
        parser.error(
            f"--raw continues the text without the chat template, and {other} needs the template; drop one of them"
        )
    if options.output and not options.prompts:
        parser.error("--output needs --prompts FILE; answers to --prompt are printed")


def _clips(paths: Sequence[Path] | None) -> list[Clip]:
    from erniekit.data.media.clip import Clip

    return [Clip(str(path.expanduser().absolute())) for path in paths or ()]


def _answer_file(options: argparse.Namespace, parameters: Config) -> int:
    from erniekit.inference.prompts import read_prompts

    prompts = read_prompts(options.prompts.expanduser(), parameters.training.media_dir)
    select_device(parameters)
    from erniekit.inference.batch import answer_records, check_output, encode_prompts, write_record, write_records
    from erniekit.inference.engine import sampling_from

    if options.output:
        check_output(options.output)
    model = load_model(options, parameters)
    sampling = sampling_from(parameters.generation, parameters.training.seed)
    encoded = encode_prompts(model, prompts, options.prompts, sampling, system=options.system, raw=options.raw)
    records = answer_records(model, prompts, encoded, sampling)
    if options.output:
        write_records(records, options.output)
        print(escape_control_characters(f"{options.output}: {len(prompts):,} answers"))
    else:
        for record in records:
            write_record(record, sys.stdout)
    return 0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `generate` and `chat` share; defaults and bounds come from the schema."""
    add_model_options(parser)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override those of a file"
    )
    parser.add_argument("--system", default="", help="system text that goes before the dialogue")
    parser.add_argument("--seed", help="seed of sampling (default 42)")
    defaults = GenerationParameters()
    for name, text in HELP.items():
        default = getattr(defaults, name)
        shown = "the model's limit" if default is None else default
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{text} (default {shown})")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options that say how it is loaded, and what its chat template is told."""
    add_source_options(parser)
    parser.add_argument("--enable-thinking", metavar="BOOL", help="for chat templates that have this switch")
    parser.add_argument(
        "--chat-template-kwargs", metavar="NAME=VALUE", help="variables of the chat template, with commas between them"
    )


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options that say how it is loaded."""
    parser.add_argument(
        "model",
        type=model_argument,
        help="a model folder, an output_dir, a checkpoint, an exported program, a model of a hub, or a YAML or JSON "
        "file: the configuration of a run, or one with model_name_or_path",
    )
    hubs = parser.add_mutually_exclusive_group()
    for hub in HUBS:
        hubs.add_argument(
            f"--{hub.parameter.replace('_', '-')}", action="store_true", help=f"fetch the model from {hub.title}"
        )
    parser.add_argument(
        "--lora-path",
        type=model_argument,
        metavar="FOLDER",
        help="adapters for the model, in the format of PEFT or paddlenlp",
    )
    parser.add_argument(
        "--ignore-config-keys", metavar="KEYS", help="keys of the model's config.json that change nothing: a,b"
    )
    parser.add_argument("--device", help="auto, cpu, gpu or gpu:N (default auto)")


MODEL_PARAMETERS = ("device", "ignore_config_keys", "enable_thinking", "chat_template_kwargs")


def generation_parameters(
    options: argparse.Namespace, verb: str = "generate", names: Sequence[str] = (*HELP, "seed", *MODEL_PARAMETERS)
) -> Config:
    """Return the options, over the values of a configuration file if MODEL is one, as validated parameters."""
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given |= {hub.parameter: "true" for hub in HUBS if getattr(options, hub.parameter)}
    words = [*options.overrides, *(f"{name}={value}" for name, value in given.items())]
    if not (options.model.suffix.lower() in CONFIGURATIONS and options.model.is_file()):
        return Config.load(None, words, verb=verb)
    config = Config.load(options.model, words, verb=verb)
    for line in () if _is_of_a_run(config) else config.messages:  # what a run was told is said by the run
        print(escape_control_characters(line), file=sys.stderr)
    return config


def _is_of_a_run(config: Config) -> bool:
    """Return whether a file is the configuration of a run, so that the model is the one that the run has left."""
    return bool(config.training.train_dataset_path) and config.origin("model_name_or_path") != "command line"


def model_folder(options: argparse.Namespace, parameters: Config) -> Path:
    """Return the folder of MODEL, or of the model that a file names; download it first if a hub is chosen.

    Raises:
        ConfigurationError: the file names no model.
    """
    hub = chosen_hub(parameters)
    if parameters.path is None:
        return options.model if hub is None else find_model_folder(str(options.model), hub, parameter="MODEL")
    name = parameters.basic.output_dir if _is_of_a_run(parameters) else parameters.basic.model_name_or_path
    if not name:
        raise ConfigurationError(
            f"{parameters.path}: it names no model\n  Write `model_name_or_path: FOLDER` into it, or name a folder: "
            "erniekit chat output/quickstart/sft"
        )
    if is_url(name):
        return fetch_model(name, weights=True)
    if hub is None or _is_of_a_run(parameters):
        return Path(name).expanduser()
    return find_model_folder(name, hub, parameter="model_name_or_path")


def load_model(options: argparse.Namespace, parameters: Config, asr_prompt: str | None = None) -> ChatModel:
    """Load MODEL, with its adapters.

    Args:
        asr_prompt: the words that ask it for a transcript; None: those of the run that trained it.
    """
    from erniekit.inference.engine import ChatModel

    return ChatModel.load(
        model_folder(options, parameters),
        adapters=options.lora_path,
        ignored_keys=parameters.basic.ignore_config_keys,
        template_variables=template_variables(parameters.basic),
        quantization=_weights_in_few_bits(parameters),
        asr_prompt=asr_prompt,
        speech=_speech(parameters),
    )


def _speech(parameters: Config) -> Speech | None:
    """Return how units of speech stand in dialogues, where the command says so."""
    names = ("dialogue_template", "unit_token", "correspond_token")
    return speech_of(parameters) if any(map(parameters.is_set, names)) else None


def _weights_in_few_bits(parameters: Config) -> WeightOnly | None:
    if _is_of_a_run(parameters):  # what it has left says how its weights are stored
        return None
    quantization = quantization_from(parameters)
    if isinstance(quantization, Fp8):
        raise ConfigurationError(
            f"{parameters.origin('weight_quantize_algo')}: `weight_quantize_algo`: answers are not computed through "
            "8-bit floats; write weight_only_int8, weight_only_int4, weight_only_mix or nf4"
        )
    return quantization


def select_device(parameters: Config) -> None:
    """Import Paddle, and select the device and the kernels of a CPU."""
    import_paddle()
    from erniekit.model.device import use_device
    from erniekit.model.native import use_kernels

    use_device(parameters.basic.device)
    use_kernels(parameters.acceleration.cpu_kernels)
