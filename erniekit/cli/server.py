"""`erniekit server MODEL`: answer others over HTTP, as OpenAI's API does."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.cli.generate import (
    HELP,
    MODEL_PARAMETERS,
    add_model_options,
    generation_parameters,
    load_model,
    model_folder,
    select_device,
)
from erniekit.cli.ranks import parse_with_overrides
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.serving import ServingParameters
from erniekit.errors import ConfigurationError
from erniekit.web.access import is_loopback
from erniekit.web.packages import require_packages

if TYPE_CHECKING:
    from erniekit.inference.engine import ChatModel
    from erniekit.inference.speaking.speaker import SpeechModel

KEY_VARIABLE = "ERNIEKIT_API_KEY"
SHORTEST_KEY = 8
SERVING = tuple(ServingParameters.__dataclass_fields__)


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit server",
        description="Answer others over HTTP with a trained model: /v1/chat/completions, /v1/completions, /v1/models, "
        "and with models that hear or speak /v1/audio/transcriptions and /v1/audio/speech, as OpenAI's API has them; "
        "/health, and /metrics for Prometheus. SIGTERM ends it: answers under way get some seconds.",
        epilog="Example: erniekit server output/quickstart/sft port=8000",
    )
    add_model_options(parser)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override those of a file"
    )
    parser.add_argument(
        "--adapters",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="further adapters of the model, which clients ask for by this name; may be given several times",
    )
    parser.add_argument("--codec", type=Path, metavar="DIR", help="of a model that speaks; default: its own")
    for name in SERVING:
        words = PARAMETERS[name].meaning.split(". ")[0].rstrip(".")
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{words} ({PARAMETERS[name].default!r})")
    for name, text in HELP.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{text}; where a request says nothing")
    options = parse_with_overrides(parser, arguments)
    parameters = generation_parameters(options, "server", (*SERVING, *HELP, *MODEL_PARAMETERS))
    require_packages("server")
    return _serve(options, parameters)


def _serve(options: argparse.Namespace, parameters: Config) -> int:
    from erniekit.web.listen import bind

    adapters = _adapter_folders(options.adapters)
    key = api_key(parameters.serving)
    listening = bind(parameters.serving.host, parameters.serving.port)
    with listening:
        select_device(parameters)
        from erniekit.inference.engine import sampling_from
        from erniekit.serving.open import Loading, open_served, run

        folder = model_folder(options, parameters)
        name = parameters.serving.served_model_name or folder.expanduser().absolute().name

        def load() -> ChatModel | SpeechModel:
            select_device(parameters)  # Paddle keeps the device of each thread
            return _load(options, parameters, folder)

        served = open_served(
            Loading(load, name, adapters),
            parameters.serving,
            sampling_from(parameters.generation, parameters.training.seed),
            parameters.speaking,
        )
        run(served, listening, parameters.serving, key)
    return 0


def _load(options: argparse.Namespace, parameters: Config, folder: Path) -> ChatModel | SpeechModel:
    """Load a model that writes text, or one that speaks."""
    from erniekit.build.checks import answering_folders
    from erniekit.inference.speaking.speaker import SpeechModel
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.storage.model_folder import is_program_folder

    speaks = False
    if not is_program_folder(folder):
        base, _ = answering_folders(folder, options.lora_path)
        config = ModelConfig.from_folder(base, parameters.basic.ignore_config_keys)
        speaks = config.architecture.codes is not None
    if not speaks:
        return load_model(options, parameters)
    return SpeechModel.load(
        folder,
        adapters=options.lora_path,
        codec=None if options.codec is None else options.codec.expanduser(),
        seed=parameters.training.seed,
        ignored_keys=parameters.basic.ignore_config_keys,
        device=parameters.basic.device,
    )


def api_key(serving: ServingParameters) -> str:
    """Return the key that clients have to send; "" where none is asked for.

    Raises:
        ConfigurationError: others could ask without a key, or its file cannot be read.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if serving.api_key_file:
        path = Path(serving.api_key_file).expanduser()
        try:
            key = next(iter(path.read_text(encoding="utf-8").splitlines()), "").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(f"api_key_file: {path} cannot be read: {why}") from None
        if not key:
            raise ConfigurationError(f"api_key_file: {path}: its first line is empty; write a key there")
    if key and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigurationError(
            f"the API key has {len(key)} characters; it needs at least {SHORTEST_KEY}, of ASCII and without spaces\n"
            "  Make one: openssl rand -hex 16"
        )
    if not key and not is_loopback(serving.host):
        raise ConfigurationError(
            f"host: {serving.host}: others reach this address, and nobody is asked for a key\n"
            f"  Write a key into a file and name it with api_key_file, or into the variable {KEY_VARIABLE}; or leave "
            "host at 127.0.0.1."
        )
    return key


def _adapter_folders(words: list[str]) -> dict[str, Path]:
    """Return the folders of `--adapters NAME=FOLDER` by their names.

    Raises:
        ConfigurationError: a word has no name or no folder, or two have one name.
    """
    folders: dict[str, Path] = {}
    for word in words:
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise ConfigurationError(f"--adapters {word}: expected NAME=FOLDER, such as brief=output/brief")
        if name in folders:
            raise ConfigurationError(f"--adapters {word}: {name} stands for {folders[name]} already")
        folders[name] = Path(folder).expanduser()
    return folders
