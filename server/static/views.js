// The two tabs, the drawers at the sides, and the switches for colours and markdown.

import { byId, focusBox } from "./dom.js";
import { keep, kept } from "./keeping.js";

const TABS = ["chat", "metrics"];
const DRAWERS = ["chats", "settings"];

export class Views {
  /** onSelect(tab) after each change; onFormat() when markdown was switched. */
  constructor(onSelect, onFormat) {
    this.onSelect = onSelect;
    for (const name of TABS) this.addTab(name);
    for (const name of DRAWERS) this.addDrawer(name);
    addSwitch("coloured", () => {});
    addSwitch("formatted", onFormat);
    addEventListener("hashchange", () => this.select(TABS.find((name) => location.hash === `#${name}`) ?? "chat"));
  }

  /** The tab that the address names, so that a reload comes back to it. */
  start() {
    this.select(location.hash === "#metrics" ? "metrics" : "chat");
  }

  select(name) {
    for (const view of TABS) {
      const tab = byId(`tab-${view}`);
      tab.setAttribute("aria-selected", String(view === name));
      tab.tabIndex = view === name ? 0 : -1;
      byId(`view-${view}`).hidden = view !== name;
    }
    const hash = name === "chat" ? location.pathname : `#${name}`;
    if ((location.hash || location.pathname) !== hash) history.replaceState(null, "", hash);
    this.onSelect(name);
  }

  addTab(name) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => this.select(name));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const other = TABS.at((TABS.indexOf(name) + step) % TABS.length);
      event.preventDefault();
      this.select(other);
      byId(`tab-${other}`).focus();
    });
  }

  addDrawer(name) {
    const toggle = byId(`${name}-toggle`);
    toggle.addEventListener("click", () => {
      const opening = !isOpen(name);
      if (opening) this.select("chat");
      for (const other of DRAWERS) if (other !== name && opening) this.drawer(other, false);
      this.drawer(name, opening);
    });
    byId(name).addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !isOpen(name)) return;
      event.preventDefault();
      this.drawer(name, false);
      toggle.focus();
    });
  }

  /** Opens or closes what is at a side. The list of chats always shows where there is room. */
  drawer(name, open) {
    const panel = byId(name);
    panel.classList.toggle("open", open);
    byId(`${name}-toggle`).setAttribute("aria-expanded", String(open));
    if (open) focusBox(panel.querySelector("button, textarea, input"));
  }
}

function isOpen(name) {
  return byId(name).classList.contains("open");
}

function addSwitch(name, then) {
  const box = byId(name);
  const apply = () => document.documentElement.classList.toggle(name, box.checked);
  box.checked = kept(name) !== "no";
  box.addEventListener("change", () => {
    keep(name, box.checked ? "yes" : "no");
    apply();
    then();
  });
  apply();
}
