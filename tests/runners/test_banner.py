"""The first lines of a run."""

from __future__ import annotations

import subprocess
import sys

from erniekit import __version__
from erniekit.config import Config
from erniekit.runners.banner import first_lines

VALUES = {"model_name_or_path": "models/tiny", "train_dataset_path": "t", "output_dir": "output/first"}


def test_they_name_versions_stage_model_and_folder() -> None:
    versions, run = first_lines(Config.from_mapping(VALUES))
    assert versions.startswith(f"ERNIEKit {__version__}, paddlepaddle")
    assert run == "  SFT of models/tiny, into output/first"
    run = first_lines(Config.from_mapping(VALUES | {"continue_training": False}))[1]
    assert run == "  SFT of models/tiny from random weights, into output/first"
    run = first_lines(Config.from_mapping(VALUES | {"lora": True}))[1]
    assert run == "  SFT of models/tiny with LoRA, into output/first"


def test_they_need_no_paddle() -> None:
    program = "import sys; import erniekit.cli.train; assert not {'paddle', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
