"""`erniekit chat MODEL`: talk with a trained model in the terminal."""

from __future__ import annotations

import argparse
import sys

from erniekit.cli.generate import add_model_arguments
from erniekit.environment import import_paddle
from erniekit.parameters.generation import GenerationParameters

HELP = "Type a message. /new starts a new dialogue, /exit (or Ctrl-D) leaves."


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="erniekit chat", description=f"Talk with a trained model. {HELP}")
    add_model_arguments(parser)
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=GenerationParameters().max_model_len,
        help="longest dialogue in tokens; older turns are forgotten beyond it (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    import_paddle()
    from erniekit.runners.generate import ChatModel, sampling_from

    model = ChatModel.load(options.model)
    sampling = sampling_from(options)
    if sys.stdin.isatty():
        print(HELP)
    dialogue = model.dialogue(system=options.system, max_model_len=options.max_model_len)
    while True:
        try:
            message = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if message == "/exit":
            return 0
        if message == "/new":
            dialogue = model.dialogue(system=options.system, max_model_len=options.max_model_len)
        elif message:
            for piece in dialogue.reply(message, sampling):
                print(piece, end="", flush=True)
            print()
