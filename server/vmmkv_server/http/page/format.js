// Numbers as people read them, and elements as a line each.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(Math.round(number));

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number >= 100 || Number.isInteger(number) ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

export function seconds(number) {
  if (number < 60) return `${number.toFixed(number < 10 ? 1 : 0)} s`;
  return `${Math.floor(number / 60)} min ${Math.floor(number % 60)} s`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  const { className, text, ...attributes } = options;
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// JSON text, which may be cut off, with a line for each member. What is within strings stays as it is.
export function indented(json) {
  let depth = 0;
  const line = (step) => `\n${"  ".repeat((depth = Math.max(0, depth + step)))}`;
  return json.replace(/"(?:[^"\\]|\\.)*"?|\{\s*\}|\[\s*\]|[{}[\],:]|\s+/g, (token) => {
    if (token === "{" || token === "[") return token + line(1);
    if (token === "}" || token === "]") return line(-1) + token;
    if (token === ",") return token + line(0);
    return token === ":" ? ": " : token.trim();
  });
}
