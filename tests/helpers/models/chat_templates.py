"""Chat templates of the kinds that released models have, each with a chat as rows have it and as a target writes it.

The templates are short ones of our own: they do what the released ones do with history, thoughts, tools and dates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.data.rows.tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast

_QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- set content = m.content -%}{%- set thought = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- content.lstrip('\n') -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""
_R1 = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- else -%}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<|endoftext|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\n' -}}{%- endif -%}"""
_V31 = """
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- else -%}{{- '<｜Assistant｜></think>' + m.content.split('</think>')[-1] + '<|endoftext|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') -}}
{%- endif -%}"""
_EMPTIED = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') -}}
{{- m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""
_GLM = """
{%- for m in messages -%}
{{- '<|' + m.role + '|>\n' -}}
{%- if m.role == 'assistant' -%}{{- '<think>' + (m.reasoning_content or '') + '</think>\n' -}}{%- endif -%}
{{- m.content + ('<|endoftext|>' if m.role == 'assistant' else '') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}
{%- endif -%}"""
_CHANNELS = """
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if '<|channel|>' in m.content -%}{{- raise_exception('channels belong into fields of their own') -}}{%- endif -%}
{%- if loop.last and m.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""
_LLAMA = """
{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{{- '<|begin|><|head|>system<|/head|>\n\nToday Date: ' + date_string + '\n\n' -}}
{%- if tools -%}{%- for t in tools -%}{{- t | tojson + '\n' -}}{%- endfor -%}{%- endif -%}{{- '<|eot_id|>' -}}
{%- for m in messages -%}
{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}
{{- '<|head|>assistant<|/head|>\n\n{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|head|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/head|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|head|>assistant<|/head|>\n\n' -}}{%- endif -%}"""
_MISTRAL = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<s>' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}{{- '[TOOL_CALLS]' + (m.tool_calls | map(attribute='function') | list | tojson) + '</s>' -}}
{%- else -%}{{- m.content + '</s>' -}}{%- endif -%}
{%- endfor -%}"""
_GEMMA = """
{%- if messages[0].role == 'system' -%}{%- set head = messages[0].content + '\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set head = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (head if loop.first else '') -}}
{{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""
_GEMMA4 = """
{%- for m in messages -%}
{{- '<|turn>' + m.role + '\n' -}}
{%- if m.reasoning_content and loop.last -%}{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' -}}{%- endif -%}
{{- m.content + '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>assistant\n' + ('' if thinking else '<|channel>thought\n<channel|>') -}}{%- endif -%}"""
_WRAPPED = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content -%}{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' -}}{%- endif -%}
{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' -}}
{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"town": "Ulm"}'}}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A turn."""
    return {"role": role, "content": content, **more}


@dataclass(frozen=True)
class Kind:
    """A kind of template."""

    template: str
    specials: tuple[str, ...]
    messages: list[dict[str, Any]]
    written: tuple[str, ...]
    """What the target writes as each turn of the assistant's, its end included."""
    documents: int
    """Texts that training makes of the chat."""
    what: str
    """What the template does with what was written, in words."""
    values: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    added: tuple[str, ...] = field(default=("<think>", "</think>"))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A small tokenizer with the kind's tokens and its template."""
        tokenizer = train_tokenizer(["the quick brown fox asks and a lazy dog answers\n"] * 20, 400)
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.specials)})
        tokenizer.add_tokens(list(self.added))
        tokenizer.chat_template = self.template
        return tokenizer

    def row(self) -> dict[str, Any]:
        """The chat as a row of text."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})


_THOUGHTFUL = [
    say("user", "why"),
    say("assistant", "the dog", reasoning_content="so"),
    say("user", "and"),
    say("assistant", "a fox", reasoning_content="no"),
]
_PLAIN = [say("user", "why"), say("assistant", "the dog"), say("user", "and"), say("assistant", "a fox")]
_CALLING = [
    say("user", "where"),
    say("assistant", "", tool_calls=[_CALL]),
    say("tool", "here", tool_call_id="c1"),
    say("assistant", "it is here"),
]
_TURNS = ("<|im_start|>", "<|im_end|>")

KINDS = {
    "Qwen3, thinking": Kind(
        _QWEN3,
        _TURNS,
        _THOUGHTFUL,
        ("<think>\nso\n</think>\n\nthe dog<|im_end|>", "<think>\nno\n</think>\n\na fox<|im_end|>"),
        2,
        "thoughts leave the history",
    ),
    "Qwen3, `enable_thinking: false`": Kind(
        _QWEN3,
        _TURNS,
        _PLAIN,
        ("the dog<|im_end|>", "a fox<|im_end|>"),
        2,
        "prompts close thoughts, the history has none",
        values={"enable_thinking": False},
    ),
    "DeepSeek R1 and what is distilled from it": Kind(
        _R1,
        ("<｜User｜>", "<｜Assistant｜>"),
        [
            say("user", "why"),
            say("assistant", "<think>\nso\n</think>\n\nthe dog"),
            say("user", "and"),
            say("assistant", "<think>\nno\n</think>\n\na fox"),
        ],
        ("so\n</think>\n\nthe dog<|endoftext|>", "no\n</think>\n\na fox<|endoftext|>"),
        2,
        "prompts open thoughts, which leave the history",
    ),
    "DeepSeek V3.1, `thinking: true`": Kind(
        _V31,
        ("<｜User｜>", "<｜Assistant｜>"),
        _THOUGHTFUL,
        ("so</think>the dog<|endoftext|>", "no</think>a fox<|endoftext|>"),
        2,
        "prompts open thoughts without a line feed; the history keeps their closing tag alone",
        values={"thinking": True},
    ),
    "a history of empty thoughts behind prompts that open some": Kind(
        _EMPTIED,
        _TURNS,
        _THOUGHTFUL,
        ("so\n</think>\n\nthe dog<|im_end|>", "no\n</think>\n\na fox<|im_end|>"),
        2,
        "every turn is written with an empty pair of tags",
    ),
    "GLM, `enable_thinking: false`": Kind(
        _GLM,
        ("<|user|>", "<|assistant|>"),
        _PLAIN,
        ("\nthe dog<|endoftext|>", "\na fox<|endoftext|>"),
        1,
        "prompts close thoughts; the line feed behind them is the target's own",
        values={"enable_thinking": False},
    ),
    "gpt-oss": Kind(
        _CHANNELS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        _THOUGHTFUL,
        tuple(
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
            for thought, text in (("so", "the dog"), ("no", "a fox"))
        ),
        2,
        "channels of thoughts leave the history, and the last turn ends otherwise",
    ),
    "Llama 3.1, tools and a date": Kind(
        _LLAMA,
        ("<|begin|>", "<|head|>", "<|/head|>", "<|eot_id|>"),
        _CALLING,
        ('{"name": "look", "parameters": {"town": "Ulm"}}<|eot_id|>', "it is here<|eot_id|>"),
        1,
        "nothing is rewritten; its clock shows one day for the whole run",
        tools=_TOOLS,
    ),
    "Mistral, tools": Kind(
        _MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        [*_CALLING, say("user", "and"), say("assistant", "a fox")],
        ('[TOOL_CALLS][{"name": "look", "arguments": {"town": "Ulm"}}]</s>', "it is here</s>", "a fox</s>"),
        2,
        "tools stand in front of the last user's turn alone, so they move",
        tools=_TOOLS,
        added=("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "Gemma": Kind(
        _GEMMA,
        ("<start_of_turn>", "<end_of_turn>"),
        [say("system", "be brief"), *_PLAIN],
        ("the dog<end_of_turn>", "a fox<end_of_turn>"),
        1,
        "nothing is rewritten; the system text stands in the first turn of the user",
    ),
    "Gemma 4": Kind(
        _GEMMA4,
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        _PLAIN,
        ("the dog<turn|>", "a fox<turn|>"),
        2,
        "prompts close a channel of thoughts, the history has none",
    ),
    "Command R": Kind(
        _WRAPPED,
        (*_TURNS, "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        _THOUGHTFUL,
        tuple(
            f"<|START_THINKING|>{thought}<|END_THINKING|><|START_RESPONSE|>{text}<|END_RESPONSE|><|im_end|>"
            for thought, text in (("so", "the dog"), ("no", "a fox"))
        ),
        1,
        "tags stand around thoughts and around words; nothing is rewritten",
    ),
}
