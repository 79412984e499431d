"""`erniekit chat MODEL|CONFIG [name=value ...]`: talk with a trained model in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.cli.generate import add_model_arguments, generation_parameters, load_model, select_device
from erniekit.cli.ranks import parse_with_overrides
from erniekit.data.media.clip import Clip
from erniekit.errors import UserError
from erniekit.terminal import Colours, colours_of, escape_control_characters

if TYPE_CHECKING:
    from erniekit.inference.engine import Dialogue
    from erniekit.inference.sampling import Sampling

CLEAR, EXIT, SHOW_HELP = ("/clear", "/new"), ("/exit", "/quit", "exit", "quit"), ("/help",)
AUDIO = "/audio "
HELP = (
    "Type a message. /audio FILE puts a recording before the next one, /clear starts a new dialogue, /exit (or Ctrl-D) "
    "leaves, /help shows this line."
)


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="erniekit chat", description=f"Talk with a trained model. {HELP}")
    add_model_arguments(parser)
    options = parse_with_overrides(parser, arguments)
    parameters = generation_parameters(options, "chat")
    select_device(parameters)
    from erniekit.inference.engine import Dialogue, sampling_from

    model = load_model(options, parameters)
    sampling = sampling_from(parameters.generation, parameters.training.seed)
    limit = parameters.generation.max_model_len
    interactive = sys.stdin.isatty()
    colours = colours_of(sys.stdout)
    prompt, label = (_prompt(colours), colours.second("model> ")) if interactive else ("", "")
    if interactive:
        print(HELP)
    dialogue = Dialogue.start(model, system=options.system, max_model_len=limit)
    clips: list[Clip] = []
    while True:
        try:
            message = input(prompt).strip()
        except EOFError:
            return 0
        if message in EXIT:
            return 0
        if message in CLEAR:
            dialogue = Dialogue.start(model, system=options.system, max_model_len=limit)
            clips = []
        elif message.startswith(AUDIO):
            clips += _recording(message.removeprefix(AUDIO).strip())
        elif message in SHOW_HELP:
            print(HELP)
        elif interactive and message.startswith("/") and " " not in message and message.count("/") == 1:
            print(f"error: {escape_control_characters(message)}: no command. {HELP}", file=sys.stderr)
        elif message:
            _answer(dialogue, message, sampling, label, clips)
            clips = []


def _recording(name: str) -> list[Clip]:
    """Return the recording in a list; empty, with a message, if there is no such file."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        print(f"error: {escape_control_characters(name)}: no such file", file=sys.stderr)
        return []
    return [Clip(str(path))]


def _answer(dialogue: Dialogue, message: str, sampling: Sampling, label: str, clips: Sequence[Clip]) -> None:
    """Print the answer as it grows. An error does not end the dialogue, and Ctrl-C ends only the answer."""
    print(label, end="", flush=True)
    try:
        for piece in dialogue.reply(message, sampling, clips):
            print(escape_control_characters(piece), end="", flush=True)
        print()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        if not label:  # nobody is typing: the program is meant
            raise
        print("\n(cut short; the dialogue does not keep this exchange)")


def _prompt(colours: Colours) -> str:
    """Return the prompt of `input`, with line editing and a history where Python has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return "you> "
    # readline must know which characters take no room
    return re.sub(r"(\x1b\[[\d;]*m)", "\x01\\1\x02", colours.first("you> "))
