"""pydantic-ai: its output is a tool by default."""

from pydantic import BaseModel
from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

CLIENT = "pydantic-ai-slim"
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
limits = UsageLimits(request_limit=2)
called: list[str] = []


def get_weather(city: City) -> str:
    """The weather of a city."""
    called.append(city)
    return WEATHER[city]


class Weather(BaseModel):
    """The weather of a city."""

    city: City
    is_sunny: bool


with step(CLIENT, "output_type"):
    answer = Agent(model, output_type=Weather, model_settings=settings).run_sync(PROMPT, usage_limits=limits)
    assert isinstance(answer.output, Weather)

with step(CLIENT, "a tool and output_type", UsageLimitExceeded):
    Agent(model, tools=[get_weather], output_type=Weather, model_settings=settings).run_sync(PROMPT, usage_limits=limits)

with step(CLIENT, "a tool", UsageLimitExceeded):
    called.clear()
    text = Agent(model, tools=[get_weather], instructions="Be brief.", model_settings=settings).run_sync(
        COPY, usage_limits=limits
    )
    wanted(called, text.output)

with step(CLIENT, "a tool, a stream", UsageLimitExceeded):
    called.clear()
    streamed = Agent(model, tools=[get_weather], model_settings=settings).run_stream_sync(COPY, usage_limits=limits)
    pieces = list(streamed.stream_text(delta=True))
    wanted(called, "".join(pieces))
