"""Print as JSON what the library of a tracker reads in a folder; runs where these libraries are (make parity).

python read_tracker.py NAME FOLDER
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _log_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's form, with a header of 7 bytes: blocks of 32 KiB, records of
    checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last)."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if kind == 0:
            return
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, Any] = {"figures": {}, "config": {}, "card": {}}
    for data in _log_records(file):
        record = Record.FromString(data)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            found["figures"].setdefault(name, json.loads(item.value_json))
        for item in record.run.config.update:
            found["config"][item.key] = json.loads(item.value_json)
        for item in record.summary.update:
            if "model_card" in (item.key, *item.nested_key[:1]):
                found["card"].setdefault("/".join(item.nested_key) or item.key, json.loads(item.value_json))
    return found


def mlflow(folder: Path) -> dict[str, Any]:
    import mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(folder.as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'erniekit'")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    return {
        "figures": dict(run.data.metrics),
        "steps": [point.step for point in history],
        "config": dict(run.data.params),
        "card": json.loads((root / "model_card.json").read_text()),
        "status": run.info.status,
        "tags": dict(run.data.tags),
    }


def swanlab(folder: Path) -> dict[str, Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (file,) = folder.glob("run-*/run-*.swanlab")
    reader = DataStoreReader()
    reader.open(file)
    records = [str(Record.FromString(data)) for data in reader]
    return {"records": records, "config": (file.parent / "files" / "config.yaml").read_text()}


def trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio as library
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = library.Api().runs("erniekit")
    logs = SQLiteStorage.get_logs("erniekit", run.name)
    figures = {name: value for log in logs for name, value in log.items()}
    return {"figures": figures, "steps": [log["step"] for log in logs], "config": run.config}


if __name__ == "__main__":
    read = {"wandb": wandb, "mlflow": mlflow, "swanlab": swanlab, "trackio": trackio}[sys.argv[1]]
    print(json.dumps(read(Path(sys.argv[2])), default=str))
