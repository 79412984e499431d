"""Write the README.md of an exported model: its base, data, parameters and results. Needs no Paddle."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from erniekit import __version__
from erniekit.data.templates.transcription import DEFAULT_PROMPT

MODEL_CARD_FILE = "README.md"
_LICENCE_KEYS = ("license", "license_name", "license_link")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
USE_WEIGHTS = """\
```sh
erniekit chat FOLDER
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", torch_dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```"""
USE_REWARD_MODEL = """\
```sh
erniekit score FOLDER DATA.jsonl
```

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("FOLDER", torch_dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```"""
USE_LISTENER = """\
```sh
erniekit transcribe FOLDER recording.wavREQUEST
erniekit generate FOLDER --audio recording.wav --prompt TEXT
```

```python
from transformers import AutoProcessor, CLASS

model = CLASS.from_pretrained("FOLDER", torch_dtype="auto")
processor = AutoProcessor.from_pretrained("FOLDER")
```"""
USE_SPEAKER = """\
```sh
erniekit speak FOLDER --text TEXT --output spoken.wav
```"""
USE_PROGRAM = """\
```sh
erniekit generate FOLDER --prompt TEXT
erniekit chat FOLDER
```

One program serves prefill and decoding, with a key-value cache; `inference_config.json` lists its inputs in order.
B rows, S new tokens behind P cached ones (P may be 0), V the vocabulary, K key heads of size D:

| input | type | shape | |
|---|---|---|---|
| `input_ids` | int64 | [B, S] | the new tokens |
| `position_ids` | int64 | [B, S] | their positions in the text, from 0 |
| `attention_mask` | int64 | [B, P + S] | 1 for tokens, 0 for padding; cached ones first |
| `last_positions` | int64 | [B] | the token of each row, of S, whose logits are returned |
| `past_key_<layer>`, `past_value_<layer>` | float32 | [B, K, P, D] | key and value returned by the previous call |

Outputs: logits [B, V], then key and value of every layer [B, K, P + S, D], the past of the next call. In Python:

```python
from pathlib import Path
OPENING
from erniekit.export.static_program import ProgramDescription, generate_greedily

folder = Path("FOLDER")
answers = generate_greedily(open_it(folder), ProgramDescription.read(folder), prompts_as_token_ids, max_new_tokens=100)
```"""
_DATA_PARAMETERS = ("train_dataset_path", "eval_dataset_path")
_TRANSCRIPTION, _LISTENING, _GENERATION = "automatic-speech-recognition", "audio-text-to-text", "text-generation"
SPEECH_STAGE, _SPEECH = "TTS", "text-to-speech"
_ERROR_RATES = {"eval_wer": "WER", "eval_cer": "CER"}
TRANSCRIPTS_RECORD = "eval_transcripts"  # of results: what error rates were measured on, and after which normaliser


def model_card(
    *,
    name: str,
    base: str,
    base_folder: Path | None,
    is_adapter_merged: bool,
    parameters: Mapping[str, Any],
    results: Mapping[str, Any],
    facts: Mapping[str, str],
    use: str,
    library: str | None,
    listens: bool = False,
) -> str:
    """Return the text of the card; its YAML front matter is for the Hugging Face Hub.

    Args:
        base: path or hub id of the model that was trained; "" if it is unknown.
        base_folder: folder that may contain the base model's card, whose licence also applies to the new model.
        parameters: the run's parameters.
        results: the run's metrics.
        facts: about the files, such as their type and how far their logits are from the trained model's.
        use: how to use the files; Markdown.
        library: the Hub's name of the library that loads the files; None: no library that it knows.
        listens: whether the model takes recordings.
    """
    licence = _licence(base_folder)
    from_hub = parameters.get("from_hf_hub") or (is_adapter_merged and not parameters)  # PEFT's folders contain hub ids
    front: dict[str, Any] = {
        **licence,
        **({"base_model": base} if from_hub and _is_hub_id(base) else {}),
        **({"library_name": library} if library else {}),
        "pipeline_tag": _task(listens, parameters),
        "tags": ["erniekit", *(["lora"] if is_adapter_merged else []), *_stage_tags(parameters)],
        **_model_index(name, parameters, results),
    }
    made_from = f"`{base}`" if base else "a model that is not recorded"
    how = "by low-rank adapters, which are merged into the weights here" if is_adapter_merged else "in full"
    start = "random weights in the shape of " if parameters.get("continue_training") is False else ""
    blocks = [
        "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True) + "---",
        f"# {name}",
        f"Trained {how} from {start}{made_from}, and exported with ERNIEKit {__version__}.",
    ]
    if licence["license"] == "unknown":
        blocks.append("The base model's folder names no licence. Add its licence to the lines above.")
    blocks += _section("Use", use)
    blocks += _section("Files", _table(facts))
    blocks += _section("Data", _data(parameters))
    metrics = {key: _number(value) for key, value in results.items() if not isinstance(value, Mapping)}
    blocks += _section("Results", _table(metrics))
    blocks += _section("Transcription", _transcription(parameters, results))
    if parameters:
        text = yaml.safe_dump(dict(parameters), sort_keys=False, allow_unicode=True).rstrip()
        blocks += _section("Parameters", f"All parameters of the run, defaults included:\n\n```yaml\n{text}\n```")
    return "\n\n".join(blocks) + "\n"


def _task(listens: bool, parameters: Mapping[str, Any]) -> str:
    """Return the Hub's name of what the model does."""
    if parameters.get("stage") == SPEECH_STAGE:
        return _SPEECH
    if not listens:
        return _GENERATION
    return _TRANSCRIPTION if "asr" in (parameters.get("train_dataset_type") or ()) else _LISTENING


def _error_rates(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metrics of each held-out file by its name, of all data under "", where there are error rates."""
    sources = results.get("eval_sources")
    parts = {"": results, **(sources if isinstance(sources, Mapping) else {})}
    return {name: part for name, part in parts.items() if isinstance(part, Mapping) and "eval_wer" in part}


def _measured_on(parameters: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the held-out files, and the normaliser that both texts have passed."""
    record = results.get(TRANSCRIPTS_RECORD)
    known = record if isinstance(record, Mapping) else parameters
    files = known.get("eval_dataset_path") or []
    if not files and (fraction := parameters.get("eval_split")):
        files = [f"{fraction:g} of {path}" for path in parameters.get("train_dataset_path") or ()]
    return [str(path) for path in files], str(known.get("text_normalizer") or "none")


def _transcription(parameters: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return a table of the error rates, with their data and normaliser; "" without any."""
    rates = _error_rates(results)
    if not rates or parameters.get("stage") == SPEECH_STAGE:  # those of a listener, not of the model
        return ""
    files, normalizer = _measured_on(parameters, results)
    rows = ["| held-out data | WER | CER | recordings |", "|---|---|---|---|"]
    for name, part in rates.items():
        data = f"`{name}`" if name else ", ".join(f"`{path}`" for path in files) or "not recorded"
        cells = [f"{part[key]:.2%}" if isinstance(part.get(key), float) else "" for key in _ERROR_RATES]
        rows.append(f"| {data} | {' | '.join(cells)} | {part.get('eval_answers', 0):.0f} |")
    how = f"Errors over all words and characters, greedy decoding, `text_normalizer: {normalizer}`."
    return "\n".join([how, "", *rows])


def _model_index(name: str, parameters: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error rates as the Hub reads them, in per cent."""
    rates = _error_rates(results)
    if not rates or parameters.get("stage") == SPEECH_STAGE:
        return {}
    files, normalizer = _measured_on(parameters, results)
    entries = []
    for source, part in rates.items():
        data = source or ", ".join(files) or "held-out data"
        metrics = [
            {"type": label.lower(), "value": round(100 * part[key], 2), "name": f"{label} ({normalizer})"}
            for key, label in _ERROR_RATES.items()
            if isinstance(part.get(key), float)
        ]
        entries.append({"task": {"type": _TRANSCRIPTION}, "dataset": {"name": data, "type": data}, "metrics": metrics})
    return {"model-index": [{"name": name, "results": entries}]}


def use_of_listener(transformers_class: str, parameters: Mapping[str, Any]) -> str:
    """Return how to use a model that takes recordings; Markdown.

    Args:
        parameters: the run's: where it asked for transcripts in its own way, the command says it.
    """
    prompt, language = parameters.get("asr_prompt"), parameters.get("asr_language")
    request = f" --asr-prompt {shlex.quote(prompt)}" if prompt and prompt != DEFAULT_PROMPT else ""
    request += f" --language {shlex.quote(language)}" if language else ""
    return USE_LISTENER.replace("CLASS", transformers_class).replace("REQUEST", request)  # whatever words it has


def _licence(base_folder: Path | None) -> dict[str, str]:
    """Return the licence fields of the base model's card."""
    found = _front_matter(base_folder / MODEL_CARD_FILE) if base_folder else {}
    fields = {key: str(found[key]) for key in _LICENCE_KEYS if found.get(key)}
    return {"license": "unknown", **fields}


def _front_matter(path: Path) -> Mapping[str, Any]:
    """Return the YAML between the first two `---` lines of a card; empty if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        end = lines.index("---", 1) if lines[:1] == ["---"] else 0
        values = yaml.safe_load("\n".join(lines[1:end]))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_hub_id(base: str) -> bool:
    return bool(_HUB_ID.fullmatch(base)) and not Path(base).exists()


def _stage_tags(parameters: Mapping[str, Any]) -> list[str]:
    stage = parameters.get("stage")
    return [str(stage).lower()] if stage else []


def _data(parameters: Mapping[str, Any]) -> str:
    lines = []
    for name in _DATA_PARAMETERS:
        for path in parameters.get(name) or ():
            lines.append(f"- `{name}`: `{path}`")
    if fraction := parameters.get("eval_split"):
        lines.append(f"- `eval_split`: {fraction:g} of the records of each file were held out of training")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    cells = [f"| {key} | {str(value).replace('|', chr(92) + '|')} |" for key, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *cells])


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []
