"""Haystack's chat generator with tools, and its agent."""

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted

CLIENT = "haystack-ai"


def get_weather(city: Annotated[City, "the city"]) -> str:
    """The weather of a city."""
    return WEATHER[city]


tool = create_tool_from_function(get_weather)


def generator(**options: object) -> OpenAIChatGenerator:
    options = {"max_tokens": MAX_TOKENS, "temperature": 0, **options}
    return OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), api_base_url=URL, model=MODEL, generation_kwargs=options, timeout=600, max_retries=0
    )


with step(CLIENT, "tools, required"):
    question = ChatMessage.from_user(PROMPT)
    (reply,) = generator(tool_choice="required").run([question], tools=[tool])["replies"]
    assert reply.tool_calls, reply
    results = [ChatMessage.from_tool(tool.invoke(**call.arguments), origin=call) for call in reply.tool_calls]
    (reply,) = generator().run([question, reply, *results], tools=[tool])["replies"]
    assert reply.text or reply.tool_calls, reply

with step(CLIENT, "tools, required, a stream"):
    chunks = []
    (reply,) = generator(tool_choice="required").run([question], tools=[tool], streaming_callback=chunks.append)["replies"]
    assert reply.tool_calls and reply.tool_calls[0].arguments["city"] in WEATHER and len(chunks) > 1, reply

with step(CLIENT, "an agent"):
    agent = Agent(chat_generator=generator(), tools=[tool], max_agent_steps=2)
    messages = agent.run([ChatMessage.from_user(COPY)])["messages"]
    wanted(any(message.tool_call_results for message in messages), messages[-1].text)
