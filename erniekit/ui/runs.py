"""Runs of the working folder: what they log, how they stand, and what they are told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from erniekit.config import Config
from erniekit.errors import ConfigurationError, UserError
from erniekit.redaction import redacted
from erniekit.training.callbacks.files import EVALUATION_FILE, LOG_FILE, TRAINING_FILE
from erniekit.training.checkpoint.lock import is_locked
from erniekit.training.control import forward_commands, parse
from erniekit.ui.check import check_text
from erniekit.ui.detached import Started, exit_code, is_alive, output_tail, start, started_runs, terminate
from erniekit.ui.workspace import CONFIGURATIONS, OutsideError, Workspace

# Of inference/answer_eval.py and training/checkpoint/state.py, which need Paddle.
SAMPLES_FILE, CONFIG_FILE = "eval_samples.jsonl", "training_config.yaml"
MOST_SAMPLES, MOST_RECORDS = 50, 20_000
_PROGRESS = re.compile(r"step \d+/(\d+) ")


def start_run(workspace: Workspace, name: str, *, resume: bool = False) -> dict[str, Any]:
    """Start `erniekit train` on a configuration of the working folder; return the run as `run_list` does.

    Raises:
        UserError: the configuration has problems, writes elsewhere, or its run is not over.
    """
    path = workspace.inside(name)
    if path.suffix.lower() not in CONFIGURATIONS or not path.is_file():
        raise ConfigurationError(f"{name}: there is no such configuration; save it before you start it")
    checked = check_text(path.read_text(encoding="utf-8"), name, workspace)
    config = checked.config
    if config is None:
        raise ConfigurationError("\n".join(problem["text"] for problem in checked.problems))
    output = workspace.name(workspace.inside(str(config.output_dir)))
    runs = started_runs(workspace.root)
    if any(run.output == output and is_alive(run) for run in runs) or is_locked(workspace.root / output):
        raise ConfigurationError(f"a run is writing to {output}; wait for it to end, or choose another output_dir")
    words = ["train", workspace.name(path), *(["resume_from_checkpoint=true"] if resume else [])]
    started = start(words, workspace.root, output=output, file=workspace.name(path))
    return _described(workspace, output, started)


def run_list(workspace: Workspace) -> list[dict[str, Any]]:
    """Return all runs, those that go on and the latest first; a run is its output folder."""
    started: dict[str, Started] = {}
    for run in started_runs(workspace.root):
        started.setdefault(run.output, run)
    folders = {workspace.name(path) for path, files in workspace.walk() if LOG_FILE in files}
    runs = [_described(workspace, output, started.get(output)) for output in {*folders, *started}]
    return sorted(runs, key=lambda run: (run["state"] not in ("running", "starting"), -run["at"]))


def run_state(workspace: Workspace, output: str, cursor: str = "") -> dict[str, Any]:
    """Return how a run stands, with the records that it has logged since `cursor`.

    Args:
        cursor: of the last answer; "" for all records. The answer's `fresh` says that its records replace all others.

    Raises:
        ConfigurationError: there is no such run.
    """
    run = _started(workspace, output)
    folder = _folder(workspace, output)
    records, position, fresh = _records(folder / LOG_FILE, cursor)
    return {
        **_described(workspace, output, run),
        "records": records,
        "cursor": position,
        "fresh": fresh,
        "output_tail": redacted(output_tail(run, workspace.root)) if run else "",
        "results": {**_json(folder / EVALUATION_FILE), **_json(folder / TRAINING_FILE)},
        "samples": _samples(folder / SAMPLES_FILE),
    }


def run_parameters(workspace: Workspace, output: str) -> dict[str, Any]:
    """Return the resolved parameters of a run; {} while it has not written them."""
    folder = _folder(workspace, output)
    checkpoints = sorted(folder.glob(f"checkpoint-*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in (folder / CONFIG_FILE, *reversed(checkpoints)):
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        return values if isinstance(values, dict) else {}
    run = _started(workspace, output)
    try:
        return Config.load(workspace.inside(run.file)).resolved() if run else {}
    except UserError:
        return {}


def send_command(workspace: Workspace, output: str, line: str) -> str:
    """Tell a run something (`training/control.py`); return what was done, as a sentence.

    A run that has not begun to train reads nothing yet, so `quit` ends its process.

    Raises:
        ConfigurationError: the line is no command, or the run does not go on.
    """
    try:
        command = str(parse(line))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    folder, run = _folder(workspace, output), _started(workspace, output)
    if is_locked(folder):
        if problem := forward_commands([command], folder):
            raise ConfigurationError(problem)
        return f"`{command}` will be read before the next step"
    if run is None or not is_alive(run):
        raise ConfigurationError(f"{output}: no run is writing there, so nobody would read `{command}`")
    if command == "quit":
        terminate(run)
        return "the run had not begun to train, so it was ended"
    raise ConfigurationError(f"{output}: the run has not begun to train; try again in a moment")


def _started(workspace: Workspace, output: str) -> Started | None:
    return next((run for run in started_runs(workspace.root) if run.output == output), None)


def _folder(workspace: Workspace, output: str) -> Path:
    folder = workspace.inside(output)
    if not (folder / LOG_FILE).is_file() and _started(workspace, output) is None:
        raise ConfigurationError(f"{output}: there is no run")
    return folder


def _described(workspace: Workspace, output: str, run: Started | None) -> dict[str, Any]:
    try:
        folder = workspace.inside(output)
    except OutsideError:  # a link that was made later
        folder = workspace.root / "nowhere"
    log = folder / LOG_FILE
    alive, code = run is not None and is_alive(run), exit_code(run, workspace.root) if run else None
    training = is_locked(folder)
    state = "running" if training else "starting" if alive else "failed" if code else "ended"
    return {
        "output": output,
        "file": run.file if run else "",
        "state": state,
        "code": None if alive or training else code,
        "at": max(run.at if run else 0.0, log.stat().st_mtime if log.is_file() else 0.0),
        "total": _total_steps(output_tail(run, workspace.root)) if run else None,
        "ours": run is not None,
    }


def _total_steps(printed: str) -> int | None:
    found = _PROGRESS.findall(printed)
    return int(found[-1]) if found else None


def _records(log: Path, cursor: str) -> tuple[list[dict[str, Any]], str, bool]:
    """Return the complete lines of a log behind `cursor`, the next cursor, and whether the file is another one."""
    try:
        with log.open("rb") as file:
            number = str(log.stat().st_ino)
            known, _, place = cursor.partition("-")
            offset = int(place) if known == number and place.isascii() and place.isdecimal() else 0
            size = file.seek(0, 2)
            offset = offset if offset <= size else 0
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], "", True
    whole = data[: data.rfind(b"\n") + 1]
    return _parsed(whole.splitlines()[-MOST_RECORDS:]), f"{number}-{offset + len(whole)}", offset == 0


def _parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _samples(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            return _parsed(islice(file, MOST_SAMPLES))
    except OSError:
        return []


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
