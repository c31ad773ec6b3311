"""OpenAI's agents over chat completions."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

CLIENT = "openai-agents"
set_tracing_disabled(True)
called: list[str] = []


@function_tool
def get_weather(city: City) -> str:
    """The weather of a city."""
    called.append(city)
    return WEATHER[city]


class Weather(BaseModel):
    city: City


def agent(choice: str | None = None, **options: object) -> Agent:
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    settings = ModelSettings(tool_choice=choice, max_tokens=MAX_TOKENS, temperature=0.0)
    return Agent(name="Assistant", instructions="You are brief.", model=model, model_settings=settings, **options)


with step(CLIENT, "a tool, required"):
    called.clear()
    answer = Runner.run_sync(
        agent("required", tools=[get_weather], tool_use_behavior="stop_on_first_tool"), PROMPT, max_turns=2
    )
    assert called and answer.final_output in WEATHER.values(), answer

with step(CLIENT, "a tool, auto", MaxTurnsExceeded):
    called.clear()
    answer = Runner.run_sync(agent(tools=[get_weather]), COPY, max_turns=2)
    wanted(called, answer.final_output)

with step(CLIENT, "a tool, required, a stream", MaxTurnsExceeded):
    called.clear()

    async def streamed() -> list[str]:
        run = Runner.run_streamed(agent("required", tools=[get_weather]), PROMPT, max_turns=2)
        return [event.type async for event in run.stream_events()]

    kinds = asyncio.run(streamed())
    assert called and "run_item_stream_event" in kinds, kinds

with step(CLIENT, "output_type"):
    answer = Runner.run_sync(agent(output_type=Weather), PROMPT, max_turns=2)
    assert isinstance(answer.final_output, Weather)

with step(CLIENT, "handoff", MaxTurnsExceeded):
    other = agent(tools=[])
    other.name = "Other"
    Runner.run_sync(agent("required", handoffs=[other]), PROMPT, max_turns=2)
