// Vercel's AI SDK with its provider of OpenAI's interface.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";
import { assert, copy, key, maxTokens, model, prompt, step, url, wanted, weather } from "./steps.mjs";

const served = createOpenAICompatible({ name: "vmmkv", baseURL: url, apiKey: key })(model);
const structured = createOpenAICompatible({ name: "vmmkv", baseURL: url, apiKey: key, supportsStructuredOutputs: true })(model);
const city = z.object({ city: z.enum(Object.keys(weather)) });
const tools = {
  get_weather: tool({ description: "The weather of a city.", inputSchema: city, execute: async (given) => weather[given.city] }),
};
const options = { model: served, tools, maxOutputTokens: maxTokens, temperature: 0, maxRetries: 0 };

await step("ai", "generateText, required", async () => {
  const { toolResults, finishReason } = await generateText({ ...options, prompt, toolChoice: "required" });
  assert(finishReason === "tool-calls" && toolResults.every((result) => Object.values(weather).includes(result.output)), toolResults);
});

await step("ai", "generateText, named", async () => {
  const { toolCalls } = await generateText({ ...options, prompt, toolChoice: { type: "tool", toolName: "get_weather" } });
  assert(toolCalls.length && !toolCalls.some((call) => call.invalid), toolCalls);
});

await step("ai", "generateText, auto, two steps", async () => {
  const { steps, text } = await generateText({ ...options, prompt: copy, stopWhen: isStepCount(2) });
  wanted(steps[0].toolResults.length, text);
});

await step("ai", "streamText, required", async () => {
  const kinds = new Set();
  const failed = [];
  const { stream } = streamText({ ...options, prompt, toolChoice: "required", onError: ({ error }) => failed.push(error) });
  for await (const part of stream) kinds.add(part.type);
  if (failed.length) throw failed[0];
  assert(["tool-input-delta", "tool-call", "tool-result"].every((kind) => kinds.has(kind)), [...kinds]);
});

await step("ai", "generateObject", async () => {
  const { object } = await generateObject({ model: structured, schema: city, prompt, maxOutputTokens: maxTokens, maxRetries: 0 });
  assert(object.city in weather, object);
});

await step("ai", "generateText, Output.object", async () => {
  const { output } = await generateText({ ...options, model: structured, tools: {}, prompt, output: Output.object({ schema: city }) });
  assert(output.city in weather, output);
});
