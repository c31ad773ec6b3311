"""LlamaIndex's OpenAILike with tools: predict_and_call, structured output and its agent."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

CLIENT = "llama-index-llms-openai-like"
llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    max_tokens=MAX_TOKENS,
    temperature=0,
    max_retries=0,
)


def get_weather(city: City) -> str:
    """The weather of a city."""
    return WEATHER[city]


tool = FunctionTool.from_defaults(get_weather)


class Weather(BaseModel):
    """The weather of a city."""

    city: City
    is_sunny: bool


with step(CLIENT, "predict_and_call, required"):
    answer = llm.predict_and_call([tool], user_msg=PROMPT, tool_required=True, error_on_no_tool_call=True)
    assert answer.response in WEATHER.values(), answer

with step(CLIENT, "chat_with_tools, a stream"):
    *_, last = llm.stream_chat_with_tools([tool], user_msg=PROMPT, tool_required=True)
    calls = llm.get_tool_calls_from_response(last)
    assert calls[0].tool_kwargs["city"] in WEATHER, last

with step(CLIENT, "as_structured_llm"):
    assert isinstance(llm.as_structured_llm(Weather).chat([ChatMessage(PROMPT)]).raw, Weather)

with step(CLIENT, "FunctionAgent"):

    async def run() -> object:
        return await FunctionAgent(tools=[tool], llm=llm, system_prompt="You are brief.").run(
            COPY, max_iterations=2, early_stopping_method="generate"
        )

    answer = asyncio.run(run())
    wanted(answer.tool_calls, str(answer))
