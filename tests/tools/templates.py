"""Small chat templates in each form of calls, as the public ones of its models have them, without what is theirs alone."""

from typing import Final

HEAD: Final = """{%- for message in messages %}{{- '<|' + message.role + '|>' }}
{%- if message.role == 'system' or message.role == 'user' or message.role == 'tool' %}{{- message.content }}{% endif %}
{%- if message.role == 'assistant' %}"""
TAIL: Final = """{% endif %}{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
TOLD: Final = "{%- if tools %}{{- 'Tools: ' + tools | map('tojson') | join('\\n') }}{% endif %}"
CALLS: Final = "{%- for call in message.tool_calls or [] %}"


def template(calls: str) -> str:
    """A template that tells of tools, and writes the calls of a message by this text."""
    return TOLD + HEAD + "{{- message.content or '' }}" + CALLS + calls + "{% endfor %}" + TAIL


TEMPLATES: Final = {
    "hermes": template(
        """{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}"""
    ),
    "json": HEAD + "{{- message.content or '' }}" + TAIL,
}
"""By form, a template that shows it."""
STRANGE: Final = {
    "none": None,
    "no program": "{% if %}",
    "refuses all": "{{ raise_exception('no') }}",
    "tools without calls": TOLD + HEAD + "{{- message.content or '' }}" + TAIL,
    "its own form": template("{{- '<@' + call.function.name + '@>' + call.function.arguments | tojson }}"),
    "calls without their arguments": template("""{{- '<tool_call>{"name": "' + call.function.name + '"}</tool_call>' }}"""),
    "one tool by heart": template("""{{- '<tool_call>{"name": "f", "arguments": {}}</tool_call>' }}"""),
}
"""Templates that show no form."""
