"""smolagents: an agent whose every turn is a call, `final_answer` the last."""

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep
from smolagents.utils import AgentMaxStepsError
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, step

CLIENT = "smolagents"
model = OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY, max_tokens=MAX_TOKENS, temperature=0)


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city
    """
    return WEATHER.get(city, "rain")


for name, prompt, streams in (("run", PROMPT, False), ("run, a stream", COPY, True)):
    with step(CLIENT, name):
        agent = ToolCallingAgent([get_weather], model, max_steps=2, stream_outputs=streams, verbosity_level=LogLevel.OFF)
        agent.run(prompt)
        taken = [each for each in agent.memory.steps if isinstance(each, ActionStep)]
        assert any(each.tool_calls for each in taken), taken
        errors = [each.error for each in taken if each.error is not None]
        assert not [each for each in errors if not isinstance(each, AgentMaxStepsError)], errors
