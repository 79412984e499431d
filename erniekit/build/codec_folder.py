"""Find the codec of a trained model: in its folder, or where the run that trained it had it. Needs no Paddle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.build.speech import AUDIO_TOKENIZER
from erniekit.data.media.codes_folder import codec_folder, read_facts


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
