// Server-sent events by fetch, which, other than EventSource, can send a key and a body.

let key = "";

export function useKey(value) { key = value.trim(); }

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  // Without credentials the browser asks for no password of its own when a key is wanted: the page does.
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Refused(answer.status, body?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer;
}

// Yields { event, data } for each, until the server or `options.signal` ends it.
export async function* events(path, options) {
  const answer = await request(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let begun = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (begun + value).split("\n\n");
      begun = parts.pop();
      for (const part of parts) {
        const found = { event: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) found.event = line.slice(7);
          else if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
