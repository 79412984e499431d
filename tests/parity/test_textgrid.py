"""TextGrids that praatio writes are read as praatio reads them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from erniekit.data.formats.alignments import read_alignment

pytestmark = pytest.mark.parity
LABELS = ["the", "", "it's", 'a "quoted" word', "Mühle", "今天", "12", "!", "<unk>", "", "x = 3"]


@pytest.mark.parametrize("form", ["long_textgrid", "short_textgrid"])
def test_textgrids_of_praatio(form: str, tmp_path: Path) -> None:
    from praatio import textgrid

    for seed in range(30):
        rng = random.Random(seed)
        borders = sorted({round(rng.uniform(0, 20), rng.choice([2, 3, 6])) for _ in range(40)})
        entries = [(start, end, rng.choice(LABELS)) for start, end in pairwise(borders)]
        grid = textgrid.Textgrid(0, borders[-1] + rng.choice([0, 0.5]))
        grid.addTier(textgrid.PointTier("points", [(1.0, "here")], 0, grid.maxTimestamp))
        for name in ("phones", "words"):
            kept = entries if name == "words" else entries[::2]
            grid.addTier(textgrid.IntervalTier(name, kept, 0, grid.maxTimestamp))
        path = tmp_path / f"{seed}.TextGrid"
        grid.save(str(path), form, includeBlankSpaces=True)

        read = textgrid.openTextgrid(str(path), includeEmptyIntervals=True).getTier("words").entries
        words, duration = read_alignment(str(path))
        assert [tuple(word) for word in words] == [(label, start, end) for start, end, label in read if label.strip()]
        assert duration == read[-1].end
