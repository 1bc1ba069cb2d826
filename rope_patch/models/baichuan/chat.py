"""The chat templates of Baichuan's chat models, in Jinja."""

from __future__ import annotations

_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- '<user>' + message['content'] -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<assistant>' + message['content'] <eos> -}}
    {%- elif <system> -%}
        {{- message['content'] -}}
    {%- else -%}
        {{- raise_exception('role ' + message['role'] + ' at place ' + loop.index0|string + '; allowed: <roles>') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<assistant>' -}}
{%- endif -%}
"""


def chat_template(user: str, assistant: str, second_generation: bool) -> str:
    """The prompt that the published `chat` method builds, without any bos; `user` and `assistant` open a turn.

    Baichuan 2, the second generation, accepts a raw system text at the start and closes no turn. Baichuan accepts no
    system text, and closes the assistant's turns with eos.
    """
    differences = {
        "<user>": user,
        "<assistant>": assistant,
        "<eos>": "" if second_generation else "+ eos_token",
        "<system>": "message['role'] == 'system' and loop.first" if second_generation else "false",
        "<roles>": "system (first), user, assistant" if second_generation else "user, assistant",
    }
    template = _TEMPLATE
    for place, text in differences.items():
        template = template.replace(place, text)
    return template
