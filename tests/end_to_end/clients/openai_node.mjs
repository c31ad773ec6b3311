// OpenAI's own client of Node.
import OpenAI from "openai";
import { zodFunction } from "openai/helpers/zod";
import { z } from "zod";
import { assert, copy, key, maxTokens, model, prompt, step, url, wanted, weather } from "./steps.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const chat = client.chat.completions;
const messages = [{ role: "user", content: prompt }];
const options = { model, max_tokens: maxTokens, temperature: 0, messages };
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: Object.keys(weather) } },
  required: ["city"],
  additionalProperties: false,
};
const described = { name: "get_weather", description: "The weather of a city.", parameters: schema };
const tools = [{ type: "function", function: described }];
const city = z.object({ city: z.enum(Object.keys(weather)) });

await step("openai", "tools, required", async () => {
  const [first] = (await chat.create({ ...options, tools, tool_choice: "required" })).choices;
  assert(first.finish_reason === "tool_calls" && first.message.tool_calls.length, first);
  const results = first.message.tool_calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: weather[JSON.parse(call.function.arguments).city],
  }));
  const [second] = (await chat.create({ ...options, tools, messages: [...messages, first.message, ...results] })).choices;
  assert(second.message.content || second.message.tool_calls, second);
});

await step("openai", "stream", async () => {
  const stream = chat.stream({ ...options, tools, tool_choice: { type: "function", function: { name: "get_weather" } } });
  const pieces = [];
  stream.on("tool_calls.function.arguments.delta", (event) => pieces.push(event.arguments_delta));
  const { message } = (await stream.finalChatCompletion()).choices[0];
  assert(weather[JSON.parse(message.tool_calls[0].function.arguments).city] && pieces.length, message);
});

await step("openai", "parse", async () => {
  const tool = zodFunction({ name: "get_weather", parameters: city });
  const { message } = (await chat.parse({ ...options, tools: [tool], tool_choice: "required" })).choices[0];
  assert(message.tool_calls.every((call) => call.function.parsed_arguments.city in weather), message);
});

for (const stream of [false, true]) {
  await step("openai", `runTools${stream ? ", a stream" : ""}`, async () => {
    const called = [];
    const run = (given) => (called.push(given.city), weather[given.city]);
    const runnable = { type: "function", function: { ...described, parse: JSON.parse, function: run } };
    const copied = { ...options, messages: [{ role: "user", content: copy }], stream };
    const runner = chat.runTools({ ...copied, tools: [runnable] }, { maxChatCompletions: 2 });
    await runner.done();
    wanted(called.length, runner.messages.at(-1).content);
    assert(runner.messages.some((message) => message.role === "tool"), runner.messages);
  });
}
