"""`erniekit generate MODEL --prompt TEXT`: answer prompts with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

from erniekit.environment import import_paddle
from erniekit.parameters.generation import GenerationParameters


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="erniekit generate", description="Answer prompts with a trained model.")
    add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", required=True, help="a user's message; may be given several times")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    options = parser.parse_args(arguments)
    import_paddle()
    from erniekit.runners.generate import ChatModel, sampling_from

    model = ChatModel.load(options.model)
    answers = model.answer(options.prompt, sampling_from(options), system=options.system, raw=options.raw)
    for prompt, answer in zip(options.prompt, answers, strict=True):
        if len(answers) > 1:
            print(f"> {prompt}")
        print(answer)
    return 0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `generate` and `chat` share; their defaults are those of the schema."""
    defaults = GenerationParameters()
    parser.add_argument("model", type=Path, help="a model folder, an output_dir or a checkpoint")
    parser.add_argument("--system", default="", help="system text that goes before the dialogue")
    parser.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens, help="default %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="0 is greedy (default %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=defaults.top_p, help="default %(default)s")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, help="0 is off (default %(default)s)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=defaults.repetition_penalty, help="1 is off (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of sampling (default %(default)s)")
