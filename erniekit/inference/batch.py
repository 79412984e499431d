"""Answer a file of prompts: many side by side, in the order of the file, one JSON object per line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from erniekit.data.placeholders import EncodedPrompt
from erniekit.errors import DataError, UserError
from erniekit.inference.decoding.scheduler import MAX_RUNNING
from erniekit.inference.engine import ChatModel
from erniekit.inference.generation import check_prompt
from erniekit.inference.prompts import Prompt
from erniekit.inference.sampling import Sampling

logger = logging.getLogger(__name__)

_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}  # json.dumps escapes those below
WINDOW = 16 * MAX_RUNNING  # prompts whose answers are written together


def encode_prompts(
    model: ChatModel, prompts: Sequence[Prompt], path: Path, sampling: Sampling, *, system: str = "", raw: bool = False
) -> list[EncodedPrompt]:
    """Return every prompt encoded; report all prompts that cannot be answered before the first answer.

    Args:
        system: system text for dialogues without one.
        raw: continue the last message as it is, without the chat template.

    Raises:
        DataError: prompts are too long; lists their lines.
    """
    encoded, problems = [], []
    for prompt in prompts:
        try:
            dialogue = prompt.conversation
            if raw and (len(dialogue.turns) > 1 or dialogue.system or dialogue.clips):
                what = "has a recording" if dialogue.clips else "is a dialogue"
                raise DataError(f"the record {what}, and --raw continues a single text; drop --raw")
            if raw:
                own = model.encode_text(prompt.text)
            else:
                own = model.encode(replace(dialogue, system=dialogue.system or system))
            check_prompt(model.decoder, own.ids, sampling, prompt.line)
            encoded.append(own)
        except UserError as error:
            problems.append(f"{path}:{prompt.line}: {error}")
    if problems:
        shown = [*problems[:20], *([f"and {len(problems) - 20:,} more"] if len(problems) > 20 else [])]
        raise DataError("\n".join(shown))
    return encoded


def answer_records(
    model: ChatModel, prompts: Sequence[Prompt], encoded: Sequence[EncodedPrompt], sampling: Sampling
) -> Iterator[dict[str, Any]]:
    """Yield a record for each prompt, in order: `prompt`, `answer`, and `messages`, `audios` and `reference` if there
    are any."""
    for start in range(0, len(prompts), WINDOW):
        window = range(start, min(start + WINDOW, len(prompts)))

        def report(done: int, start: int = start) -> None:
            logger.info(f"answered {start + done:,} of {len(prompts):,} prompts")

        answers = model.answer_encoded([encoded[number] for number in window], sampling, streams=window, report=report)
        for number, answer in zip(window, answers, strict=True):
            yield _record(prompts[number], answer, model.speech.unit_token)


def write_records(records: Iterator[dict[str, Any]], output: Path) -> None:
    """Write one JSON object per line; the file gets its name when it is complete.

    Raises:
        DataError: it cannot be written.
    """
    temp_path = output.with_name(f".writing-{output.name}")
    try:
        with temp_path.open("w", encoding="utf-8") as file:
            for record in records:
                write_record(record, file)
        temp_path.rename(output)
    except OSError as error:
        raise DataError(f"--output {output}: cannot be written: {error.strerror or error}") from None
    finally:
        temp_path.unlink(missing_ok=True)  # left by an error or a signal; a complete file has been renamed by now


def write_record(record: dict[str, Any], file: TextIO) -> None:
    """Write a record as one line of JSON; control characters are escaped because the stream may be a terminal."""
    file.write(json.dumps(record, ensure_ascii=False).translate(_ESCAPED) + "\n")


def check_output(output: Path) -> None:
    """Raise DataError if `output` exists or its folder does not."""
    if output.exists():
        raise DataError(f"--output {output}: already exists and is never overwritten; name another file")
    if not output.parent.is_dir():
        raise DataError(f"--output {output}: there is no folder {output.parent}; create it, or name another file")


def _record(prompt: Prompt, answer: str, unit_token: str) -> dict[str, Any]:
    conversation = prompt.conversation
    record: dict[str, Any] = {"prompt": conversation.turns[-1].written(unit_token), "answer": answer}
    if len(conversation.turns) > 1 or conversation.system:
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        turns = [{"role": turn.role, "content": turn.written(unit_token)} for turn in conversation.turns]
        record["messages"] = system + turns
    if conversation.clips:
        record["audios"] = [clip.path for clip in conversation.clips]
    if prompt.answered is not None:
        record["reference"] = prompt.answered.written(unit_token)
    return record
