"""Generate the reference pages in docs/parameters/ from the declarations of parameters."""

from __future__ import annotations

import json
from typing import Any

from erniekit.config.json_schema import GENERATED_BY, SCHEMA_ID, editor_schema
from erniekit.config.parameter import CPU_ONLY, GPU_ONLY, NOT_IMPLEMENTED, Alias, Parameter, Section
from erniekit.config.registry import ALIASES, PARAMETERS, SECTIONS, section_of
from erniekit.config.values import format_value

GENERATED = f"<!-- {GENERATED_BY} Edit the declarations, not this file. -->"
GUIDES = {  # section -> the page with measured figures and advice
    "training": "data.md",
    "distributed": "parallelism.md",
    "memory": "memory.md",
    "checkpoint": "checkpoints.md",
    "acceleration": "memory.md",
    "sft": "data.md",
    "lora": "memory.md",
    "dpo": "preference-training.md",
    "rewards": "feedback-training.md",
    "grpo": "feedback-training.md",
    "kto": "feedback-training.md",
    "reward_model": "feedback-training.md",
    "fp8": "quantization.md",
    "moe": "parallelism.md",
    "vocabulary": "data.md",
    "speech": "speech.md",
    "distillation": "distillation.md",
    "speaking": "speaking.md",
    "serving": "serving.md",
}

HOW_VALUES_ARE_WRITTEN = """\
A configuration is a flat YAML or JSON file of `name: value` lines. Overrides on the command line (`name=value`) take
precedence over the file, and the file over the defaults. All problems are reported at once, each with its line.

- Numbers may be written as `1e-5`, `32768` or `2 ** 15`, booleans as `true` and `false` or 1 and 0.
- Names of other suites are translated or answered with the name here, see [migrating](../migrating.md).
- Lists of words are YAML lists or one string with spaces; data files, their formats and weights are YAML lists or one
  string with commas.
- Choices may be written in upper or lower case.
- `erniekit validate FILE` shows the resolved configuration, and `erniekit params NAME` explains one parameter.
- Editors with the YAML language server complete names and check values in a file whose first line is
  `# yaml-language-server: $schema=PATH/docs/parameters/erniekit.schema.json`.

No value is ignored silently: a value that has no effect on this machine, in this stage or together with the other
values is reported when a run starts, and by `erniekit validate`.

"Takes effect" lists the devices on which a parameter has an effect. A CPU accepts GPU-only parameters as well, so that
the same file works on both; `erniekit validate` and a run on a CPU then report them as without effect.
"""


def pages() -> dict[str, str]:
    """Return the files of docs/parameters/: file name -> content."""
    content = {"index.md": _index()}
    content |= {f"{section.key}.md": _section_page(section) for section in SECTIONS}
    content[SCHEMA_ID] = json.dumps(editor_schema(), indent=2, ensure_ascii=False) + "\n"
    return content


def attribute_rows(parameter: Parameter) -> list[tuple[str, str]]:
    """Return the attributes of a parameter except its meaning as (label, text), in the order of the documentation."""
    rows = [
        ("type", parameter.kind.title + (" or null" if parameter.nullable else "")),
        ("default", _default(parameter)),
        ("choices", ", ".join(f"`{choice}`" for choice in parameter.choices)),
        ("also written", _spellings(parameter)),
        ("bounds", _bounds(parameter)),
        ("unit", parameter.unit),
        ("used by", f"{', '.join(parameter.verbs)}; stages {', '.join(parameter.stages)}"),
        ("needs", " or ".join(str(need) for need in parameter.needs)),
        ("excludes", ", ".join(f"`{other}`" for other in parameter.excludes)),
        ("aliases", ", ".join(f"`{alias.name}`" for alias in aliases_of(parameter.name))),
        ("sets", ", ".join(f"`{other}`" for other in parameter.stands_for)),
        ("takes effect", _takes_effect(parameter)),
    ]
    return [(label, text) for label, text in rows if text]


def aliases_of(name: str) -> list[Alias]:
    """Return the aliases that set a parameter, alone or among others."""
    return [
        alias
        for alias in ALIASES.values()
        if alias.target == name or any(name in values for values in alias.expands.values())
    ]


def example_line(parameter: Parameter) -> str:
    """Return a line of YAML that sets the parameter to its example."""
    return f"{parameter.name}: {format_value(example_of(parameter))}"


def example_of(parameter: Parameter) -> Any:
    """Return a value other than the default, which would show nothing: the declared one, or the first that differs."""
    if parameter.example is not None:
        return parameter.example
    if isinstance(parameter.default, bool):
        return not parameter.default
    others = [choice for choice in parameter.choices if choice != parameter.default and choice not in parameter.default]
    return others[0] if others else parameter.default


def _default(parameter: Parameter) -> str:
    if parameter.required_for:
        return f"none: required for {', '.join(parameter.required_for)}"
    if parameter.derived:
        return parameter.derived.text
    return "empty" if parameter.default in ("", ()) else f"`{format_value(parameter.default)}`"


def _spellings(parameter: Parameter) -> str:
    written = (f"`{word}` for {format_value(meant)}" for word, meant in parameter.spellings.items() if word)
    return ", ".join(written)


def _bounds(parameter: Parameter) -> str:
    lower = f"at least {format_value(parameter.minimum)}" if parameter.minimum is not None else ""
    lower = f"above {format_value(parameter.above)}" if parameter.above is not None else lower
    upper = f"at most {format_value(parameter.maximum)}" if parameter.maximum is not None else ""
    upper = f"below {format_value(parameter.below)}" if parameter.below is not None else upper
    return ", ".join(bound for bound in (lower, upper) if bound)


def _takes_effect(parameter: Parameter) -> str:
    reported = {
        GPU_ONLY: "; reported as without effect on a CPU",
        CPU_ONLY: "; reported as without effect on a GPU",
        NOT_IMPLEMENTED: ": its verb is not implemented yet",
    }
    return parameter.takes_effect + reported.get(parameter.devices, "")


def _index() -> str:
    lines = [GENERATED, "", "# Parameters", "", HOW_VALUES_ARE_WRITTEN]
    lines += ["| section | summary |", "|---|---|"]
    lines += [f"| [{section.title}]({section.key}.md) | {section.summary} |" for section in SECTIONS]
    lines += ["", "## All names", "", "| name | section | type | default | takes effect |", "|---|---|---|---|---|"]
    for name in sorted({*PARAMETERS, *ALIASES}):
        section = section_of(name)
        link = f"[`{name}`]({section.key}.md#{name}) | {section.title}"
        if name in ALIASES:
            lines.append(f"| {link} | alias | {alias_target(ALIASES[name])} | |")
        else:
            parameter = PARAMETERS[name]
            lines.append(f"| {link} | {parameter.kind.title} | {_default(parameter)} | {parameter.takes_effect} |")
    return "\n".join(lines) + "\n"


def _section_page(section: Section) -> str:
    guide = GUIDES.get(section.key)
    links = ["[All sections](index.md)"] + [f"figures, and how to choose: [{guide}](../{guide})"] * bool(guide)
    lines = [GENERATED, "", f"# {section.title}", "", section.summary, "", ". ".join(links), ""]
    for parameter in section.parameters:
        lines += [f"## {parameter.name}", "", parameter.meaning, "", "| | |", "|---|---|"]
        lines += [f"| {label} | {_cell(text)} |" for label, text in attribute_rows(parameter)]
        lines += ["", "```yaml", example_line(parameter), "```", ""]
    for alias in section.aliases:
        lines += [f"## {alias.name}", "", f"An alias. {alias.meaning}", "", f"It expands to {alias_target(alias)}.", ""]
    if section.rules:
        lines += ["## Rules", ""]
        lines += [f"- {rule.text}" for rule in section.rules]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def alias_target(alias: Alias) -> str:
    """Return the parameters that an alias expands to, as text."""
    if alias.target:
        return f"`{alias.target}`"
    written = {choice.casefold(): choice for choice in alias.choices}
    return "; ".join(
        f"`{written[word]}`: {', '.join(f'{name} {format_value(value)}' for name, value in values.items())}"
        for word, values in alias.expands.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
