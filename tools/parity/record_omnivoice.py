#!/usr/bin/env python3
"""Record what the model of the `omnivoice` package computes of documents of codes, and how it is saved.

    .venv-transformers5/bin/python tools/parity/record_omnivoice.py [--open FOLDER [--adapters FOLDER] [--output FILE]]

Needs omnivoice 0.2.1 (and so transformers 5 and torch); what it imports to read sound is replaced by empty modules.
Writes tests/model/recorded/omnivoice.npz: for each decoder of tests/model/omnivoice_cases.py the logits, the loss and
all gradients of a padded batch, the same loss of a packed row, and the names, types and shapes of a saved folder.
Weights are those of tests/model/seeded_weights.py and are not stored. With --open it opens what ERNIEKit has saved,
with adapters by peft, prints the loss of the packed row, and writes the logits of the padded batch into FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.model.omnivoice_cases import BASES, LEVELS, RECORDED, SEED, documents, outer_values  # noqa: E402
from tests.model.seeded_weights import seeded_weight  # noqa: E402
from tools.parity.empty_modules import CUT_SILENCE, READ_SOUND, replace_modules  # noqa: E402

replace_modules(*READ_SOUND, *CUT_SILENCE)

import torch  # noqa: E402
from omnivoice.data.collator import PackingDataCollator, PaddingDataCollator  # noqa: E402
from omnivoice.models.omnivoice import OmniVoice, OmniVoiceConfig  # noqa: E402

PROCESSOR = SimpleNamespace(text_tokenizer=SimpleNamespace(pad_token_id=0))


def build(base: str) -> OmniVoice:
    """Return the package's model around a decoder, with seeded weights."""
    model = OmniVoice(OmniVoiceConfig(**outer_values(), llm_config=dict(BASES[base])))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(seeded_weight(name, tuple(parameter.shape), SEED)))
    return model.train()


def samples(*, last_level: bool = True) -> list[dict[str, Any]]:
    """Return the documents as the package's processor gives them."""
    found = []
    for document in documents(last_level=last_level):
        text = np.broadcast_to(document.ids, (LEVELS, len(document.ids)))
        ids = torch.from_numpy(np.concatenate([text, document.codes], 1))
        labels = torch.from_numpy(np.concatenate([np.full_like(text, -100), document.labels], 1))
        is_audio = torch.arange(ids.shape[1]) >= len(document.ids)
        found.append({"input_ids": ids, "labels": labels, "audio_mask": is_audio, "length": ids.shape[1]})
    return found


def packed_inputs(**options: bool) -> dict[str, Any]:
    """Return the row of the package's packing, with its mask of documents as a matrix."""
    inputs = PackingDataCollator(PROCESSOR, 48)(samples(**options))
    documents_S = inputs.pop("document_ids")[0]
    return {**inputs, "attention_mask": (documents_S[:, None] == documents_S)[None, None]}


def run(base: str) -> dict[str, np.ndarray]:
    """Return what is recorded of a decoder."""
    model = build(base)
    outputs = model(**PaddingDataCollator(PROCESSOR, 1000)(samples()))
    outputs.loss.backward()
    recorded = {
        "logits": logits_of(outputs),
        "loss": outputs.loss.detach().numpy(),
        "packed_loss": model(**packed_inputs()).loss.detach().numpy(),
        "loss_without_last_level": model(**packed_inputs(last_level=False)).loss.detach().numpy(),
    }
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        recorded[f"gradient/{name}"] = gradient.numpy()
    return recorded | {"saved": np.frombuffer(json.dumps(saved(model)).encode(), np.uint8)}


def logits_of(outputs: Any) -> np.ndarray:
    """Return the logits [S, C, V] of a padded batch, one document behind another."""
    lengths = [sample["length"] for sample in samples()]
    logits = [outputs.logits[row, :, :length] for row, length in enumerate(lengths)]  # [C, S, V] of each document
    return torch.cat(logits, 1).permute(1, 0, 2).detach().numpy()


def opened(folder: str, adapters: str | None) -> Any:
    """Open a saved model as the package opens one to train it; nothing may be missing or unknown."""
    model, told = OmniVoice.from_pretrained(folder, train=True, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    if adapters:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapters)
    return model.eval()


def saved(model: OmniVoice) -> dict[str, Any]:
    """Return config.json of a saved folder, and the type and shape of each tensor."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: [each.get_dtype(), each.get_shape()] for name, each in slices.items()}
    return {"config": config, "tensors": tensors}


def record() -> None:
    """Write what is recorded of all decoders."""
    arrays = {f"{base}/{name}": values for base in BASES for name, values in run(base).items()}
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **arrays)
    print(f"{RECORDED}: {RECORDED.stat().st_size:,} bytes")
    for base in BASES:
        print(base, *(f"{name} {arrays[f'{base}/{name}']:.6f}" for name in ("loss", "packed_loss")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", metavar="FOLDER")
    parser.add_argument("--adapters", metavar="FOLDER")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    if not options.open:
        record()
        return
    model = opened(options.open, options.adapters)
    print(f"loss {float(model(**packed_inputs()).loss):.7f}")
    if options.output:
        np.save(options.output, logits_of(model(**PaddingDataCollator(PROCESSOR, 1000)(samples()))))


if __name__ == "__main__":
    main()
