"""The clients of trackers, in a process of their own that `tracker_process` starts and ends. Needs no other package.

    python -m erniekit.training.callbacks.tracker_clients NAME FOLDER

Standard input has one call a line, a JSON object such as {"call": "figures", "step": 4, "values": {"train/loss": 2.5}};
standard output answers {"told": TEXT} or {"error": TEXT}. What libraries print goes nowhere. If the run ends without a
last call, its tracker learns that it was broken off.

To add one, write a class with the methods of `Client`, and name it in `CLIENTS`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from erniekit.redaction import redacted

PROJECT = "erniekit"  # where the library's own variable names none
LAST_SECONDS = 120  # for which a client outlives its run
Values = dict[str, Any]
Samples = list[dict[str, str]]  # question, answer, expected, scores; "sound" is a path
_COLUMNS = ("place", "question", "answer", "expected", "scores")


class Client(Protocol):
    """What a tracker is told of a run; each method takes JSON values without secrets.

    `start` returns where the run can be seen, for people.
    """

    def start(self, name: str, run_id: str, config: Values, environment: Values) -> str: ...
    def figures(self, step: int, values: dict[str, float]) -> None: ...
    def samples(self, step: int, samples: Samples) -> None: ...
    def picture(self, name: str, path: str) -> None: ...
    def card(self, values: Values) -> None: ...
    def finish(self, finished: bool) -> None: ...


class Wandb:
    """Weights & Biases; WANDB_MODE=offline needs no network, WANDB_PROJECT names the project."""

    def __init__(self, folder: Path) -> None:
        self._library, self._folder = importlib.import_module("wandb"), folder

    def start(self, name: str, run_id: str, config: Values, environment: Values) -> str:
        # neither the source nor the repository, the program's words or the packages of the machine
        quiet = {"console": "off", "disable_code": True, "disable_git": True, "save_code": False, "silent": True}
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=run_id,
            resume="allow",
            dir=str(self._folder),
            config={**config, "environment": environment},
            settings=self._library.Settings(**quiet, x_save_requirements=False, x_disable_meta=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which its own would refuse
        return str(self._run.url or f"kept in {self._run.dir}; `wandb sync` sends it")

    def figures(self, step: int, values: dict[str, float]) -> None:
        self._run.log({**values, "step": step})

    def samples(self, step: int, samples: Samples) -> None:
        table = self._library.Table(columns=list(_COLUMNS))
        for sample in samples:
            table.add_data(*(sample[name] for name in _COLUMNS))
        heard = {
            f"sounds/{number}": self._library.Audio(s["sound"]) for number, s in enumerate(samples) if "sound" in s
        }
        self._run.log({"samples": table, **heard, "step": step})

    def picture(self, name: str, path: str) -> None:
        self._run.log({f"pictures/{name}": self._library.Image(path)})

    def card(self, values: Values) -> None:
        self._run.summary.update({"model_card": values})

    def finish(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """MLflow; MLFLOW_TRACKING_URI names the server, otherwise files in the folder are written."""

    def __init__(self, folder: Path) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = folder.as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its data base needs a larger installation
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody asked for it
        self._library, self._folder = importlib.import_module("mlflow"), folder

    def start(self, name: str, run_id: str, config: Values, environment: Values) -> str:
        library, known = self._library, self._folder / f"{run_id}.run"
        library.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        if known.is_file():
            run = library.start_run(run_id=known.read_text(encoding="utf-8"))
        else:
            run = library.start_run(
                run_name=name, tags={f"erniekit.{key}": str(environment[key]) for key in environment}
            )
            known.write_text(run.info.run_id, encoding="utf-8")
        parameters = [(key, str(value)[:5000]) for key, value in config.items()]
        for first in range(0, len(parameters), 100):  # at most so many in a call
            library.log_params(dict(parameters[first : first + 100]))
        library.log_dict(config, "config.json")
        return f"{redacted(library.get_tracking_uri())}, run {run.info.run_id}"

    def figures(self, step: int, values: dict[str, float]) -> None:
        self._library.log_metrics(values, step=step)

    def samples(self, step: int, samples: Samples) -> None:
        self._library.log_dict({"step": step, "samples": samples}, f"samples/step-{step}.json")
        for sample in samples:
            if "sound" in sample:
                self._library.log_artifact(sample["sound"], f"samples/step-{step}")

    def picture(self, name: str, path: str) -> None:
        self._library.log_artifact(path, "pictures")

    def card(self, values: Values) -> None:
        self._library.log_dict(values, "model_card.json")

    def finish(self, finished: bool) -> None:
        self._library.end_run("FINISHED" if finished else "KILLED")


class Swanlab:
    """SwanLab; SWANLAB_MODE=offline or local needs no network, SWANLAB_PROJECT names the project."""

    def __init__(self, folder: Path) -> None:
        self._library, self._folder = importlib.import_module("swanlab"), folder

    def start(self, name: str, run_id: str, config: Values, environment: Values) -> str:
        library = self._library
        # neither the packages of the machine nor the words of its programs, which may hold addresses with passwords
        probe = library.Settings.Probe(requirements=False, git=False, runtime=False)
        settings = library.Settings(interactive=False, probe=probe)
        online = os.environ.get("SWANLAB_MODE", "online") in ("online", "cloud")
        self._library.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=name,
            log_dir=str(self._folder),
            config={**config, "environment": environment},
            settings=settings,
            **({"id": run_id, "resume": "allow"} if online else {}),
        )
        return "online" if online else f"kept in {self._folder}"

    def figures(self, step: int, values: dict[str, float]) -> None:
        self._library.log(values, step=step)

    def samples(self, step: int, samples: Samples) -> None:
        texts = [self._library.Text(_text(sample), caption=sample["place"]) for sample in samples]
        self._library.log({"samples": texts}, step=step)
        if sounds := [self._library.Audio(sample["sound"]) for sample in samples if "sound" in sample]:
            self._library.log({"sounds": sounds}, step=step)

    def picture(self, name: str, path: str) -> None:
        self._library.log({f"pictures/{name}": self._library.Image(path)})

    def card(self, values: Values) -> None:
        self._library.log({"model_card": self._library.Text(json.dumps(values, indent=2))})

    def finish(self, finished: bool) -> None:
        self._library.finish("success" if finished else "aborted")


class Trackio:
    """Trackio; files in the folder, or TRACKIO_SPACE_ID or TRACKIO_SERVER_URL; TRACKIO_PROJECT names the project."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        self._library, self._folder = importlib.import_module("trackio"), folder

    def start(self, name: str, run_id: str, config: Values, environment: Values) -> str:
        self._run = self._library.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{name}-{run_id[:6]}",
            resume="allow",
            config={**config, "environment": environment},
            embed=False,
            auto_log_cpu=False,
        )
        return f"kept in {os.environ['TRACKIO_DIR']}" if not os.environ.get("TRACKIO_SPACE_ID") else "online"

    def figures(self, step: int, values: dict[str, float]) -> None:
        self._library.log(values, step=step)

    def samples(self, step: int, samples: Samples) -> None:
        rows = [{name: sample[name] for name in _COLUMNS} for sample in samples]
        table = self._library.Table(columns=list(_COLUMNS), data=[list(row.values()) for row in rows])
        sounds = {
            f"sounds/{number}": self._library.Audio(sample["sound"])
            for number, sample in enumerate(samples)
            if "sound" in sample
        }
        self._library.log({"samples": table, **sounds}, step=step)

    def picture(self, name: str, path: str) -> None:
        self._library.log({f"pictures/{name}": self._library.Image(path)})

    def card(self, values: Values) -> None:
        self._library.log({"model_card": self._library.Markdown(f"```json\n{json.dumps(values, indent=2)}\n```")})

    def finish(self, finished: bool) -> None:
        self._library.finish()


CLIENTS: dict[str, Callable[[Path], Client]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "swanlab": Swanlab,
    "trackio": Trackio,
}


def _text(sample: dict[str, str]) -> str:
    return "\n\n".join(f"{name}: {sample[name]}" for name in _COLUMNS[1:] if sample[name])


def run_id_of(folder: Path, resumed: bool) -> str:
    """Return the name by which a tracker knows this run; a resumed run has the one that it had."""
    path = folder / "run_id"
    if resumed and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:16]
    path.write_text(run_id, encoding="utf-8")
    return run_id


def main(name: str, folder: Path) -> int:
    """Carry out the calls of standard input; return 0, or 1 if the tracker cannot be started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run decides when to end, and waits for this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    calls = os.fdopen(os.dup(0), encoding="utf-8")  # libraries must not ask questions
    sys.argv[:] = ["erniekit-run"]  # no file: libraries look for a repository around what was started
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)

    def answer(kind: str, text: object) -> None:
        if not answers.closed:
            answers.write(json.dumps({kind: redacted(str(text))}) + "\n")
            answers.flush()

    client: Client | None = None
    ended = False
    for line in calls:
        values = json.loads(line)
        call = values.pop("call")
        try:
            if call == "start":
                run_id = run_id_of(folder, values.pop("resumed"))
                client = CLIENTS[name](folder)
                answer("told", client.start(run_id=run_id, **values))
            elif client is not None:
                ended = ended or call == "finish"
                getattr(client, call)(**values)
        except (Exception, SystemExit) as error:
            answer("error", f"{call}: {_reason(error)}")
            if call == "start":
                return 1
    if client is not None and not ended:  # the run was killed
        signal.alarm(LAST_SECONDS)
        client.finish(False)
    return 0


def _reason(error: BaseException) -> str:
    """Return the first line of an error, of which libraries write many."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    os._exit(code)  # whatever libraries still have to do at the exit, may take for ever
