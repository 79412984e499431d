"""The configurations of published models: each layout fits its model, its ranks and their memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erniekit.build.layout import known_model_config, plan_layout
from erniekit.cli import main
from erniekit.config import Config
from erniekit.errors import ConfigurationError

COMMAND = re.compile(r"#   erniekit (validate (\S+) --world-size (\d+))$", re.MULTILINE)
BYTES_OF_A_GPU = 80e9


def _commands() -> dict[Path, tuple[list[str], int]]:
    """What the head of each file says to run, and for how many ranks."""
    found = {}
    for path in sorted(Path("examples/configs").glob("*/*.yaml")):
        match = COMMAND.search(path.read_text(encoding="utf-8"))
        if match:
            assert match[2] == str(path)
            found[path] = (match[1].split(), int(match[3]))
    return found


COMMANDS = _commands()


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True)
def _no_model_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_every_model_has_every_method_at_every_length() -> None:
    expected = {
        f"ernie-4.5-{size}/{stage}{method}-{length}"
        for size, methods in (
            ("0.3b", ("", "-lora")),
            ("21b-a3b", ("", "-lora", "-lora-wint48")),
            ("300b-a47b", ("", "-lora", "-lora-wint48")),
        )
        for stage in ("sft", "dpo")
        for method in methods
        for length in ("8k", "32k", "128k")
    }
    expected |= {f"ernie-4.5-300b-a47b/sft-fp8-{length}" for length in ("8k", "32k")}
    expected |= {f"speech/{name}" for name in ("omnivoice-emilia", "omnivoice-emilia-64", "vall-e-64")}
    assert {_name(path) for path in COMMANDS} == expected


@pytest.mark.parametrize(
    "path",
    [path if path.stem == "sft-8k" else pytest.param(path, marks=pytest.mark.slow) for path in COMMANDS],
    ids=_name,
)
def test_its_command_validates_it_and_its_ranks_fit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, ranks = COMMANDS[path]
    assert main(words) == 0, capsys.readouterr().err
    assert f"{path}: valid" in capsys.readouterr().out
    config = Config.load(path)
    model = known_model_config(config)
    assert not isinstance(model, str), model
    for count in (ranks, 2 * ranks):  # twice as many ranks read twice as much data
        plan = plan_layout(config, model, count)
        assert plan.topology.dp_world_size == config.distributed.sharding_parallel_degree * count // ranks
        assert max(memory["total"] for memory in plan.memory) < BYTES_OF_A_GPU
    if ranks > 1:
        with pytest.raises(ConfigurationError, match="cannot be divided by the layout"):
            plan_layout(config, model, ranks - 1)
