"""`erniekit validate` answers any file soon: nothing is done in proportion to a number that the file holds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from erniekit.cli import main
from erniekit.config.registry import PARAMETERS
from erniekit.config.values import LARGEST_INTEGER

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples/configs/quickstart/sft.yaml")
SECONDS = 5.0  # of processor time, so that a busy machine is no failure; an answer takes a tenth of one
NUMBERS = {
    name: item.maximum or (LARGEST_INTEGER if "maximum" in item.kind.schema else 1e308)
    for name, item in PARAMETERS.items()
    if item.kind.schema.get("type") in ("integer", "number")
}
LAYOUT = ["tensor_parallel_degree=2", "pipeline_parallel_degree=2", "max_seq_len=512", "gradient_accumulation_steps=8"]


@pytest.fixture
def bounded() -> Iterator[None]:
    """End a test that takes more processor time than it should."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"validate was still at work after {SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", NUMBERS)
def test_the_largest_value_of_each_number(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone and in a layout of several ranks; it is valid or refused, without a traceback."""
    for words in ([], LAYOUT):
        others = [word for word in words if not word.startswith(f"{name}=")]
        assert main(["validate", QUICKSTART, f"{name}={NUMBERS[name]!r}", *others]) in (0, 2)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(
    "words",
    [
        ["--world-size", "1048576"],
        ["--world-size", "1048576", "pipeline_parallel_degree=2", "gradient_accumulation_steps=2147483648"],
        ["--world-size", "100000000"],
        ["pipeline_parallel_degree=1048576", "add_tail_layers=1048574"],
        ["pipeline_parallel_degree=2", "virtual_pp_degree=524288", "add_tail_layers=1048574"],
        ["pipeline_parallel_degree=1048576", "add_tail_layers=2097152", "pp_seg_method=uniform"],
        ["tensor_parallel_degree=1048576", "sequence_parallel=false"],
        ["per_device_train_batch_size=1e308"],
        ["max_steps=1e22"],
    ],
    ids=" ".join,
)
def test_degrees_ranks_and_micro_batches(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", QUICKSTART, *words]) in (0, 2)


@pytest.mark.usefixtures("bounded")
def test_a_file_that_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.yaml"
    file.write_text("".join(f"lerning_rate_{number}: 1\n" for number in range(5000)))
    assert main(["validate", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "5,003 problems" in lines[0] and lines[-1].endswith("more") and len(lines) < 300
    assert "`lerning_rate_0`: unknown parameter" in lines[1]
