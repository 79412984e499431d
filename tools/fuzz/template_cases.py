"""Chat templates: programs of strangers; they end within their limits, whatever they ask for. Given to `preview`."""

from __future__ import annotations

from pathlib import Path
from random import Random

from case import Case
from values import TEXTS, as_json, damaged

TINY = Path("examples/models/tiny-ernie")  # commands run in the project's folder
PIECES = [
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "{% if add_generation_prompt %}Assistant: {% endif %}", "{{ bos_token }}", "{{ tools | tojson }}", "{{ undefined.x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}", "{{ (10 + messages | length) ** (10 ** 8) }}",
    "{{ lipsum(n=10 ** 9) }}", "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ '%1000000000s' % 'x' }}", "{{ 'a' * 10 ** 10 }}", "{{ [0] * 10 ** 10 }}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25, "{% break %}", "{{ '\\ud800' }}",
    "{{ raise_exception('\x1b[31mno') }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% include '/etc/passwd' %}",
    "{{ messages | map('attr', '__class__') | list }}", "{{ strftime_now('%Y') }}", "{{ 'x' | center(10 ** 9) }}", "{{ 'a,b' * 1000 | length }}",
    "{{ messages | tojson(indent=10 ** 6) }}", "{{ 'x' | indent(10 ** 9) }}", "{{ 'a'.join(['b'] * 10 ** 9) }}", "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'aaaa' | replace('', 'b' * 10 ** 5) | replace('', 'b' * 10 ** 5) }}", "{{ range(10 ** 9) | list | length }}", "{{ 1 / 0 }}", "{{ 10 ** 10 ** 10 }}",
    "{{ 'x'.format(messages) }}", "{{ '{0.__class__}'.format(messages) }}", "{% set x %}{{ x }}{% endset %}", "{# comment", "{{", "{% if %}",
]  # fmt: skip
RECORD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2}


def draw(random: Random) -> Case:
    """Draw a template of some pieces, in the file of its own or in tokenizer_config.json."""
    template = "".join(random.choice([*PIECES, random.choice(TEXTS)]) for _ in range(random.choice([1, 1, 2, 3])))
    content = template.encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        content = damaged(content, random)
    files = {"model/chat_template.jinja": content, "data.jsonl": as_json(RECORD), "run.yaml": b"seed: 1\n"}
    links = {f"model/{path.name}": str(path) for path in sorted(TINY.iterdir()) if path.name != "chat_template.jinja"}
    values = {
        "model_name_or_path": "{folder}/model",
        "output_dir": "{folder}/out",
        "data_cache_dir": "{folder}/cache",
        "train_dataset_path": "{folder}/data.jsonl",
        "train_dataset_type": "messages",
        "max_seq_len": 256,
        "continue_training": "false",
    }
    words = [f"{name}={value}" for name, value in values.items()]
    return Case(files, [["preview", "{folder}/run.yaml", *words]], links=links)
