"""Which device is used; the GPUs of this test are not there."""

from __future__ import annotations

import paddle
import pytest

from erniekit.errors import ConfigurationError
from erniekit.model.device import has_fp8_products, use_device


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


def test_other_devices_are_passed_on_where_paddle_knows_them(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.device, "get_all_custom_device_type", lambda: ["npu"])
    assert [use_device("npu"), use_device("npu:3")] == ["npu:0", "npu:3"] == used
    monkeypatch.setenv("FLAGS_selected_npus", "2")
    assert use_device("npu") == "npu:2"
    for absent, build in (("xpu", "PaddlePaddle built for XPU"), ("mlu:1", "PaddlePaddle with its plug-in for mlu")):
        with pytest.raises(ConfigurationError, match=f"device: {absent}: .* install {build}, or set device: cpu"):
            use_device(absent)


@pytest.mark.parametrize(
    ("device", "capability", "cuda", "expected"),
    [
        ("gpu:0", (8, 9), "12.6", True),
        ("gpu:1", (9, 0), "12.1", True),
        ("gpu:0", (8, 6), "12.6", False),
        ("gpu:0", (9, 0), "11.8", False),
        ("gpu:0", (9, 0), "False", False),  # as Paddle says it of builds for other makers
        ("cpu", (9, 0), "12.6", False),
    ],
)
def test_which_devices_multiply_eight_bit_floats(
    device: str, capability: tuple[int, int], cuda: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_fp8_products()
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle, "get_device", lambda: device)
    monkeypatch.setattr(paddle.version, "cuda", lambda: cuda)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda: capability)
    assert has_fp8_products() == expected
