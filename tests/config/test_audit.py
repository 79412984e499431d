"""The audit finds what reads a parameter and what proves it, and nothing else: no comment, namesake or draft."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from erniekit.config.registry import PARAMETERS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parameter_audit", ROOT / "tools" / "parameter_audit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _schema(audit: ModuleType) -> list[Any]:
    return [module for module in audit.modules_below(ROOT) if module.name.startswith(audit.SCHEMA)]


def found(audit: ModuleType, source: str) -> set[str]:
    """The parameters that a module of this text reads, beside the schema as it is."""
    modules = [*_schema(audit)]
    modules.append(audit.Module("erniekit.some", "erniekit/some.py", ast.parse(source)))
    return {name for name, locations in audit.find_reads(modules).items() if locations}


IMPORTS = "from erniekit.config import Config\nfrom erniekit.config.sections.lora import LoraParameters\n"
READS = {
    "a section": "def f(config: Config): return config.training.seed",
    "a name for a section": "def f(config: Config):\n section = config.training\n return section.seed",
    "names for several": "def f(config: Config):\n a, b = config.training, config.basic\n return a.seed",
    "a section that is given": "def f(section: LoraParameters): return section.lora_rank",
    "a name": "def f(config: Config): return config['seed']",
    "a method": "def f(config: Config):\n value = config.__getitem__\n return value('seed')",
    "a field": "class Job:\n config: Config\ndef f(job: Job): return job.config.training.seed",
    "its own field": "class Job:\n config: Config\n def f(self): return self.config.training.seed",
    "what a function returns": "def g() -> Config: ...\ndef f(): return g().training.seed",
    "what a method returns": "def f(path):\n config = Config.load(path)\n return config.training.seed",
    "perhaps none": "def f(config: Config | None): return config and config.training.seed",
    "within a function": "def f(config: Config):\n def g(): return config.training.seed\n return g",
    "fields of a class": "from dataclasses import fields\nclass S:\n seed: int\n"
    "def f(config: Config):\n names = [item.name for item in fields(S)]\n"
    " return {name: config[name] for name in names}",
}
READS_NOTHING = {
    "a comment": "# config.training.seed",
    "a text": "def f(config: Config): return 'config.training.seed'",
    "another type": "def f(config: ModelConfig): return config.training.seed",
    "no type": "def f(config): return config.training.seed",
    "a section alone": "def f(config: Config): return config.training",
    "a class": "LoraParameters.lora_rank",
    "what is set": "def f(seed): return dict(seed=seed)",
    "another name": "def f(config: Config, name): return config[name]",
    "whether it is set": "def f(config: Config): return config.is_set('seed')",
    "a name taken again": "def f(config: Config):\n section = config.training\n section = None\n return section.seed",
}


@pytest.mark.parametrize("source", READS.values(), ids=READS)
def test_what_is_a_reader(audit: ModuleType, source: str) -> None:
    assert found(audit, IMPORTS + source) == {"lora_rank" if "LoraParameters" in source else "seed"}


@pytest.mark.parametrize("source", READS_NOTHING.values(), ids=READS_NOTHING)
def test_what_is_none(audit: ModuleType, source: str) -> None:
    assert found(audit, IMPORTS + source) == set()


def test_functions_of_the_schema_stand_for_what_they_read(audit: ModuleType) -> None:
    source = "def f(config: Config): return config.uses_dense_mask"
    masks = {"use_flash_attention", "use_sparse_flash_attn", "use_attn_mask_startend_row_indices"}
    assert found(audit, IMPORTS + source) == masks
    source = (
        "from erniekit.config.sections.dpo import reference_mode\n"
        "def f(config: Config): reference_mode(config.dpo, lora=0)"
    )
    assert "ref_model_update_steps" in found(audit, IMPORTS + source)
    assert found(audit, IMPORTS) == set()  # and nothing that the schema reads by itself


PROOFS = """
import pytest
TABLE: dict = {"learning_rate": 1, "min_lr": 2}

@pytest.mark.proves("seed", "device")
def test_one(): ...

@pytest.mark.proves(*TABLE)
@pytest.mark.parametrize("name", TABLE)
def test_table(): ...

@pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.proves("beta"))])
def test_cases(case): ...

@pytest.mark.proves("power")
def not_a_test(): ...

# @pytest.mark.proves("num_cycles")
def test_nothing(): "pytest.mark.proves('lr_end')"
"""


def test_what_is_a_proof(audit: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(PROOFS)
    (tmp_path / "tests" / "some.py").write_text(PROOFS.replace("seed", "optim"))
    locations = audit.proofs(tmp_path)
    assert set(locations) == {"seed", "device", "learning_rate", "min_lr", "beta"}
    assert locations["seed"] == ["tests/test_some.py:6"]


def test_what_is_missing_is_named(audit: ModuleType) -> None:
    locations = {name: ["somewhere"] for name in PARAMETERS}
    assert audit.problems(locations, locations) == []
    without = {name: here for name, here in locations.items() if name != "seed"}
    assert audit.problems(without, locations) == ["seed: nothing in erniekit reads it"]
    assert audit.problems(locations, without) == ['seed: no test is marked @pytest.mark.proves("seed")']
    (unknown,) = audit.problems(locations, {**locations, "sead": ["tests/test_some.py:6"]})
    assert unknown.startswith("sead: tests/test_some.py:6 proves it")
    of_others = {name: here for name, here in locations.items() if name != "rslora_plus"}
    assert audit.problems(of_others, locations) == []  # a preset
    assert audit.problems({**of_others, "rslora": []}, locations) == [
        "rslora: nothing in erniekit reads it", "rslora_plus: nothing in erniekit reads it",
    ]  # fmt: skip


def test_every_parameter_has_a_reader_and_a_proof(audit: ModuleType) -> None:
    read, proved = audit.find_reads(audit.modules_below(ROOT)), audit.proofs(ROOT)
    assert audit.problems(read, proved) == []
    for locations in (*read.values(), *proved.values()):
        for location in locations:
            path, _, line = location.rpartition(":")
            assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) >= int(line)


def test_a_preset_is_read_where_what_it_sets_is_read(audit: ModuleType) -> None:
    shown = audit.table({"rslora": ["erniekit/some.py:1"]}, {}).splitlines()
    below = shown[shown.index(next(line for line in shown if line.startswith("  rslora_plus "))) + 1]
    assert below == "    read   as rslora: erniekit/some.py:1"
