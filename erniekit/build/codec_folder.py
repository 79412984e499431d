"""Find the codec of a trained model, and tell codecs apart by their weights. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import filecmp
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.build.speech import AUDIO_TOKENIZER
from erniekit.data.media.codes_folder import codec_folder, read_facts

WEIGHTS = "model.safetensors"
MOST_COMPARED = 64 << 20  # bytes


def codec_candidates(folders: Sequence[Path], run: Mapping[str, Any]) -> list[Path]:
    """Return where the codec of a model may lie, the likeliest first; the folders need not be there.

    Args:
        folders: of the model, and of its base.
        run: the parameters of the run that trained it; empty if they are unknown.

    Raises:
        DataError: a `codes.json` beside the data of the run is damaged.
    """
    found = [folder / AUDIO_TOKENIZER for folder in folders if (folder / AUDIO_TOKENIZER).is_dir()]
    found += [Path(str(run["codec"])).expanduser()] if run.get("codec") else []
    sources = run.get("train_dataset_path") or ()
    for source in [Path(str(each)).expanduser() for each in ([sources] if isinstance(sources, str) else sources)]:
        for home in (source, source.parent, *sorted(source.glob("part-*"))):
            facts = read_facts(home) if home.is_dir() else None
            found += [codec_folder(home, facts)] if facts else []
    return found


def differing_codecs(codec: Path, folders: Iterable[Path]) -> list[Path]:
    """Return those folders that hold another codec than `codec`, as far as their weights tell.

    Weights of more than 64 MB are compared by their size alone.
    """
    return [folder for folder in folders if _differ(codec / WEIGHTS, folder / WEIGHTS)]


def _differ(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file()) or one.samefile(other):
        return False
    size = one.stat().st_size
    return size != other.stat().st_size or (size <= MOST_COMPARED and not filecmp.cmp(one, other, shallow=False))
