// Calls of tools in an answer: their arguments as they come, and a field for the result of each.

import { element, indented } from "./format.js";

export class Calls {
  constructor(onSend) {
    this.made = []; // as a turn of the conversation has them
    this.texts = [];
    this.results = [];
    const send = element("button", { type: "button", className: "quiet", text: "Send results" });
    send.addEventListener("click", onSend);
    this.rows = element("div");
    this.box = element("fieldset", { className: "calls", "aria-label": "Calls", disabled: "" }, this.rows, send);
  }

  // Takes the pieces of a delta. The first of a call has its id and name.
  add(pieces) {
    for (const { index, id, function: piece } of pieces) {
      if (id) this.#begin(index, id, piece.name);
      const called = this.made[index].function;
      called.arguments += piece.arguments;
      this.texts[index].textContent = indented(called.arguments);
    }
  }

  #begin(index, id, name) {
    this.made[index] = { id, type: "function", function: { name, arguments: "" } };
    this.texts[index] = element("pre");
    this.results[index] = element("textarea", { rows: 1 });
    const result = element("label", { text: `Result of ${name}` }, this.results[index]);
    this.rows.append(element("div", { className: "call" }, element("h3", { text: name }), this.texts[index], result));
  }

  // Lets results be written and sent.
  open() { this.box.disabled = false; }

  // Returns the results as turns of the conversation, and lets them be changed no more.
  close() {
    this.box.disabled = true;
    return this.made.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: this.results[index].value }));
  }
}
