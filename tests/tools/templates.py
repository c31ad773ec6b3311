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


def written(text: str) -> str:
    """Jinja of a text with NAME, ARGUMENTS, KEY and VALUE in it."""
    meant = {
        "NAME": "call.function.name",
        "ARGUMENTS": "call.function.arguments | tojson",
        "KEY": "call.function.arguments.keys() | first",
        "VALUE": "call.function.arguments.values() | first",
    }
    literal = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    for word, expression in meant.items():
        literal = literal.replace(word, f"' ~ ({expression}) ~ '")
    return "{{- '" + literal + "' }}"


PLAIN: Final = HEAD + "{{- message.content or '' }}" + TAIL
"""A template that knows no tools."""
OBJECT: Final = '{"name": "NAME", "arguments": ARGUMENTS}'
CALLS_OF: Final[tuple[tuple[str | None, str, str], ...]] = (
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", "Hermes 2 and 3, Qwen 2.5 and 3, QwQ, Bielik 11B, MiMo-VL, Reka Edge"),
    ("hermes", f"<tool_call>{OBJECT}</tool_call>", ""),
    ("llama3_json", '{"name": "NAME", "parameters": ARGUMENTS}<|eot_id|>', "Llama 3.1, 3.2, 3.3"),
    ("llama3_json", '<|python_tag|>{"name": "NAME", "parameters": ARGUMENTS}<|eom_id|>', ""),
    ("mistral", '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS, "id": "a"}]', "Mistral 7B v0.3"),
    ("mistral", '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS, "id": "a"}]', "Mistral Nemo"),
    ("mistral", "[TOOL_CALLS]NAME[CALL_ID]a1[ARGS]ARGUMENTS", "Mistral Small 3.2"),
    ("mistral", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "Ministral 3, Devstral Small"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        "Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3, Step 3.5",
    ),
    ("qwen3_coder", "<tool_call>\n<function=NAME>\n<parameter=KEY>VALUE\n</parameter>\n</function>\n</tool_call>", "Tiny Aya"),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n</seed:tool_call>",
        "Seed-OSS",
    ),
    ("glm45", "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>", "GLM 4.5, 4.6"),
    ("glm47", "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>", "GLM 4.7, 5"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "DeepSeek V3, R1 0528",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "DeepSeek V3.1",
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "DeepSeek V3.2",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "DeepSeek V4",
    ),
    ("minimax", f"<tool_calls>\n{OBJECT}\n</tool_calls>", "MiniMax M1"),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>\n</minimax:tool_call>',
        "MiniMax M2",
    ),
    ("jamba", f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>", "Jamba"),
    ("jamba", f'<tool_calls>[{OBJECT[:-1]}, "id": "a"}}]</tool_calls>', "Apriel"),
    ("jamba", f"<tool_calls>[{OBJECT}]</tool_calls>", ""),
    ("granite", f"<|tool_call|>[{OBJECT}]", "Granite 3"),
    ("phi4_mini", f"functools[{OBJECT}]", "Phi 4 mini"),
    (None, " to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS<|call|>", "gpt-oss"),
    (None, '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>', "Gemma 4"),
    (None, "<|tool_call_start|>[NAME(KEY='VALUE')]<|tool_call_end|>", "LFM 2.5"),
    (None, '<|START_ACTION|>[{"tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>', "Command R7B"),
    (None, '<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>', "Apertus"),
    (None, OBJECT, ""),
    (None, f"[{OBJECT}]", "xLAM"),
)
"""The form, a call as a template writes it, and models with such templates. None for forms that are unknown."""
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
