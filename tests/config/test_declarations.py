"""What must hold for every declaration, so that a new parameter cannot be half declared."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from erniekit import cli
from erniekit.config import Config
from erniekit.config.json_schema import exact_schema, structural_problems, value_schema
from erniekit.config.parameter import CPU_AND_GPU, CPU_ONLY, GPU_ONLY, NOT_IMPLEMENTED, Alias, Parameter, Rule, Section
from erniekit.config.reference_docs import example_line
from erniekit.config.registry import ALIASES, PARAMETERS, RULES, SECTIONS
from erniekit.config.stages import STAGES
from tests.config.samples import another_value, fulfil, load

VERBS = {"train", "eval", "preview", "chat", "generate", "export", "split", "server", "codes", "speak"}
DEFAULTS = {name: parameter.default for name, parameter in PARAMETERS.items()}


def parameters_where(condition: Callable[[Parameter], bool]) -> pytest.MarkDecorator:
    """Run a test for every parameter of which the condition holds."""
    chosen = [parameter for parameter in PARAMETERS.values() if condition(parameter)]
    return pytest.mark.parametrize("parameter", chosen, ids=lambda parameter: parameter.name)


def has_no_effect_by_default(parameter: Parameter) -> bool:
    brings_its_need = parameter.name in ("num_samples_each_epoch", "sharding")  # test_config.py
    return bool(parameter.needs) and not any(need.holds(DEFAULTS) for need in parameter.needs) and not brings_its_need


every_parameter = parameters_where(lambda parameter: True)


def test_names_are_unique() -> None:
    names = Counter(name for section in SECTIONS for name in section.names)
    assert [name for name, count in names.items() if count > 1] == []


@every_parameter
def test_parameter_is_fully_declared(parameter: Parameter) -> None:
    assert len(parameter.meaning) > 25
    assert parameter.meaning.endswith(".")
    assert parameter.verbs and set(parameter.verbs) <= VERBS
    assert parameter.stages and set(parameter.stages) <= set(STAGES)
    assert set(parameter.required_for) <= set(parameter.verbs)
    assert {need.name for need in parameter.needs} <= set(PARAMETERS)
    assert set(parameter.excludes) <= set(PARAMETERS)


@every_parameter
def test_default_and_example_fit_the_schema(parameter: Parameter, tmp_path: Path) -> None:
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    jsonschema.validate(default, value_schema(parameter))
    assert parameter.read(default) == default
    file = tmp_path / "example.yaml"
    file.write_text(example_line(parameter), encoding="utf-8")
    assert _load_alone(file, parameter).is_set(parameter.name)


def _load_alone(file: Path, parameter: Parameter) -> Config:
    """Load an example of one parameter with what its rules ask for beside it."""
    beside = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "a,b", "eval_dataset_path": "c,d"}
    beside |= {"decay_steps": "1", "learning_rate": "0.1", "train_dataset_prob": "1,1", "do_eval": "true"}
    beside |= {"save_strategy": "epoch"}
    if parameter.name in ("train_dataset_path", "eval_dataset_path"):
        beside[parameter.name.replace("path", "prob")] = "1"
    beside = {name: value for name, value in beside.items() if name not in parameter.excludes}
    words = [f"{name}={value}" for name, value in beside.items() if name != parameter.name]
    if parameter.name == "init_from_checkpoint":
        words.append("continue_training=true")
    if parameter.name == "codes_part":  # several machines share a codec that is there
        words.append("codec=models/codec")
    return Config.load(file, words, verb=parameter.verbs[0])


def test_configuration_has_every_section_and_its_type() -> None:
    types = {item.name: item.type for item in dataclasses.fields(Config)}
    for section in SECTIONS:
        assert types[section.key] == section.dataclass.__name__


def test_schema_is_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(exact_schema())


@parameters_where(lambda parameter: parameter.devices == GPU_ONLY)
def test_gpu_parameter_is_accepted_for_a_gpu_and_reported_on_a_cpu(parameter: Parameter) -> None:
    values = {parameter.name: another_value(parameter)}
    values |= {need.name: fulfil(need) for need in parameter.needs[:1]}
    assert load(**values, device="gpu:0").ignored_on_cpu() == []
    config = load(**values)
    assert any(line.startswith(f"`{parameter.name}:") for line in config.ignored_on_cpu())


@every_parameter
def test_devices_are_said_where_verbs_exist(parameter: Parameter) -> None:
    assert parameter.devices in (CPU_AND_GPU, CPU_ONLY, GPU_ONLY, NOT_IMPLEMENTED)
    assert (parameter.devices == NOT_IMPLEMENTED) == (not set(parameter.verbs) & set(cli.VERBS))


@parameters_where(lambda parameter: bool(parameter.stands_for))
def test_a_parameter_sets_those_that_it_stands_for(parameter: Parameter) -> None:
    beside = {need.name: fulfil(need) for need in parameter.needs}
    without, beside_it = load(**beside), load(**beside, **{parameter.name: another_value(parameter)})
    assert all(without[name] != beside_it[name] for name in parameter.stands_for)


@parameters_where(has_no_effect_by_default)
def test_unmet_need_is_reported(parameter: Parameter) -> None:
    messages = load(**{parameter.name: another_value(parameter)}).messages
    assert any(f"`{parameter.name}`" in line and "has no effect" in line for line in messages)


@parameters_where(lambda parameter: "SFT" not in parameter.stages or "train" not in parameter.verbs)
def test_parameter_of_other_stages_or_verbs_is_reported(parameter: Parameter) -> None:
    values = {parameter.name: another_value(parameter)}
    line = next(line for line in load(**values).messages if f"`{parameter.name}`" in line)
    assert "no effect with" in line


@pytest.mark.parametrize("alias", ALIASES.values(), ids=lambda alias: alias.name)
def test_alias_stands_for_declared_parameters(alias: Alias) -> None:
    assert alias.meaning.endswith(".")
    targets = {alias.target} if alias.target else {name for values in alias.expands.values() for name in values}
    assert targets <= set(PARAMETERS)
    for values in alias.expands.values():
        assert list(structural_problems(values)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_rule_is_documented_and_names_parameters(rule: Rule) -> None:
    assert rule.text.endswith(".")
    assert set(rule.names) <= set(PARAMETERS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.key)
def test_section_is_described(section: Section) -> None:
    assert section.summary.endswith(".")
    assert section.title[0].isdigit()
