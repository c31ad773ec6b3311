"""Inspect: its model with tools, and a task whose solver uses one."""

import asyncio
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

CLIENT = "inspect-ai"
model = get_model(
    f"openai-api/vmmkv/{MODEL}", base_url=URL, api_key=KEY, config=GenerateConfig(max_tokens=MAX_TOKENS, temperature=0)
)


@tool
def get_weather() -> Tool:
    async def execute(city: City) -> str:
        """The weather of a city.

        Args:
            city: The city.
        """
        return WEATHER[city]

    return execute


for choice in ("any", ToolFunction("get_weather")):
    with step(CLIENT, f"generate, {choice if choice == 'any' else 'named'}"):
        output = asyncio.run(model.generate(PROMPT, tools=[get_weather()], tool_choice=choice))
        calls = output.choices[0].message.tool_calls
        assert calls and not any(call.parse_error for call in calls), output.choices

with step(CLIENT, "a task"), tempfile.TemporaryDirectory() as logs:
    task = Task(
        dataset=[Sample(input=COPY, target="sunny")],
        solver=[use_tools(get_weather()), generate()],
        scorer=includes(),
        message_limit=5,
    )
    (log,) = eval(task, model=model, display="none", log_dir=logs)
    assert log.status == "success" and log.samples, log.error
    wanted(any(message.role == "tool" for message in log.samples[0].messages), log.samples[0].output.completion)
