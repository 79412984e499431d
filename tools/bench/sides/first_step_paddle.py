"""paddleformers-cli 1.2.0 or erniekit 1.0.1 up to the first step of their own `train`, on records of words."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import paddle_suite as suite  # sets the environment before Paddle is imported
import yaml
from stages import last, mark


def train(folder: Path, output: Path) -> None:
    data = folder / "words.jsonl"
    values = suite.SHARED | (suite.OF_PADDLEFORMERS if suite.IS_PADDLEFORMERS else suite.OF_ERNIEKIT)
    values |= {
        "stage": "SFT", "fine_tuning": "full" if suite.IS_PADDLEFORMERS else "Full", "max_seq_len": 512,
        "learning_rate": 3e-3, "model_name_or_path": str(_model(folder)),
        "per_device_train_batch_size" if suite.IS_PADDLEFORMERS else "batch_size": 2,
        "train_dataset_path": str(data), "eval_dataset_path": str(data),
        "num_samples_each_epoch": len(data.read_text().splitlines()),
        "logging_dir": str(output / "log"), "output_dir": str(output / "model"),
    }  # fmt: skip
    path = output / "train.yaml"
    path.write_text(yaml.safe_dump(values))
    os.chdir(output)
    sys.argv = [sys.argv[0], "train", str(path)]
    if suite.IS_PADDLEFORMERS:
        from paddleformers.cli.train.tuner import run_tuner
    else:
        from erniekit.train.tuner import run_tuner
    from paddleformers.trainer import Trainer, TrainerCallback

    class First(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                last("first step", float(logs["loss"]))

    own_train = Trainer.train

    def watched(self: Any, *arguments: Any, **more: Any) -> Any:
        mark("configuration, data and model")
        self.add_callback(First())
        return own_train(self, *arguments, **more)

    Trainer.train = watched
    mark("imports")
    run_tuner()


def _model(folder: Path) -> Path:
    return folder / ("paddleformers" if suite.IS_PADDLEFORMERS else "erniekit")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="config.json and words.jsonl")
    parser.add_argument("--output", type=Path, help="without it the model's folder is made, and nothing else")
    parser.add_argument("--cache", help="of no use: the suites keep no tokens")
    parser.add_argument("--threads", help="of no use: OMP_NUM_THREADS says it")
    options = parser.parse_args()
    if options.output is None:
        suite.write_model(_model(options.folder), json.loads((options.folder / "config.json").read_text()))
    else:
        train(options.folder, options.output)


if __name__ == "__main__":
    main()
