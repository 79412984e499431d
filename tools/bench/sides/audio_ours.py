"""Our side of the audio benchmark, by the functions that `erniekit` calls; a thread makes batches ahead."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3])]
import audio_workload as workload
from turns import Step, ahead, serve

from erniekit.environment import import_paddle

import_paddle()

from erniekit.build.data import training_dataset
from erniekit.build.model import begin
from erniekit.config import Config
from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.media.audio_batch import audio_arrays
from erniekit.inference.engine import ChatModel
from erniekit.inference.transcribe import Transcript, TranscriptionSettings, transcribe
from erniekit.model.builder import build_model
from erniekit.training.objectives.objective import supervised
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import train_step


def train(folder: Path, batch: int) -> Step:
    """A step on `batch` recordings, which lie in one row."""
    values = {
        "stage": "SFT",
        "model_name_or_path": folder,
        "train_dataset_path": folder / "data.jsonl",
        "train_dataset_type": "asr",
        "data_cache_dir": folder / "cache",
        "output_dir": folder / "output",
        "max_seq_len": 2048,
    }
    (folder / "asr.yaml").write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    config = Config.load(folder / "asr.yaml", verb="train")
    model_config, tokenizer, template = begin(config, writes_output=False)
    dataset = training_dataset(config, tokenizer, template)
    audio = dataset.audio
    assert audio is not None
    model = build_model(model_config, folder)
    model.train()
    parameters = {name: tensor for name, tensor in model.named_parameters() if not tensor.stop_gradient}
    optimizer, objective = build_optimizer(parameters, TrainingParameters(weight_decay=0.01)), supervised()

    def make(number: int) -> tuple[Batch, int]:
        numbers = workload.batch_numbers(number, batch, len(dataset))
        rows = [[dataset.sample(index) for index in numbers]]
        made = collate(rows, [numbers], tokenizer.pad_id)
        samples = sum(clip.length for row in rows for sample in row for clip in sample.clips)
        return made.with_arrays(**audio_arrays(rows, made.shape, audio)), samples

    source = ahead(make)

    def step(number: int) -> tuple[float, int]:
        made, samples = next(source)
        done = train_step(
            model, list(parameters.values()), optimizer, objective, [made],
            step=number, learning_rate=1e-4, max_grad_norm=1.0,
        )  # fmt: skip
        return done.totals.loss, samples

    return step


def write_down(folder: Path, batch: int) -> Step:
    """Transcripts of `batch` recordings, as `erniekit transcribe` makes them."""
    model = ChatModel.load(folder)
    records = workload.records(folder)
    settings = TranscriptionSettings(batch_size=batch, max_new_tokens=workload.NEW_TOKENS)

    def step(number: int) -> tuple[float, int]:
        paths = [Path(records[index]["audio_path"]) for index in workload.batch_numbers(number, batch, len(records))]
        found = {made.path: made for made in transcribe(model, paths, settings) if isinstance(made, Transcript)}
        seconds = sum(made.seconds for made in found.values())
        return workload.fingerprint([found[path].text for path in paths]), round(seconds * workload.RATE)

    return step


if __name__ == "__main__":
    settings = workload.arguments()
    tasks = {"train": train, "transcribe": write_down}
    serve(tasks[settings.task](settings.folder, settings.batch))
