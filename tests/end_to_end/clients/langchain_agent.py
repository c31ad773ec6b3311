"""LangChain's chat model of OpenAI's interface, and its agent."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=MAX_TOKENS, temperature=0, max_retries=0)


@tool
def get_weather(city: City) -> str:
    """The weather of a city."""
    return WEATHER[city]


class Weather(BaseModel):
    """The weather of a city."""

    city: City
    is_sunny: bool


with step("langchain-openai", "bind_tools, required"):
    answer = model.bind_tools([get_weather], tool_choice="any").invoke(PROMPT)
    assert answer.tool_calls and not answer.invalid_tool_calls, answer
    results = [get_weather.invoke(call) for call in answer.tool_calls]
    after = model.bind_tools([get_weather]).invoke([("user", PROMPT), answer, *results])
    assert after.content or after.tool_calls, after

with step("langchain-openai", "bind_tools, named, a stream"):
    whole = None
    for chunk in model.bind_tools([get_weather], tool_choice="get_weather").stream(PROMPT):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"]["city"] in WEATHER, whole

for method in ("function_calling", "json_schema"):
    with step("langchain-openai", f"with_structured_output, {method}"):
        answer = model.with_structured_output(Weather, method=method).invoke(PROMPT)
        assert isinstance(answer, Weather), answer

with step("langchain", "create_agent", GraphRecursionError):
    agent = create_agent(model, tools=[get_weather], system_prompt="You are brief.")
    state = agent.invoke({"messages": [{"role": "user", "content": COPY}]}, {"recursion_limit": 4})
    wanted(any(message.type == "tool" for message in state["messages"]), state["messages"][-1].content)

with step("langchain", "create_agent, a stream", GraphRecursionError):
    agent = create_agent(model, tools=[get_weather])
    seen = [
        message.type
        for message, _ in agent.stream({"messages": [("user", COPY)]}, {"recursion_limit": 4}, stream_mode="messages")
    ]
    wanted("tool" in seen, str(seen))
