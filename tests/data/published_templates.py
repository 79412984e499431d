"""The dialogue formats of the model families that we support, written down from their public documentation as small
templates of our own, and dialogues that reach every part of them. tests/parity compares them with transformers."""

from __future__ import annotations

from typing import Any

from erniekit.data.templates.ernie import TEMPLATE_FOR_OTHERS
from tests.data.conftest import CONTROL_TOKENS

# --- Qwen2.5: ChatML with a system text of its own; calls and results are marked with tokens that are not special.
_QWEN_TOOLS = (
    "{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\nCalls:\\n<tool_call>\\n{name, arguments}\\n</tool_call><|im_end|>\\n' }}"
)
_QWEN_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
QWEN25 = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- else %}{%- set system = 'You are a model.' %}{%- endif %}"
    "{{- '<|im_start|>system\\n' + system }}"
    "{%- if tools %}{{- '\\n\\n' }}" + _QWEN_TOOLS + "{%- else %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>' + message.role }}"
    "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{%- set call = call.function or call %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson }}'
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# --- Qwen2-Audio: ChatML; a content with recordings is a list of parts, and the recordings are numbered.
QWEN2_AUDIO = (
    "{% set ns = namespace(count=0) %}{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if 'audio' in part or 'audio_url' in part or part.type == 'audio' %}{% set ns.count = ns.count + 1 %}"
    "Audio {{ ns.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_AUDIO_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
)  # fmt: skip
# --- Qwen3: thoughts only in answers after the last question of a user; the last answer has at least an empty thought.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    + _QWEN_TOOLS
    + "{%- else %}"
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endif %}"
    "{%- set ns = namespace(looking=true, last_query=messages | length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.looking and message.role == 'user' and not (message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}"
    "{%- set ns.looking = false %}{%- set ns.last_query = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set content = message.content if message.content is string else '' %}{%- set thoughts = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}"
    "{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}"
    "{%- set call = call.function or call %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}" + _QWEN_RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# --- Llama 3.1: headers, a date, tools in the first question, one call in a turn, results as JSON.
_LLAMA_HEADER = "{{- '<|start_header_id|>' + %s + '<|end_header_id|>\\n\\n' }}"
LLAMA3 = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}"
    + _LLAMA_HEADER
    % "'system'"
    + "{{- 'Today Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{%- set first = rest[0].content | trim %}{%- set rest = rest[1:] %}"
    + _LLAMA_HEADER
    % "'user'"
    + "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}"
    "{%- endif %}"
    "{%- for message in rest %}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once, please') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    + _LLAMA_HEADER
    % "'assistant'"
    + "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}"
    + _LLAMA_HEADER
    % "'ipython'"
    + "{{- message.content | tojson if message.content is iterable else message.content }}{{- '<|eot_id|>' }}"
    "{%- else %}"
    + _LLAMA_HEADER
    % "message.role"
    + "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}" + _LLAMA_HEADER % "'assistant'" + "{%- endif %}"
)
# --- Mistral v0.3: tools and system text stand before the LAST question, so a longer dialogue moves them.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}{%- for message in rest %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools is not none and message == questions[-1] %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}"
    "{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}"
    "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}{{- call.function | tojson }}"
    "{{- ', ' if not loop.last else '' }}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS] {\"content\": ' + message.content | string + '}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)
# --- ERNIE-4.5: plain words for roles. The template of the Thinking model always ends with a generation prompt that
# begins a thought, and shows thoughts only after the last question.
ERNIE = (
    "{{- cls_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- 'User: ' + message.content + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- 'Assistant: ' + message.content + sep_token }}"
    "{%- elif message.role == 'system' %}{{- message.content + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}"
)
ERNIE_THINKING = (
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}"
    "{{- '<system_setting>\\n' + messages[0].content + '\\n</system_setting>\\n\\n' }}{%- endif %}"
    "{%- if tools %}{{- '<tool_list>\\n' }}{{- tools | tojson }}{{- '\\n</tool_list>\\n\\n' }}{%- endif %}"
    "{{- '<global_setting>\\nthink_mode=True\\n</global_setting><|im_end|>\\n\\n' }}"
    "{%- set ns = namespace(last_query=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if message.reasoning_content and loop.index0 > ns.last_query %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- if message.content %}{{- '<response>\\n' + message.content + '\\n</response>\\n' }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>tool\\n<tool_output>\\n' + message.content + '\\n</tool_output>\\n<|im_end|>\\n\\n' }}"
    "{%- endif %}{%- endfor %}{{- '<|im_start|>assistant\\n<think>\\n' }}"
)
# --- Gemma 3: the model's role is called `model`, and the system text stands in the first question.
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{%- set prefix = messages[0].content + '\\n\\n' %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set prefix = '' %}{%- set rest = messages %}{%- endif %}"
    "{%- for message in rest %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"
)
# --- Granite 3: roles between tokens, its own system text, `<|tool_call|>` before a list of calls.
GRANITE = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = 'You are a model.' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}"
    "{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}"
    "{{- '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- for message in rest %}"
    "{%- if message.tool_calls %}{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}"
    "{{- message.tool_calls | map(attribute='function') | list | tojson }}{{- '<|end_of_text|>\\n' }}"
    "{%- else %}{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
# --- SmolLM3: the mode of thinking is a word of the system text; without it answers begin with an empty thought.
SMOLLM3 = (
    "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}"
    "{%- set mode = '/think' if enable_thinking else '/no_think' %}"
    "{{- '<|im_start|>system\\nReasoning Mode: ' + mode + '\\n\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
    "{%- if tools %}{{- '\\n<tools>\\n' }}{%- for tool in tools %}{{- tool | string + '\\n' }}{%- endfor %}"
    "{{- '</tools>' }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{% generation %}{{- '<|im_start|>assistant\\n' }}"
    "{{- ('' if mode == '/think' else '<think>\\n\\n</think>\\n') + content.lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% endgeneration %}"
    "{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if mode == '/no_think' %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}"
)

# --- GLM-4: answers have no token at their end; the header of the next message ends them.
GLM4 = (
    "{{- '[gMASK]<sop>' }}"
    "{%- if tools %}{{- '<|system|>\\n' }}{%- for tool in tools %}{{- '## ' + tool.function.name + '\\n' }}"
    "{{- tool.function | tojson(indent=4) + '\\n' }}{%- endfor %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- '<|assistant|>' + call.function.name + '\\n' }}{{- call.function.arguments | tojson }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}"
    "{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

_IM = ("<|im_start|>", "<|im_end|>")
_QWEN_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# family -> (template, its special tokens, its other added tokens, what tokenizer_config.json names besides)
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], dict[str, str]]] = {
    "qwen2.5": (QWEN25, _IM, _QWEN_WORDS[:4], {"eos_token": "<|im_end|>"}),
    "qwen3": (QWEN3, _IM, _QWEN_WORDS, {"eos_token": "<|im_end|>"}),
    "llama3": (
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), (), {"eos_token": "<|eot_id|>"},
    ),
    "mistral": (
        MISTRAL,
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"), (), {},
    ),
    "ernie-written": (TEMPLATE_FOR_OTHERS.read_text(), (), (), {}),  # what training writes where there is no template
    "ernie": (ERNIE, (), (), {"cls_token": CONTROL_TOKENS[3], "sep_token": CONTROL_TOKENS[4]}),
    "ernie-thinking": (ERNIE_THINKING, _IM, (*_QWEN_WORDS, "<response>", "</response>"), {"eos_token": "</s>"}),
    "glm4": (
        GLM4, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"), (),
        {"eos_token": "<|endoftext|>"},
    ),
    "gemma3": (GEMMA3, ("<start_of_turn>", "<end_of_turn>"), (), {}),
    "granite": (
        GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"), (),
        {"eos_token": "<|end_of_text|>"},
    ),
    "smollm3": (SMOLLM3, _IM, _QWEN_WORDS, {"eos_token": "<|im_end|>"}),
}  # fmt: skip

TOOLS = [{"type": "function", "function": {"name": "add", "description": "the sum", "parameters": {"type": "object"}}}]


def _call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


DIALOGUES: dict[str, dict[str, Any]] = {
    "two answers": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Count apples"}, {"role": "assistant", "content": "six apples"},
            {"role": "user", "content": "And days? 今天"},
            {"role": "assistant", "content": "two <b>days</b>\nor three"},
        ],
    },
    "no system, one answer only read": {
        "messages": [
            {"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0},
            {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
        ],
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "six", "reasoning_content": "three and three"},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "two", "reasoning_content": "one and one\n\nare"},
        ],
    },
    "thoughts in the text": {
        "messages": [
            {"role": "user", "content": "q1"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nsix"},
            {"role": "user", "content": "q2"}, {"role": "assistant", "content": "<think>\nhow\n</think>\n\ntwo"},
        ],
    },
    "tools": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [_call(a=1, b="ä")]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "thanks"},
            {"role": "assistant", "content": "welcome"},
        ],
    },
    "tools and thoughts": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "So:", "reasoning_content": "I add", "tool_calls": [_call(a=1), _call()]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "three", "reasoning_content": "done"},
        ],
    },
}  # fmt: skip
# What a family has no place for; transformers would leave it out without a word, or its template refuses it.
REFUSED = {
    *((family, case) for family in FAMILIES.keys() - {"qwen3", "ernie-thinking"}
      for case in ("thoughts", "tools and thoughts")),
    *((family, "tools") for family in ("ernie", "ernie-written", "gemma3", "smollm3")),
    # the generation prompt of the Thinking model begins a thought, so an answer without one cannot follow it
    *(("ernie-thinking", case) for case in (*list(DIALOGUES)[:2], "thoughts in the text", "tools")),
}  # fmt: skip
