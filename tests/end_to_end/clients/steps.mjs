// What the scripts of JavaScript clients share: see steps.py.
import { readFileSync } from "node:fs";

export const [url, key, model, copy] = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL", "COPY"].map((name) => process.env[name]);
export const prompt = "What is the weather in Paris?";
export const maxTokens = 40;
export const weather = { Paris: "sunny", Oslo: "snow" };

export class WeakModelError extends Error {}

// A small model need not come this far; a good one does.
export function wanted(isSo, what) {
  if (!isSo) throw new WeakModelError(what);
}

export function assert(isSo, what) {
  if (!isSo) throw new Error(`not so: ${JSON.stringify(what)}`);
}

export async function step(client, name, run) {
  const { version } = JSON.parse(readFileSync(`node_modules/${client}/package.json`));
  const report = { client, version, step: name, ok: true, weak: false, why: "" };
  try {
    await run();
  } catch (error) {
    Object.assign(report, { ok: false, weak: error instanceof WeakModelError, why: `${error.name}: ${error.message}` });
  }
  console.log(JSON.stringify(report));
}
