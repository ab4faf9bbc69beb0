// The page put together, and what it asks of the server at the start: its model, and who guesses for it.

import { Failure, get } from "./api.js";
import { ChatList } from "./chat_list.js";
import { Chats, history } from "./chats.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { button, byId, focusBox, notice } from "./dom.js";
import { Inspector } from "./inspector.js";
import { KeyDialog } from "./key_dialog.js";
import { MetricsView } from "./metrics.js";
import { Reading } from "./prometheus.js";
import { Race } from "./race.js";
import { Settings } from "./settings.js";
import { Sources } from "./sources.js";
import { Strip } from "./strip.js";
import { Views } from "./views.js";

const EXAMPLES = [
  "Write a Python function that adds up a list.",
  "How do I list the files of a folder?",
  "Rename `total` to `amount` in this code:\n\n```python\ndef total_price(items):\n    total = 0\n    for item in items:\n        total += item.price * item.quantity\n    return total\n```",
  "Tell me a short story about a lighthouse.",
];

let model = "";
const sources = new Sources();
const strip = new Strip(sources);
const settings = new Settings();
const chats = new Chats(() => notice("The browser's storage is full: this chat is not kept. Export it, or delete others."));
const look = () => ({ markdown: byId("formatted").checked, styleOf: sources.styleOf });
const race = new Race({ settings, strip, sources, look, askForKey: (then) => key.ask(then) });
const key = new KeyDialog(meet);
const conversation = new Conversation({
  chats,
  settings,
  strip,
  look,
  model: () => settings.model || model,
  race: startRace,
  askForKey: (then) => key.ask(then),
  onOtherModel: meet,
  onChange: show,
});
const composer = new Composer({
  isRunning: () => conversation.running !== null,
  send: (text) => conversation.send(text),
  stop: () => conversation.stop(),
  race: raceWith,
});
const list = new ChatList(chats, conversation, () => {
  views.drawer("chats", false);
  focusBox(composer.box);
});
const metrics = new MetricsView((reading) => sources.know(reading.proposers), meet);
const views = new Views(
  (tab) => (tab === "metrics" ? metrics.start() : metrics.stop()),
  () => conversation.redraw(),
);

function show() {
  composer.show(conversation.running !== null);
  list.show();
}

function startRace(messages) {
  if (conversation.running) notice("Wait for the answer, or stop it: it would share the server with the race.");
  else race.start(messages);
}

/** What is typed, or else the last prompt of the chat. */
function raceWith(typed) {
  const { messages } = conversation.chat;
  const last = messages.findLastIndex(({ role }) => role === "user");
  if (typed) startRace([...history(messages), { role: "user", content: typed }]);
  else if (last >= 0) startRace(history(messages.slice(0, last + 1)));
  return Boolean(typed) || last >= 0;
}

async function meet() {
  try {
    const reading = new Reading(await get("metrics"), 0);
    sources.know(reading.proposers);
    settings.showProposers(reading.proposers);
    if (!conversation.chat.messages.length) strip.clear();
    const models = JSON.parse(await get("v1/models")).data.map(({ id }) => id);
    model = models[0];
    settings.showModels(models);
    showModel();
  } catch (error) {
    if (error.needsKey) key.ask(() => {});
    else notice(error instanceof Failure ? `${error.message} ${error.advice}` : String(error), { text: "Try again", run: meet });
  }
}

/** Who is spoken to. */
function showModel() {
  byId("model").textContent = settings.model || model;
  document.title = `${settings.model || model} – Foretoken`;
}

settings.chosen.addEventListener("input", showModel);
for (const example of EXAMPLES) {
  byId("examples").append(button(example.split("\n")[0].replaceAll("`", ""), "example", () => conversation.send(example)));
}
new Inspector();
views.start();
if (chats.all.length) conversation.open(chats.all[0]);
show();
meet();
