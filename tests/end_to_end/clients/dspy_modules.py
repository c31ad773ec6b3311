"""DSPy: an agent whose calls are text of its own, and a signature whose tools are the model's."""

import dspy
from dspy.utils.exceptions import AdapterParseError
from steps import COPY, KEY, MAX_TOKENS, MODEL, PROMPT, URL, WEATHER, City, step, wanted


class Served(dspy.LM):
    """A model that calls tools, of which DSPy's list knows nothing."""

    supports_function_calling = True


lm = Served(f"openai/{MODEL}", api_base=URL, api_key=KEY, max_tokens=MAX_TOKENS, temperature=0, cache=False, num_retries=0)


def get_weather(city: City) -> str:
    """The weather of a city."""
    return WEATHER[city]


class Ask(dspy.Signature):
    """Answer by tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


with step("dspy", "native tools", AdapterParseError):
    dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True))
    calls = dspy.Predict(Ask)(question=COPY, tools=[dspy.Tool(get_weather)]).calls
    wanted(calls and calls.tool_calls, str(calls))

with step("dspy", "ReAct", AdapterParseError):
    dspy.configure(lm=lm)
    dspy.ReAct("question -> answer", tools=[get_weather], max_iters=1)(question=PROMPT)
