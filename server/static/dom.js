// Elements from names, classes and text. Text is always data here: nothing in this page turns a string into markup.

/** el("p", "note", "text", child, ...): children are elements or strings. */
export function el(name, className = "", ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** A button that does no more than call `onClick`; `label` where its text alone would not tell a listener what it is for. */
export function button(text, className, onClick, label = "") {
  const element = el("button", className, text);
  element.type = "button";
  if (label) element.setAttribute("aria-label", label);
  element.addEventListener("click", onClick);
  return element;
}

const isTouched = () => matchMedia("(pointer: coarse)").matches;

/** Not where a keyboard would come up on the screen and cover what there is to read. */
export function focusBox(box) {
  if (!isTouched()) box.focus();
}

/** A keyboard on the screen has no Shift+Enter: there Enter breaks the line. */
export function isSending({ key, shiftKey, isComposing }) {
  return key === "Enter" && !shiftKey && !isComposing && !isTouched();
}

export const byId = (id) => document.getElementById(id);

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Says it to screen readers once, after what they are saying now. */
export function announce(text) {
  byId("announcer").textContent = text;
}

let hiding = 0;

/** A line at the head of the page for some seconds, with at most one thing to do about it. */
export function notice(text, action = null) {
  const bar = byId("notice");
  bar.replaceChildren(el("span", "", text));
  if (action) {
    bar.append(
      button(action.text, "plain", () => {
        bar.hidden = true;
        action.run();
      }),
    );
  }
  bar.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => (bar.hidden = true), action ? 12000 : 5000);
}

/** Copies, and says so on the button, a "Copy"; where the browser does not allow it, says that. */
export async function copy(text, pressed) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text, pressed);
    pressed.textContent = "Copied";
    announce("Copied");
  } catch {
    notice("The browser did not allow copying. Select the text and copy it yourself.");
    return;
  }
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

/** For pages of plain http from another machine, to which browsers give no clipboard. Throws if this is not allowed either. */
function copySelected(text, pressed) {
  const box = el("textarea", "visually-hidden");
  box.value = text;
  pressed.after(box); // beside the button: an open dialog lets nothing outside of it be selected
  box.select();
  const isCopied = document.execCommand("copy");
  box.remove();
  pressed.focus();
  if (!isCopied) throw new Error("not allowed");
}

export function seconds(value) {
  return value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
