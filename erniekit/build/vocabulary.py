"""Tokens that a run adds: the tokenizer with them, the model that has rows for them, and what else must have the same.

Everything that opens the tokenizer of `model_name_or_path` takes its folder from here. The folder of a trained model
holds the tokenizer with the added tokens, so what reads that one needs none of this. Needs no Paddle, except for
vocabularies that only paddlenlp reads.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import yaml

from erniekit.build.speech_tokens import control_tokens_of
from erniekit.build.step_count import cache_folder
from erniekit.config import Config
from erniekit.config.sections.vocabulary import expanded_tokens
from erniekit.data.tokenizers.extend import ExtendedTokenizer, declared_ids, extend_tokenizer
from erniekit.data.tokenizers.files import CONFIG_FILE
from erniekit.errors import CheckpointError, ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.vocabulary import MEAN, NORMAL, grow, grown_vocabulary

logger = logging.getLogger(__name__)

MOST_NAMED = 3  # tokens in a message
LONGEST_SHOWN = 200  # characters of a parameter in a message


def added_tokens(config: Config, folder: Path) -> list[str]:
    """Return the tokens of `added_tokens` and `added_token_ranges` in the order of their ids, behind those of which
    documents of speech consist.

    Args:
        folder: of the model.

    Raises:
        UserError: the codes of stage TTS are not known.
    """
    tokens = expanded_tokens(config.vocabulary.added_tokens, config.vocabulary.added_token_ranges)
    control = control_tokens_of(config, folder)
    return [*control, *(token for token in tokens if token not in control)]


def extended_tokenizer(config: Config, folder: Path) -> ExtendedTokenizer | None:
    """Return the tokenizer in `folder` with the tokens that the run adds; None if it adds none.

    Raises:
        UserError: a token cannot be added, or the tokenizer cannot be used; see `extend_tokenizer`.
    """
    tokens = added_tokens(config, folder)
    return extend_tokenizer(folder, tokens, cache_folder(config)) if tokens else None


def run_tokenizer_folder(config: Config, folder: Path) -> Path:
    """Return the folder of the run's tokenizer, whose model is in `folder`.

    Raises:
        UserError: see `extended_tokenizer`.
    """
    extended = extended_tokenizer(config, folder)
    return folder if extended is None else extended.folder


def with_added_tokens(config: Config, model_config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder` with rows for the tokens that the run adds.

    Raises:
        UserError: see `extended_tokenizer`.
    """
    extended = extended_tokenizer(config, folder)
    if extended is None or not extended.count:
        return model_config
    vocabulary = grown_vocabulary(
        model_config,
        extended.first,
        extended.count,
        init=MEAN if config.vocabulary.new_token_init == "mean" else NORMAL,
        seed=config.training.seed,
        trained=config.vocabulary.train_added_tokens or not config.lora.lora,
    )
    return grow(model_config, vocabulary)


def tell_added_tokens(config: Config, folder: Path) -> None:
    """Log what became of the tokens that the run adds to the tokenizer in `folder`."""
    extended = extended_tokenizer(config, folder)
    if extended is None:
        return
    new = f"{extended.count:,} new, ids {extended.first} to {extended.first + extended.count - 1}"
    rows = ", whose rows stay frozen beside adapters" if config.lora.lora else ""
    kept = f"{extended.kept:,} that the tokenizer has already{rows}"
    logger.info(f"added tokens: {'; '.join(([new] if extended.count else []) + ([kept] if extended.kept else []))}")
    if extended.control:
        logger.warning(
            f"added tokens: {_named(extended.control)}: control tokens of the model stay so; records cannot hold them"
        )
    if extended.ambiguous:
        pairs = ", ".join(f"{longer!r} begins with {token!r}" for token, longer in extended.ambiguous[:MOST_NAMED])
        logger.warning(f"added tokens: {pairs}; where both could be read in a text, the longer one is")


def refuse_other_tokens(config: Config, model: Path, folder: Path, parameter: str) -> None:
    """Raise an error if what a run goes on with, or starts from, has other added tokens than the run.

    A folder without a tokenizer says nothing of it. A model or adapters to which no token was added may get some.

    Args:
        model: the folder of the run's model.
        folder: a checkpoint, a model's or that of adapters.
        parameter: the parameter that named it.

    Raises:
        CheckpointError: `folder` is a checkpoint that the run resumes from.
        ModelFileError: it is a folder that the run starts from.
    """
    found, resumes = declared_ids(folder), parameter == "resume_from_checkpoint"
    if not found and not (resumes and (folder / CONFIG_FILE).is_file()):
        return
    own = declared_ids(run_tokenizer_folder(config, model))
    differing = [text for text in {**found, **own} if found.get(text) != own.get(text)]
    lines = [
        f"  - {text!r}: {_token(found.get(text))} there, {_token(own.get(text))} in this run" for text in differing
    ]
    if not lines:
        return
    more = [f"  - and {len(lines) - MOST_NAMED:,} more"] if len(lines) > MOST_NAMED else []
    raise (CheckpointError if resumes else ModelFileError)(
        f"{parameter}: {folder}: the vocabulary there grew in another way than this run asks for\n"
        + "\n".join(lines[:MOST_NAMED] + more)
        + f"\n  {_remedy(config, folder)}{', or choose another output_dir' if resumes else ''}."
    )


def _remedy(config: Config, folder: Path) -> str:
    """Return what to write: the parameters of the run that wrote a folder, as far as it says what they were."""
    path = folder / "training_config.yaml"
    stored = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = ("added_tokens", "added_token_ranges")
    if all(list(stored.get(name) or ()) == list(getattr(config.vocabulary, name)) for name in names):
        return "The added tokens are the same, so it is another tokenizer: use the model folder of that run as it was"
    lines = [f"{name}: {json.dumps(stored[name], ensure_ascii=False)}" for name in names if stored.get(name)]
    if lines and all(len(line) <= LONGEST_SHOWN for line in lines):
        return f"Write {' and '.join(lines)}"
    return "Write added_tokens and added_token_ranges as in the run that wrote that folder"


def _token(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def _named(texts: tuple[str, ...]) -> str:
    more = f" and {len(texts) - MOST_NAMED:,} more" if len(texts) > MOST_NAMED else ""
    return ", ".join(map(repr, texts[:MOST_NAMED])) + more
