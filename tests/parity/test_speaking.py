"""What models say is understood by an outside recogniser; tools/parity/speaking.py has the table of longer runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.parity.intelligibility import Recogniser
from tools.parity.speaking import CONFIGS, NOT_JUDGED, ROOT, codes_of_the_voice, make_voice, read_sound

pytestmark = [pytest.mark.parity, pytest.mark.slow]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_phrase_learnt_by_heart_is_heard_as_its_recording_is(name: str, tmp_path: Path) -> None:
    """From recordings to codes, a model that learns one of them, and its sound: `erniekit train --try`."""
    make_voice.write(tmp_path / "voice", first=30)
    codes_of_the_voice(tmp_path)
    output = tmp_path / "model"
    command = [
        sys.executable, "-m", "erniekit", "train", f"examples/configs/quickstart/{CONFIGS[name]}.yaml", "--try",
        f"output_dir={output}", f"train_dataset_path={tmp_path / 'codes-eval'}", *NOT_JUDGED,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ERNIEKIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recogniser = Recogniser()
    folder = Path(f"{output}-try")
    original, spoken = (recogniser.write_down(read_sound(folder / f"{each}.wav")) for each in ("original", "spoken"))
    assert spoken == original and len(spoken.split()) >= 2
