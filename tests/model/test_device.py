"""Which device is used; the GPUs of this test are not there."""

from __future__ import annotations

import paddle
import pytest

from erniekit.errors import ConfigurationError
from erniekit.model.device import use_device


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that are selected, on a machine with four GPUs."""
    devices: list[str] = []
    monkeypatch.delenv("FLAGS_selected_gpus", raising=False)
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(paddle.device, "set_device", devices.append)
    return devices


def test_a_process_alone_takes_the_first_gpu_unless_one_is_named(used: list[str]) -> None:
    assert [use_device(wanted) for wanted in ("auto", "gpu", "gpu:2", "cpu")] == ["gpu:0", "gpu:0", "gpu:2", "cpu"]
    assert used == ["gpu:0", "gpu:0", "gpu:2", "cpu"]


def test_a_rank_takes_the_gpu_that_its_launcher_has_given_it(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_selected_gpus", "3")
    assert [use_device(wanted) for wanted in ("auto", "gpu", "cpu")] == ["gpu:3", "gpu:3", "cpu"]


def test_a_gpu_that_is_not_there_is_refused(used: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="device: gpu:4: this machine has 4 GPUs"):
        use_device("gpu:4")
