"""How Ray is started, reached and left; without Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import TrainingError, UserError
from erniekit.rollouts.ray_cluster import ray_cluster
from tests.rollouts.fake_ray import FakeRay
from tests.rollouts.test_workers import address, fake  # noqa: F401 (fixtures)


def test_a_ray_of_our_own_listens_to_this_machine_alone(fake: FakeRay) -> None:  # noqa: F811
    """In a folder that goes with it, without a dashboard, with room for two sets of weights."""
    with ray_cluster("", 3, 1 << 30) as ray:
        assert ray is fake and os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        (given,) = fake.inits
        assert Path(given["_temp_dir"]).is_dir() and given["_node_ip_address"] == "127.0.0.1"
        assert given["address"] == "local" and given["include_dashboard"] is False and given["num_cpus"] == 3
        assert given["object_store_memory"] >= 2 << 30 and given["_system_config"] == {"worker_niceness": 0}
    assert not Path(given["_temp_dir"]).exists() and not fake.running


def test_a_cluster_of_others_is_left_as_it_was(fake: FakeRay, address: str) -> None:  # noqa: F811
    with ray_cluster(address, 3, 0):
        assert fake.inits[0].keys() == {"address", "log_to_driver", "logging_level"}
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"  # as it was
    assert not fake.running


def test_an_address_of_the_environment_is_not_ignored_silently(fake: FakeRay, monkeypatch: Any, logged: Any) -> None:  # noqa: F811
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with ray_cluster("", 1, 0):
        pass
    assert any("RAY_ADDRESS=10.0.0.1:6379 is not used: write `ray_address" in line for line in logged)


def test_a_cluster_that_does_not_answer_is_told(fake: FakeRay, address: str) -> None:  # noqa: F811
    """Whether Ray says so, or nobody listens; then Ray is not asked, which would try for minutes."""
    fake.refuses = ConnectionError("no answer")
    told = r"there is no Ray that can be reached: no answer\n.*ray start --head"
    with pytest.raises(TrainingError, match=told), ray_cluster(address, 1, 0):
        pass
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    told = rf"127.0.0.1:{port}: there is no Ray that can be reached: .*refused"
    with pytest.raises(TrainingError, match=told), ray_cluster(f"127.0.0.1:{port}", 1, 0):
        pass
    assert len(fake.inits) == 1


def test_ray_ends_with_an_error(fake: FakeRay) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match="of the body"), ray_cluster("", 1, 0):
        raise RuntimeError("of the body")
    assert not fake.running


def test_signals_stay_ours(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def init(**settings: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(fake, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with ray_cluster("", 1, 0):
        assert signal.getsignal(signal.SIGTERM) == before


def test_ray_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = r"cannot be imported: .*\n  Install it: pip install 'erniekit\[ray\]'"
    with pytest.raises(UserError, match=told), ray_cluster("", 1, 0):
        pass


def test_a_worker_chooses_its_threads_before_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, as Ray starts it: with the environment of a rank, and without Paddle."""
    code = (
        "import os, sys; from erniekit.rollouts.worker import RolloutWorker, choose_threads; RolloutWorker(); "
        "assert 'paddle' not in sys.modules and 'numpy' not in sys.modules; choose_threads(3); "
        "print(os.environ['OMP_NUM_THREADS'], [name for name in os.environ if name.startswith('PADDLE_')])"
    )
    environment = {**os.environ, "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "OMP_NUM_THREADS": "8"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "3 []\n"
