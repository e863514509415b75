"""Chat templates of eight model families as data, each with a small tokenizer made on the spot.

They keep what tells the families apart where a conversation goes on: the tokens that end a turn and what follows them,
how calls and results of tools are written, what is refused, and what a template rewrites when more follows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.models.tokenizer import HFTokenizer

_HERMES_TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}"""

_HERMES_CALLS = """
{%- for call in message.tool_calls or [] %}
{{- '\\n' if loop.index > 1 or message.content }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}"""

_HERMES_RESULT = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}"""

QWEN25 = (
    _HERMES_TOOLS
    + "{%- for message in messages %}{%- if message.role == 'tool' %}"
    + _HERMES_RESULT
    + """{%- elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}"""
    + _HERMES_CALLS
    + """<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

QWEN3 = (
    _HERMES_TOOLS
    + """{%- set last = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{%- if message.role == 'tool' %}"""
    + _HERMES_RESULT
    + """{%- elif message.role == 'assistant' %}
{%- set words = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
    if '</think>' in message.content else '' %}<|im_start|>assistant
{% if loop.index0 > last.query and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ words }}"""
    + _HERMES_CALLS
    + """<|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)

LLAMA3 = """{{ bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if loop.index0 == 0 and tools %}Functions: {{ tools | tojson }}
{% endif %}{{ message.content | trim }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- set turn = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turn.index % 2 == 0) %}
{{- raise_exception('user and assistant alternate') }}{% endif %}
{%- set turn.index = turn.index + 1 %}{% endif %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "
{{- message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('a system message may only come first') }}{% endif %}{% endfor %}"""

GEMMA = """{{ bos_token }}{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

PHI3 = """{%- for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

DEEPSEEK = """{{ bos_token }}
{%- set seen = namespace(tool=false, first=true) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}
{%- if seen.tool %}<|tool_outputs_end|>{% endif %}
{%- set seen.tool = false %}<|User|>{{ message.content }}
{%- elif message.tool_calls %}
{%- set seen.tool = false %}{% set seen.first = true %}<|Assistant|><|tool_calls_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>
{{- call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```' }}<|tool_call_end|>
{%- endfor %}<|tool_calls_end|><|end_of_sentence|>
{%- elif message.role == 'assistant' %}{% if seen.tool %}<|tool_outputs_end|>{% else %}<|Assistant|>{% endif %}
{%- set seen.tool = false %}{{ message.content.split('</think>')[-1] }}<|end_of_sentence|>
{%- elif message.role == 'tool' %}{% set seen.tool = true %}
{%- if seen.first %}<|tool_outputs_begin|>{% set seen.first = false %}{% endif %}
<|tool_output_begin|>{{ message.content }}<|tool_output_end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{% if seen.tool %}<|tool_outputs_end|>{% else %}<|Assistant|>{% endif %}{% endif %}"""

GLM4 = """[gMASK]<sop>
{%- if tools %}<|system|>
{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|observation|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- else %}<|{{ message.role }}|>
{{ message.content }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    """Ends of a turn; the first is the tokenizer's end-of-text."""
    begin: str | None = None


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family(QWEN3, _CHATML, ("<|im_end|>", "<|endoftext|>")),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
        "<|begin_of_text|>",
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
        ("</s>",),
        "<s>",
    ),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>"), "<bos>"),
    "phi3": Family(
        PHI3, ("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"), ("<|end|>",)
    ),
    "deepseek": Family(
        DEEPSEEK,
        (
            *("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>", "<|tool_calls_begin|>"),
            *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_end|>", "<|tool_outputs_begin|>"),
            *("<|tool_output_begin|>", "<|tool_output_end|>", "<|tool_outputs_end|>"),
        ),
        ("<|end_of_sentence|>",),
        "<|begin_of_sentence|>",
    ),
    "glm4": Family(
        GLM4,
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
}

_TEXT = [
    "The answer is 4. A question, another question. The result of the tool is a number or a text.",
    '{"name": "calculator", "arguments": {"expression": "12 + 345"}}\n</tool_call>\n<tool_response>\n',
    "\n\n\nassistant user system tool  the   end\n\n  of    it.\n\nReasoning: first this, then that.",
]


@functools.cache
def tokenizer_of(family: str) -> HFTokenizer:
    """Bytes with some hundred merges: the same text has other ids when it is joined to another."""
    data = FAMILIES[family]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=480,
        min_frequency=1,
        special_tokens=list(data.special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_TEXT * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=data.begin,
        eos_token=data.stops[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = data.template
    return HFTokenizer(fast, frozenset(fast.convert_tokens_to_ids(list(data.stops))), Path())
