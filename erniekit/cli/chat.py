"""`erniekit chat MODEL|CONFIG [name=value ...]`: talk with a trained model in the terminal."""

from __future__ import annotations

import argparse
import sys

from erniekit.cli.generate import add_model_arguments, generation_parameters, load_model, select_device
from erniekit.cli.ranks import parse_with_overrides
from erniekit.errors import UserError
from erniekit.terminal import escape_control_characters

HELP = "Type a message. /new starts a new dialogue, /exit (or Ctrl-D) leaves."


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
    if interactive:
        print(HELP)
    dialogue = Dialogue.start(model, system=options.system, max_model_len=limit)
    while True:
        try:
            message = input("you> " if interactive else "").strip()
        except EOFError:
            return 0
        if message == "/exit":
            return 0
        if message == "/new":
            dialogue = Dialogue.start(model, system=options.system, max_model_len=limit)
            continue
        if not message:
            continue
        try:
            for piece in dialogue.reply(message, sampling):
                print(escape_control_characters(piece), end="", flush=True)
            print()
        except UserError as error:  # one message that cannot be answered does not end the dialogue
            print(f"error: {error}", file=sys.stderr)
