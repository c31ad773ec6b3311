"""OpenAI's own client."""

import json
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
options: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
messages: list[Any] = [{"role": "user", "content": PROMPT}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: City


tools: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
named: Any = {"type": "function", "function": {"name": "get_weather"}}

for choice in ("required", named):
    with step("openai", f"tools, {'named' if choice is named else choice}"):
        first = client.chat.completions.create(messages=messages, tools=tools, tool_choice=choice, **options).choices[0]
        calls = first.message.tool_calls
        assert calls and first.finish_reason == "tool_calls", first
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": WEATHER[json.loads(call.function.arguments)["city"]]}
            for call in calls
        ]
        history = [*messages, first.message, *results]
        second = client.chat.completions.create(messages=history, tools=tools, tool_choice="none", **options).choices[0]
        assert second.message.content and not second.message.tool_calls, second

with step("openai", "tools, auto"):
    copied: list[Any] = [{"role": "user", "content": COPY}]
    first = client.chat.completions.create(messages=copied, tools=tools, **options).choices[0]
    wanted(first.message.tool_calls, repr(first.message.content))
    assert first.finish_reason == "tool_calls"

with step("openai", "tools, auto, a stream"):
    copied = [{"role": "user", "content": COPY}]
    names, arguments, finish = [], "", None
    for chunk in client.chat.completions.create(
        messages=copied, tools=tools, stream=True, parallel_tool_calls=False, **options
    ):
        for delta in chunk.choices[0].delta.tool_calls or []:
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    wanted(names, f"no call, {finish}")
    assert names == ["get_weather"] and json.loads(arguments)["city"] in WEATHER and finish == "tool_calls"

with step("openai", "a stream"):
    final: dict[int, Any] = {}
    for chunk in client.chat.completions.create(messages=messages, tools=tools, tool_choice="required", stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index not in final:
                assert delta.id and delta.function.name == "get_weather", delta
                final[delta.index] = delta
            else:
                final[delta.index].function.arguments += delta.function.arguments
    assert final and all(json.loads(each.function.arguments)["city"] in WEATHER for each in final.values()), final

with (
    step("openai", "the helper for streams"),
    client.chat.completions.stream(
        messages=messages, tools=[pydantic_function_tool(GetWeather)], tool_choice="required", **options
    ) as stream,
):
    kinds = [event.type for event in stream]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds, kinds
    calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls and all(isinstance(each.function.parsed_arguments, GetWeather) for each in calls), calls

with step("openai", "parse"):
    calls = (
        client.chat.completions.parse(
            messages=messages,
            tools=[pydantic_function_tool(GetWeather)],
            tool_choice="required",
            parallel_tool_calls=False,
            **options,
        )
        .choices[0]
        .message.tool_calls
    )
    assert calls and len(calls) == 1 and isinstance(calls[0].function.parsed_arguments, GetWeather), calls
