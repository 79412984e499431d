"""`erniekit transcribe MODEL FILE|FOLDER...`: write down what is said in recordings."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from erniekit.cli.generate import (
    MODEL_PARAMETERS,
    add_model_options,
    generation_parameters,
    load_model,
    select_device,
)
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.inference.transcript_files import SUFFIXES, content, plan, write_transcript
from erniekit.terminal import escape_control_characters

BATCH_SIZE = 16


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit transcribe",
        description="Write down what is said in recordings. Long ones are cut at quiet places into chunks that the "
        "model listens to one by one; the times of subtitles are those of the chunks. What cannot be transcribed is "
        "named at the end, and the exit code is then 2; transcripts that are there already stay as they are.",
        epilog="Example: erniekit transcribe output/quickstart/asr recordings/ --output transcripts --format srt",
    )
    add_model_options(parser)
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="recordings, and folders of recordings: wav, flac, mp3, ogg"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR|FILE",
        help="the folder of the transcripts, or for one recording the file; default: print them",
    )
    parser.add_argument(
        "--format", choices=tuple(SUFFIXES), help="of the transcripts; default: the suffix of FILE, or text"
    )
    parser.add_argument(
        "--language", default="", metavar="xx", help="of the recordings, such as en; default: detect it"
    )
    parser.add_argument("--asr-prompt", metavar="TEXT", help="the words of the request; default: those of the training")
    parser.add_argument(
        "--chunk-seconds", type=_seconds, metavar="S", help="the longest chunk; default: a window of the model"
    )
    parser.add_argument(
        "--batch-size",
        type=at_least_one,
        default=BATCH_SIZE,
        metavar="N",
        help=f"chunks at once (default {BATCH_SIZE})",
    )
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, metavar="N", help="longest transcript of a chunk; default: 20 a second"
    )
    parser.set_defaults(overrides=[])
    return _transcribe(parse_with_overrides(parser, arguments))


def _transcribe(options: argparse.Namespace) -> int:
    parameters = generation_parameters(options, names=MODEL_PARAMETERS)
    select_device(parameters)
    from erniekit.inference.transcribe import Failure, TranscriptionSettings, transcribe

    form = options.format or _format_of(options.output)
    output = None if options.output is None else options.output.expanduser()
    jobs = plan([name.expanduser() for name in options.files], output, form)
    targets = {job.recording: job.target for job in jobs if job.target is None or not job.target.exists()}
    if present := len(jobs) - len(targets):
        _say(f"{present:,} of {len(jobs):,} transcripts are there already and stay as they are")
    if not targets:
        return 0
    model = load_model(options, parameters, options.asr_prompt or None)
    settings = TranscriptionSettings(
        options.language, options.chunk_seconds, options.batch_size, options.max_new_tokens
    )
    began, failures, seconds, done = time.perf_counter(), [], 0.0, 0
    for result in transcribe(model, targets, settings):
        done += 1
        progress = f"{done:,} of {len(targets):,}: {result.path}"
        if isinstance(result, Failure):
            failures.append(result)
            _say(f"{progress}: cannot be transcribed")
            continue
        seconds += result.seconds
        text, target = content(result, form, options.language or model.request.language), targets[result.path]
        if target is None:
            _print(text, f"{result.path}:" if form == "text" and len(targets) > 1 else "")
        else:
            write_transcript(text, target)
        chunks = f"{len(result.pieces):,} chunk{'s' * (len(result.pieces) > 1)}"
        _say(f"{progress}: {result.seconds:,.1f} s in {chunks}, {_speed(result.seconds, result.compute_seconds)}")
        if cut := [piece for piece in result.pieces if piece.cut]:
            _say(f"  {len(cut):,} of its chunks did not end, the first at {cut[0].start:,.1f} s: --max-new-tokens")
    took = time.perf_counter() - began
    written = f" -> {output}" if output else ""
    of = f"{_counted(done - len(failures))}, {seconds:,.1f} s of sound"
    _say(f"{of} in {took:,.1f} s, {_speed(seconds, took)}{written}")
    if failures:
        lines = "\n".join(f"  {failure.reason}" for failure in failures)
        _say(f"error: {_counted(len(failures))} cannot be transcribed:\n{lines}")
    return 2 if failures else 0


def _format_of(output: Path | None) -> str:
    suffix = "" if output is None or output.is_dir() else output.suffix.lower()
    return next((form for form, own in SUFFIXES.items() if own == suffix), "text")


def _counted(recordings: int) -> str:
    return f"{recordings:,} recording{'s' * (recordings != 1)}"


def _speed(seconds: float, took: float) -> str:
    return f"{seconds / took:,.1f} x real time" if took else "no time"


def _say(line: str) -> None:
    print(escape_control_characters(line), file=sys.stderr, flush=True)


def _print(text: str, heading: str) -> None:
    for line in (*([heading] if heading else []), *text.rstrip("\n").split("\n")):
        print(escape_control_characters(line), flush=True)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600, got {text}")
    return value
