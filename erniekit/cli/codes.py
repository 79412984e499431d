"""`erniekit codes CONFIG`: turn recordings into codes of a codec; `--decode DIR`: turn codes into sound."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from erniekit.build.local_paths import with_local_paths
from erniekit.cli.ranks import parse_with_overrides
from erniekit.config import Config
from erniekit.errors import DataError


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit codes",
        description="Turn the recordings of a configuration's data into codes of a codec, in tar shards or in JSON "
        "lines. The same command continues where it was interrupted. Recordings that cannot be read are listed in "
        "errors.jsonl, and the exit code is then 2.",
        epilog="Examples: erniekit codes codes.yaml codec=models/encodec_24khz; "
        "erniekit codes --decode output/codes --output sound",
    )
    parser.add_argument("config", type=Path, nargs="?", help="YAML or JSON file of parameters")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="name=value", help="parameters that override the file"
    )
    parser.add_argument("--fit", action="store_true", help="fit the codec into output_dir/codec, and encode nothing")
    parser.add_argument(
        "--decode",
        type=Path,
        metavar="DIR",
        help="a folder that `erniekit codes` wrote, or data.lst or a tar shard: write its sound",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --decode, the folder of the wav files")
    parser.add_argument(
        "--codec", type=Path, metavar="DIR", help="with --decode, the folder of the codec; default: that of codes.json"
    )
    parser.add_argument("--device", metavar="NAME", default="auto", help="with --decode, where to compute")
    options = parse_with_overrides(parser, arguments)
    if options.decode is not None:
        return _decode(parser, options)
    if options.config is None:
        parser.error("name a configuration file, or a folder of codes with --decode")
    if options.output or options.codec or options.device != "auto":
        parser.error("--output, --codec and --device belong to --decode; a configuration has output_dir, codec, device")
    config = with_local_paths(Config.load(options.config, options.overrides, verb="codes"))
    from erniekit.runners.codes import write_codes

    with _written_into(config.output_dir):
        return 2 if write_codes(config, fits_only=options.fit).errors else 0


def _decode(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.config is not None or options.overrides or options.fit:
        parser.error("--decode takes no configuration and no parameters; --output, --codec and --device go with it")
    if options.output is None:
        parser.error("--decode needs --output DIR, the folder of the wav files")
    from erniekit.runners.decode import decode_codes

    codec = None if options.codec is None else options.codec.expanduser()
    output = options.output.expanduser()
    with _written_into(output):
        return 2 if decode_codes(options.decode.expanduser(), output, codec, device=options.device) else 0


@contextmanager
def _written_into(folder: Path) -> Iterator[None]:
    """Raise DataError in place of the system's errors in the body, which reads nothing without telling its own."""
    try:
        yield
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}\n  Free some space, make the "
            "folder writable, or name another one. What is complete stays, and the same command goes on from there."
        ) from None
