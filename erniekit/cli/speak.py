"""`erniekit speak MODEL --text TEXT`: speak texts with a trained model."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from erniekit.cli.generate import add_source_options, generation_parameters, model_folder, select_device
from erniekit.cli.ranks import at_least_one, parse_with_overrides
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.errors import ConfigurationError, DataError, UserError
from erniekit.terminal import escape_control_characters

if TYPE_CHECKING:
    from erniekit.inference.engine import ChatModel
    from erniekit.inference.speaking import Piece, Utterance, Voice
    from erniekit.inference.speaking.sound_files import Target
    from erniekit.inference.speaking.speaker import Speaking, SpeechModel
    from erniekit.inference.speaking.text_files import SpokenLine

SPEAKING = tuple(each.name for each in fields(SpeakingParameters))
FIRST_LEVEL = ("temperature", "top_p", "top_k", "repetition_penalty")
OTHER_NAMES = {"unmask_steps": "num-step", "time_shift": "t-shift", "layer_penalty": "layer-penalty-factor"}
MODEL_PARAMETERS = ("device", "ignore_config_keys")
STREAM = Path("-")


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit speak",
        description="Speak texts with a model that was trained with stage: TTS. A long text is divided at its "
        "punctuation, and its sound comes piece by piece. What cannot be spoken is named at the end, and the exit "
        "code is then 2.",
        epilog='Examples: erniekit speak output/quickstart/tts --text "three five nine" --output spoken.wav; '
        "erniekit speak output/tts --texts texts.jsonl --output spoken --voice anna.wav --voice-text 'Good morning.'; "
        "erniekit speak output/tts --texts story.txt --output - --first-seconds 3 | aplay",
    )
    add_source_options(parser)
    parser.add_argument("--adapters", dest="lora_path", type=Path, help=argparse.SUPPRESS)
    _add_text_options(parser)
    _add_sound_options(parser)
    _add_parameters(parser)
    parser.set_defaults(overrides=[])
    options = parse_with_overrides(parser, arguments)
    _check_words(parser, options)
    if options.output != STREAM:
        return _speak(options, None)
    stream = sys.stdout.buffer
    with redirect_stdout(sys.stderr):  # what is told must not be heard
        return _speak(options, stream)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", action="append", help="a text to speak; may be given several times")
    texts.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="a text on each line; or .jsonl with text and perhaps language, instruct, voice, voice_text, duration, "
        "speed, id",
    )
    parser.add_argument("--voice", type=Path, metavar="FILE", help="a recording of the voice, 3 to 10 seconds")
    parser.add_argument("--voice-text", default="", metavar="TEXT", help="what is said in --voice")
    parser.add_argument(
        "--listener", type=Path, metavar="DIR", help="a model that writes down what is said in voices without a text"
    )
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help="the text goes on from what --voice says (ar_nar)"
    )
    parser.add_argument("--language", default="", metavar="xx", help="of the texts, such as en; default: not told")
    parser.add_argument(
        "--instruct", default="", metavar="TEXT", help="describes the voice, such as: female, low pitch"
    )
    parser.add_argument("--duration", type=_number(0.01, 3600), metavar="S", help="seconds of each text")
    parser.add_argument("--speed", type=_number(0.1, 10), metavar="X", help="above 1 is faster (default 1)")
    parser.add_argument(
        "--chunk-seconds", type=_number(1, 600), default=15.0, metavar="S", help="of a piece of a long text (15)"
    )
    parser.add_argument(
        "--chunk-threshold", type=_number(1, 3600), default=30.0, metavar="S", help="longer texts are divided (30)"
    )
    parser.add_argument(
        "--first-seconds", type=_number(0.1, 600), metavar="S", help="of the first piece, to be heard soon"
    )
    parser.add_argument(
        "--max-seconds", type=_number(0.1, 3600), default=60.0, metavar="S", help="of a piece at most, for ar_nar (60)"
    )
    parser.add_argument("--batch-size", type=at_least_one, default=8, metavar="N", help="texts at once (8)")


def _add_sound_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE|DIR|-", help="a file, a folder, or - for standard output"
    )
    parser.add_argument("--format", choices=("wav", "flac", "raw"), help="default: the suffix of FILE, or wav")
    parser.add_argument("--chunks", action="store_true", help="write a file for each piece, as soon as it is there")
    parser.add_argument("--codec", type=Path, metavar="DIR", help="default: that of the model's folder or its training")
    parser.add_argument("--save-codes", type=Path, metavar="FILE", help="also write the codes of one text: .npy")
    parser.add_argument("--no-denoise", action="store_true", help="do not ask for clean sound with a noisy voice")
    parser.add_argument("--keep-silence", action="store_true", help="do not shorten silence in what is spoken")
    parser.add_argument("--keep-reference", action="store_true", help="do not shorten silence in --voice")
    parser.add_argument("--pad", type=_number(0, 10), default=0.1, metavar="S", help="silence at both ends (0.1)")
    parser.add_argument("--fade", type=_number(0, 10), default=0.1, metavar="S", help="fading at both ends (0.1)")


def _add_parameters(parser: argparse.ArgumentParser) -> None:
    """Add the parameters of speaking; defaults, bounds and meanings come from the schema."""
    for name in (*SPEAKING, *FIRST_LEVEL):
        words = f"{PARAMETERS[name].meaning.split('. ')[0].rstrip('.')} (default {PARAMETERS[name].default})"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="X", help=words.replace("%", "%%"))
        if name in OTHER_NAMES:
            parser.add_argument(f"--{OTHER_NAMES[name]}", dest=name, help=argparse.SUPPRESS)
    parser.add_argument("--seed", help="of random draws (default 42)")


def _check_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message about options that do not go together."""
    if options.voice_text and not options.voice:
        parser.error("--voice-text says what is said in --voice; name the recording, too")
    if options.voice and not (options.voice_text or options.listener):
        parser.error("--voice needs --voice-text, what is said in the recording, or a --listener that writes it down")
    if options.continues and not options.voice:
        parser.error("--continue goes on from --voice; name the recording")
    if options.duration is not None and options.speed is not None:
        parser.error("--duration and --speed both say how fast a text is spoken; drop one of them")
    if options.output == STREAM and options.format == "flac":
        parser.error("--output - is a stream of wav or raw; FLAC has its length in front")
    if options.output == STREAM and options.chunks:
        parser.error("--chunks writes files; --output - is one stream, which comes piece by piece anyway")
    if options.save_codes and options.text and len(options.text) > 1:
        parser.error("--save-codes is for one text")


def _speak(options: argparse.Namespace, stream: BinaryIO | None) -> int:
    from erniekit.inference.speaking.sound_files import file_targets
    from erniekit.inference.speaking.text_files import given_texts, read_texts

    lines = read_texts(options.texts.expanduser()) if options.texts else given_texts(options.text)
    if options.save_codes and len(lines) > 1:
        raise ConfigurationError(f"--save-codes: is for one text, and there are {len(lines):,}")
    output: Path = options.output.expanduser()
    suffix = output.suffix.lower().lstrip(".")
    form = options.format or (suffix if suffix in ("flac", "raw") and not output.is_dir() else "wav")
    names = [line.id or f"{number:04d}" for number, line in enumerate(lines, start=1)]
    targets = [] if stream else file_targets(output, names, form, pieces=options.chunks)
    parameters = generation_parameters(
        options, verb="speak", names=(*SPEAKING, *FIRST_LEVEL, "seed", *MODEL_PARAMETERS)
    )
    select_device(parameters)
    from erniekit.inference.speaking.speaker import SpeechModel

    model = SpeechModel.load(
        model_folder(options, parameters),
        adapters=options.lora_path,
        codec=None if options.codec is None else options.codec.expanduser(),
        seed=parameters.training.seed,
        ignored_keys=parameters.basic.ignore_config_keys,
        device=parameters.basic.device,
    )
    _tell_unused(model, options)
    texts, problems = _utterances(model, lines, options)
    paths = [targets[text.number] for text in texts] if targets else []
    if texts:
        _speak_texts(
            model, texts, len(lines), parameters, options, _target(model, paths, form, options, stream), problems
        )
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems)
        _say(f"error: {len(problems):,} of {len(lines):,} texts cannot be spoken:\n{shown}")
    return 2 if problems else 0


def _tell_unused(model: SpeechModel, options: argparse.Namespace) -> None:
    """Tell which options have no effect with the model's way to write codes."""
    used = {*SPEAKING} - {"min_p"} if model.is_masked else {*FIRST_LEVEL, "class_temperature", "min_p"}
    unused = [name for name in (*SPEAKING, *FIRST_LEVEL) if name not in used and getattr(options, name) is not None]
    unused += ["no_denoise"] if options.no_denoise and not model.is_masked else []
    if options.language and not model.tells_language and model.frontend != "phonemes":
        _say("no effect: --language, because the model was trained with language_probability: 0")
    if unused:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        objective = "masked" if model.is_masked else "ar_nar"
        _say(f"no effect: {named}, because the model was trained with tts_objective: {objective}")


def _utterances(
    model: SpeechModel, lines: list[SpokenLine], options: argparse.Namespace
) -> tuple[list[Utterance], list[str]]:
    """Return what is to be spoken, and why other texts cannot be."""
    from erniekit.inference.speaking import Utterance
    from erniekit.inference.speaking.voice_words import doubt, language_doubt

    texts: list[Utterance] = []
    problems: list[str] = []
    voices: dict[tuple[Path, str], Voice] = {}
    heard: dict[Path, str] = {}
    for number, line in enumerate(lines):
        recording, said = (line.voice, line.voice_text) if line.voice else (options.voice, options.voice_text)
        try:
            if recording is not None and not said:
                said = heard.get(recording) or _heard(recording, line.place, options)
                heard[recording] = said
            if recording is not None and (recording, said) not in voices:
                keep = options.keep_reference
                voices[recording, said] = model.voice(recording.expanduser(), said, keep_silence=keep)
            text = Utterance(
                line.text,
                line.language or options.language,
                line.instruct or options.instruct,
                None if recording is None else voices[recording, said],
                options.duration if line.duration is None and line.speed is None else line.duration,
                line.speed or options.speed or 1.0,
                number,
                line.place,
                options.continues,
            )
            model.check(text)
            if text.instruct and model.is_published and (why := doubt(text.instruct)):
                _say(f"warning: {line.place}: instruct: {why}")
            if text.language and model.is_published and (why := language_doubt(text.language)):
                _say(f"warning: {line.place}: language: {why}")
            texts.append(text)
        except UserError as error:
            problems.append(str(error))
    return texts, problems


def _heard(recording: Path, place: str, options: argparse.Namespace) -> str:
    """Return what a listener writes down of a recording.

    Raises:
        DataError: there is no listener, or it hears nothing.
    """
    if options.listener is None:
        raise DataError(f"{place}: voice_text: expected what is said in {recording}, got nothing (--listener)")
    from erniekit.inference.transcribe import Transcript, TranscriptionSettings, transcribe

    (result,) = transcribe(
        _listener(options.listener.expanduser()), [recording.expanduser()], TranscriptionSettings(options.language)
    )
    if not isinstance(result, Transcript):
        raise DataError(f"{place}: {result.reason}")
    if not result.text.strip():
        raise DataError(f"{place}: {options.listener} hears nothing in {recording}; write voice_text")
    _say(f"{recording}: heard: {result.text}")
    return result.text


@lru_cache(maxsize=1)
def _listener(folder: Path) -> ChatModel:
    """Open the model that writes down what is said in voices, once for all of them."""
    from erniekit.inference.engine import ChatModel

    return ChatModel.load(folder)


def _target(
    model: SpeechModel, paths: list[Path], form: str, options: argparse.Namespace, stream: BinaryIO | None
) -> Target:
    from erniekit.inference.speaking.sound_files import PieceFiles, SoundFiles, SoundStream

    if stream is not None:
        return SoundStream(stream, model.sampling_rate, form)
    return (PieceFiles if options.chunks else SoundFiles)(paths, model.sampling_rate, form)


def _speak_texts(
    model: SpeechModel,
    texts: list[Utterance],
    count: int,
    parameters: Config,
    options: argparse.Namespace,
    target: Target,
    problems: list[str],
) -> None:
    """Speak texts and tell each that is ready; add those of which nothing is said to `problems`."""
    from erniekit.inference.engine import sampling_from

    sampling, speaking = sampling_from(parameters.generation, parameters.training.seed), _speaking(options)
    pieces: list[list[Piece]]
    began, pieces = time.perf_counter(), [[] for _ in texts]
    for piece in model.speak(texts, parameters.speaking, sampling, speaking):
        text, own = texts[piece.utterance], pieces[piece.utterance]
        own.append(piece)
        path = target.add(piece)
        if piece.cut:
            _say(
                f"  {text.place}: piece {piece.number + 1} did not end within {options.max_seconds:g} s: --max-seconds"
            )
        if not piece.last:
            continue
        seconds = sum(len(each.sound) for each in own) / model.sampling_rate
        if not any(each.codes.shape[1] for each in own):
            problems.append(f"{text.place}: the model said nothing")
        counted = f"{len(own):,} piece{'s' * (len(own) != 1)}"
        took = time.perf_counter() - began
        _say(
            f"{text.number + 1:,} of {count:,}: {f'{path}: ' if path else ''}{seconds:,.1f} s of sound, {counted}, "
            f"{_speed(seconds, took)}, first sound after {own[0].seconds:,.2f} s"
        )
    if options.save_codes:
        _save_codes(options.save_codes.expanduser(), pieces[0])
    if count > 1:
        seconds, took = (
            sum(len(each.sound) for own in pieces for each in own) / model.sampling_rate,
            time.perf_counter() - began,
        )
        _say(f"{len(texts):,} texts, {seconds:,.1f} s of sound in {took:,.1f} s, {_speed(seconds, took)}")


def _speaking(options: argparse.Namespace) -> Speaking:
    from erniekit.inference.speaking.sound import SoundSettings
    from erniekit.inference.speaking.speaker import Speaking

    return Speaking(
        options.chunk_seconds,
        options.chunk_threshold,
        options.first_seconds,
        denoise=not options.no_denoise,
        max_seconds=options.max_seconds,
        batch_size=options.batch_size,
        sound=SoundSettings(options.keep_silence, options.pad, options.fade),
    )


def _save_codes(path: Path, pieces: list[Piece]) -> None:
    """Write the codes of a text, int64 [C, T]."""
    import numpy as np

    try:
        with open(path, "wb") as file:
            np.save(file, np.concatenate([piece.codes for piece in pieces], axis=1))
    except OSError as error:
        raise DataError(f"--save-codes: {path} cannot be written: {error.strerror or error}") from None


def _speed(seconds: float, took: float) -> str:
    return f"{seconds / took:,.1f} x real time" if took else "no time"


def _say(line: str) -> None:
    print(escape_control_characters(line), file=sys.stderr, flush=True)


def _number(least: float, most: float) -> Callable[[str], float]:
    """Return what reads a number between two bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text}")
        return value

    return read
