"""The control tokens that documents of speech consist of beside their texts, and their ids in a tokenizer.

Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.build.speech import KIND_OF, codec_of_run
from erniekit.config import Config
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.architectures.model_config import CONFIG_FILE
from erniekit.model.architectures.speaking import (
    LANGUAGE_END,
    LANGUAGE_START,
    MOST_LEVELS,
    OMNIVOICE,
    SEPARATOR,
    TASKS,
    TEXT_END,
    TEXT_START,
    control_tokens,
    level_token,
    task_token,
)

if TYPE_CHECKING:
    from erniekit.data.tokenizers.tokenizer import Tokenizer

NOT_TOLD = "None"  # the text in the place of a language or a description of a voice that is not told


def control_tokens_of(config: Config, folder: Path) -> tuple[str, ...]:
    """Return the tokens that documents of a run consist of beside their texts; none but in stage TTS.

    Args:
        folder: of the model.

    Raises:
        UserError: the levels of its codes are not known.
    """
    if not config.stage.reads_codes:
        return ()
    kind = KIND_OF[config.speech.tts_objective]
    if kind == OMNIVOICE:
        return control_tokens(kind, 0)
    path = folder / CONFIG_FILE
    values = read_json_object(path) if path.is_file() else {}
    levels = values.get("num_audio_codebook") if values.get("model_type") == kind else None
    if not isinstance(levels, int) or not 1 <= levels <= MOST_LEVELS:  # no such model, or one that is refused
        levels = codec_of_run(config).levels
    return control_tokens(kind, levels)


def token_of(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a control token.

    Raises:
        ModelFileError: the tokenizer has no such token.
    """
    found = tokenizer.token_id(text)
    if found is None:
        raise ModelFileError(
            f"{tokenizer.folder}: the tokenizer has no token {text}, which documents of speech consist of\n"
            "  Use the folder of a model that `erniekit train` with stage TTS has written."
        )
    return found


def style_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of the pieces of a style text, in the order of `data.masked_codes.StyleTokens`."""
    names = control_tokens(OMNIVOICE, 0)  # in the same order
    return (*((token_of(tokenizer, name),) for name in names), tuple(tokenizer.encode(NOT_TOLD)))


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens that stand between the parts of a sequence of a model that writes level after level.

    Attributes:
        separator: behind every part but the response.
        levels: one for each level, which says what is to be written.
        tasks: by task, behind the frames of the voice.
        text, language: the tokens before and after each.
    """

    separator: int
    levels: tuple[int, ...]
    tasks: Mapping[str, int]
    text: tuple[int, int]
    language: tuple[int, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, levels: int) -> SpeechTokens:
        """Return those of a tokenizer.

        Raises:
            ModelFileError: it lacks one.
        """

        def token(text: str) -> int:
            return token_of(tokenizer, text)

        return cls(
            token(SEPARATOR),
            tuple(token(level_token(level)) for level in range(levels)),
            {task: token(task_token(task)) for task in TASKS},
            (token(TEXT_START), token(TEXT_END)),
            (token(LANGUAGE_START), token(LANGUAGE_END)),
        )
