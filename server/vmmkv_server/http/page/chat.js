// A chat over /v1/chat/completions, streamed.

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
    this.send = find("send");
    this.onRefused = onRefused;
    this.model = null;
    this.messages = [];
    this.answering = null;
    find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answering) this.answering.abort();
      else this.#ask();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.answering) this.#ask();
      }
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
    this.log.replaceChildren(element("p", { className: "empty-chat", text: SAID_AT_FIRST }));
  }

  async #ask() {
    const content = this.question.value.trim();
    if (!content || !this.model) return;
    if (!this.messages.length) this.log.replaceChildren();
    const messages = this.messages;
    messages.push({ role: "user", content });
    this.question.value = "";
    this.#say("user", content);
    const said = this.#say("assistant", "");
    this.answering = new AbortController();
    this.send.textContent = "Stop";
    const began = performance.now();
    let text = "", thought = null, usage = null, first = null, failure = null;
    try {
      for await (const { data } of events("/v1/chat/completions", this.#body(messages))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const { content: piece, reasoning_content: reasoning } = chunk.choices?.[0]?.delta ?? {};
        if (!piece && !reasoning) continue;
        first ??= performance.now();
        if (reasoning) {
          if (!thought) said.before((thought = element("p", { className: "said reasoning", text: "" })));
          thought.textContent += reasoning;
        }
        if (piece) {
          text += piece;
          said.textContent = text;
        }
        this.#follow();
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    this.answering = null;
    this.send.textContent = "Send";
    if (messages !== this.messages) return; // a new chat has begun meanwhile
    if (text) messages.push({ role: "assistant", content: text });
    else messages.pop();
    if (failure) {
      this.#say("failed", failure.message);
      if (failure instanceof Refused) this.onRefused(failure);
    } else {
      this.#meta(said, usage, began, first);
    }
    this.#follow();
  }

  #body(messages) {
    const system = this.system.value.trim();
    const whole = system ? [{ role: "system", content: system }, ...messages] : messages;
    return {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: this.answering.signal,
      body: JSON.stringify({
        model: this.model,
        messages: whole,
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

  #meta(said, usage, began, first) {
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
    said.after(element("p", { className: "meta", text: parts.join(" · ") }));
  }

  #follow() { this.log.scrollTop = this.log.scrollHeight; }
}
