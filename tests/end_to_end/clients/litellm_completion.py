"""litellm with the provider for OpenAI's interface, and with the one for vLLM."""

import json

import litellm
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, step, wanted

CITY = {"type": "string", "enum": list(WEATHER)}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}}
]


def complete(provider: str, messages: list, **options: object) -> litellm.ModelResponse:
    served = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
    return litellm.completion(messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS, temperature=0, **served, **options)


for provider in ("openai", "hosted_vllm"):
    with step("litellm", f"completion, {provider}"):
        messages = [{"role": "user", "content": PROMPT}]
        first = complete(provider, messages, tool_choice="required").choices[0]
        calls = first.message.tool_calls
        assert calls and first.finish_reason == "tool_calls", first
        results = [
            {
                "tool_call_id": call.id,
                "role": "tool",
                "name": call.function.name,
                "content": WEATHER[json.loads(call.function.arguments)["city"]],
            }
            for call in calls
        ]
        second = complete(provider, [*messages, first.message, *results]).choices[0].message
        assert second.content or second.tool_calls, second

with step("litellm", "completion, auto, a stream"):
    chunks = list(complete("openai", [{"role": "user", "content": COPY}], stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    wanted(message.tool_calls, message.content)
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in WEATHER, message
