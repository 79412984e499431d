"""`erniekit plot OUTPUT...`: draw loss, learning rate, throughput and gradient norm of runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from erniekit.runners.plot import USUAL, read_charts, text_lines, write_picture
from erniekit.terminal import escape_control_characters
from erniekit.training.run_records import AXES


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit plot",
        description="Draw the figures of one run or several, which may still go on: as text here, as a PNG picture "
        "with --output.",
        epilog="Example: erniekit plot output/sft output/lora --figures loss,token_accuracy --x tokens "
        "--output runs.png",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUTPUT", help="the output_dir of a run")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture to write")
    parser.add_argument(
        "--figures", default="", metavar="NAME,...", help=f"names in training_log.jsonl (default: {', '.join(USUAL)})"
    )
    parser.add_argument("--x", choices=AXES, default=AXES[0], help="the horizontal axis (default: steps)")
    parser.add_argument(
        "--smooth", type=int, metavar="N", help="draw the mean over N records, 1: none (default: a fiftieth of a run)"
    )
    parser.add_argument("--no-text", action="store_true", help="draw nothing in the terminal")
    options = parser.parse_args(arguments)
    if options.smooth is not None and options.smooth < 1:
        parser.error(f"--smooth {options.smooth}: expected a number of records of at least 1")
    if options.output is None and options.no_text:
        parser.error("--no-text leaves nothing to do without --output FILE.png")
    if options.output is not None and options.output.suffix.lower() != ".png":
        parser.error(f"--output {options.output}: expected a name that ends in .png")
    figures = [name.strip() for name in options.figures.split(",") if name.strip()]
    charts = read_charts([folder.expanduser() for folder in options.folders], figures, options.x, options.smooth)
    if not options.no_text:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        for text in text_lines(charts, colours=colours):
            print(text)
    if options.output is not None:
        write_picture(charts, options.output.expanduser())
        print(escape_control_characters(f"wrote {options.output}"))
    return 0
