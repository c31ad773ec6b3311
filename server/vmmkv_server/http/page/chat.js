// A chat over /v1/chat/completions, streamed, in which a person plays the tools.

import { Calls } from "./calls.js";
import { count, element, plural, seconds } from "./format.js";
import { Refused, events } from "./stream.js";

const SAID_AT_FIRST = "Ask the model something, and watch its slot grow. A second page with the same beginning shares memory.";

export class Chat {
  constructor(find, { onRefused }) {
    this.log = find("log");
    this.question = find("question");
    this.system = find("system");
    this.maxTokens = find("max-tokens");
    this.temperature = find("temperature");
    this.tools = find("tools");
    this.wrongTools = find("tools-wrong");
    this.send = find("send");
    this.onRefused = onRefused;
    this.model = null;
    this.messages = [];
    this.calls = null; // those of the last answer
    this.answering = null;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.answering.abort();
      else this.#askQuestion();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.answering) this.#askQuestion();
      }
    });
    find("tools-example").addEventListener("click", () => {
      this.tools.value = this.tools.placeholder;
      this.tools.focus();
    });
    find("new").addEventListener("click", () => {
      this.#begin();
      this.question.focus();
    });
    this.#begin();
  }

  #begin() {
    this.answering?.abort();
    this.messages = [];
    this.calls = null;
    this.log.replaceChildren(element("p", { className: "empty-chat", text: SAID_AT_FIRST }));
  }

  #askQuestion() {
    const content = this.question.value.trim();
    if (content) this.#ask(content);
  }

  // Sends the results of the last answer's calls, if it has any, and the question, if there is one.
  async #ask(question = null) {
    const tools = this.#readTools();
    if (!tools || !this.model) return;
    if (!this.messages.length) this.log.replaceChildren();
    const messages = this.messages, turns = this.calls?.close() ?? [];
    if (question !== null) {
      turns.push({ role: "user", content: question });
      this.question.value = "";
      this.#say("user", question);
    }
    const said = this.#say("assistant", "");
    this.answering = new AbortController();
    this.send.textContent = "Stop";
    const began = performance.now();
    let text = "", thought = null, calls = null, usage = null, first = null, failure = null;
    try {
      for await (const { data } of events("/v1/chat/completions", this.#body([...messages, ...turns], tools))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const { content: piece, reasoning_content: reasoning, tool_calls: called } = chunk.choices?.[0]?.delta ?? {};
        if (!piece && !reasoning && !called) continue;
        first ??= performance.now();
        if (reasoning) {
          if (!thought) said.before((thought = element("p", { className: "said reasoning", text: "" })));
          thought.textContent += reasoning;
        }
        if (piece) {
          text += piece;
          said.textContent = text;
        }
        if (called) {
          if (!calls) said.after((calls = new Calls(() => this.#ask())).box);
          calls.add(called);
        }
        this.#follow();
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    this.answering = null;
    this.send.textContent = "Send";
    if (messages !== this.messages) return; // a new chat has begun meanwhile
    if (text || calls) {
      messages.push(...turns, { role: "assistant", content: text, tool_calls: calls?.made ?? [] });
      this.calls = calls;
    }
    this.calls?.open();
    if (failure) {
      this.#say("failed", failure.message);
      if (failure instanceof Refused) this.onRefused(failure);
    } else {
      this.#meta(usage, began, first);
    }
    this.#follow();
  }

  // Returns the list in the field of tools, empty without one. What is no list is said there, and null is returned.
  #readTools() {
    let tools = null, wrong = "";
    try {
      tools = JSON.parse(this.tools.value.trim() || "[]");
      if (!Array.isArray(tools)) wrong = "A list of tools is wanted: [{…}]. Nothing was sent.";
    } catch (error) {
      wrong = `${error.message}. Nothing was sent.`;
    }
    this.wrongTools.textContent = wrong;
    this.tools.setAttribute("aria-invalid", String(wrong !== ""));
    if (!wrong) return tools;
    this.tools.closest("details").open = true;
    this.tools.focus();
    return null;
  }

  #body(messages, tools) {
    const system = this.system.value.trim();
    const whole = system ? [{ role: "system", content: system }, ...messages] : messages;
    return {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: this.answering.signal,
      body: JSON.stringify({
        model: this.model,
        messages: whole,
        tools,
        max_completion_tokens: Number(this.maxTokens.value) || 512,
        temperature: Number(this.temperature.value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    };
  }

  #say(who, text) {
    const said = element("p", { className: `said ${who}`, text });
    this.log.append(said);
    this.#follow();
    return said;
  }

  #meta(usage, began, first) {
    const parts = [];
    if (first !== null) parts.push(`first after ${seconds((first - began) / 1000)}`);
    if (usage) {
      const took = (performance.now() - (first ?? began)) / 1000;
      parts.unshift(plural(usage.completion_tokens, "token"));
      if (usage.completion_tokens > 1) parts.push(`${count((usage.completion_tokens - 1) / took)} a second`);
      parts.push(`${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${count(usage.prompt_tokens)} prompt tokens known`);
    } else {
      parts.unshift("stopped");
    }
    this.log.append(element("p", { className: "meta", text: parts.join(" · ") }));
  }

  #follow() { this.log.scrollTop = this.log.scrollHeight; }
}
