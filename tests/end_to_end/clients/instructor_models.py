"""instructor in its default mode, in which a model of pydantic is a tool that must be called."""

import instructor
from openai import OpenAI
from pydantic import BaseModel
from steps import KEY, MAX_TOKENS, MODEL, PROMPT, URL, City, step

client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0))
options = {
    "model": MODEL,
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "max_retries": 1,
    "messages": [{"role": "user", "content": PROMPT}],
}


class Weather(BaseModel):
    city: City
    is_sunny: bool


with step("instructor", "a model"):
    assert isinstance(client.chat.completions.create(response_model=Weather, **options), Weather)

with step("instructor", "a partial model, streamed"):
    *_, last = client.chat.completions.create_partial(response_model=Weather, **options)
    Weather.model_validate(last.model_dump())

with step("instructor", "from_provider"):
    provided = instructor.from_provider(f"openai/{MODEL}", base_url=URL, api_key=KEY)
    assert isinstance(
        provided.create(response_model=Weather, **{key: each for key, each in options.items() if key != "model"}), Weather
    )
