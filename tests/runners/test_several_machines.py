"""Ranks on two machines, started as docs/parallelism.md says: two network namespaces with an address each.

Where the system makes no namespaces, two groups of processes meet on the loopback interface instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.launch.local import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
MAIN = str(ROOT / "erniekit/__main__.py")
SIMULATED = str(Path(__file__).with_name("start_ranks_as.py"))
MakeConfig = Callable[..., Config]


class Machine:
    """A machine of the tests: the words that run a command on it, and its address."""

    def __init__(self, prefix: tuple[str, ...], address: str) -> None:
        self.prefix, self.address = prefix, address

    def start(self, *words: str, output: Path) -> subprocess.Popen:
        names = ("PADDLE_", "SLURM_", "OMPI_", "PMI_", "MASTER_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        with output.open("w") as file:
            return subprocess.Popen(
                [*self.prefix, sys.executable, *words],
                env=environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                cwd=output.parent,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other, by namespaces if the system allows them."""
    names, addresses = (f"erniekit-{os.getpid()}-{node}" for node in "ab"), ("10.87.13.1", "10.87.13.2")
    first, second = names
    links = [f"ek{os.getpid()}{node}" for node in "ab"]
    commands = [
        f"netns add {first}",
        f"netns add {second}",
        f"link add {links[0]} netns {first} type veth peer name {links[1]} netns {second}",
    ]
    for name, link, address in zip((first, second), links, addresses, strict=True):
        commands += [
            f"-n {name} link set lo up",
            f"-n {name} address add {address}/24 dev {link}",
            f"-n {name} link set {link} up",
        ]
    try:
        if all(_ip(command) for command in commands):
            yield tuple(
                Machine(("ip", "netns", "exec", name), address)
                for name, address in zip((first, second), addresses, strict=True)
            )
        else:
            yield Machine((), "127.0.0.1"), Machine((), "127.0.0.1")
    finally:
        for name in (first, second):
            _ip(f"netns del {name}")


def _ip(command: str) -> bool:
    try:
        return subprocess.run(["ip", *command.split()], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def expected(make_config: MakeConfig, tmp_path: Path) -> list[float]:
    """The losses of one process over the micro-batches that two ranks share."""
    config = make_config(output_dir=str(tmp_path / "alone"), max_steps=2, gradient_accumulation_steps=2)
    alone = Machine((), "").start(MAIN, "train", str(config.path), output=tmp_path / "alone.txt")
    assert alone.wait(60) == 0, (tmp_path / "alone.txt").read_text()
    found = losses(tmp_path / "alone")
    assert len(found) == 2
    return found


@pytest.mark.parametrize("launcher", ["paddle", "slurm", "mpi", "kubernetes"])
def test_two_machines_train_as_one_process(
    launcher: str, machines: tuple[Machine, Machine], expected: list[float], make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(output_dir=str(tmp_path / "both"), max_steps=2, gradient_accumulation_steps=1)
    host, port = machines[0].address, str(free_port(""))
    command = (MAIN, "train", str(config.path))
    jobs, outputs = [], [tmp_path / f"node-{node}.txt" for node in range(2)]
    for node, machine in enumerate(machines):
        if launcher == "paddle":
            logs = ("--log_dir", str(tmp_path / f"logs-{node}"))
            place = ("--nnodes", "2", "--master", f"{host}:{port}", "--rank", str(node), "--host", machine.address)
            words = ("-m", "paddle.distributed.launch", *place, "--nproc_per_node", "1", *logs, *command)
        else:
            words = (SIMULATED, launcher, str(node), "2", "1", host, port, sys.executable, *command)
        jobs.append(machine.start(*words, output=outputs[node]))
    try:
        codes = [job.wait(90) for job in jobs]
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert codes == [0, 0], "\n".join(output.read_text() for output in outputs)
    assert losses(tmp_path / "both") == pytest.approx(expected, rel=1e-6)
    assert "saved the model" in "".join(path.read_text() for path in tmp_path.rglob("*.txt"))
