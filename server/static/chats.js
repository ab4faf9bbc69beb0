// The conversations that this browser keeps: one localStorage entry each. What is read back is checked, never trusted.

import { Answer } from "./answer.js";

export const PREFIX = "foretoken.chat.";

/** A message is {role: "user", content} or {role: "assistant", answer: Answer, model, failure: {message, advice} | null}. */
export class Chats {
  /** onFull(): the browser keeps no more. */
  constructor(onFull) {
    this.onFull = onFull;
    this.all = [];
    this.load();
  }

  load() {
    this.all = [];
    try {
      for (const key of Object.keys(localStorage)) {
        const chat = key.startsWith(PREFIX) ? readable(key, localStorage.getItem(key)) : null;
        if (chat) this.all.push(chat);
      }
    } catch {
      // A browser that keeps nothing: the list lasts as long as the page.
    }
    this.all.sort((a, b) => b.updated - a.updated);
  }

  /** A new one, kept from its first message on. */
  create() {
    return { id: newId(), messages: [], updated: Date.now() };
  }

  /** What it is from now on is kept beside what another tab has made of it. */
  branch(chat) {
    chat.id = newId();
    this.save(chat);
  }

  save(chat) {
    chat.updated = Date.now();
    this.all = [chat, ...this.all.filter(({ id }) => id !== chat.id)];
    this.all.sort((a, b) => b.updated - a.updated);
    if (this.write(chat)) return;
    // Where tokens came from takes most of the room: the oldest chats forget it first.
    for (const old of [...this.all].reverse()) {
      for (const message of old.messages) if (message.answer && old !== chat) message.answer.tokens = [];
      if (this.write(old) && this.write(chat)) return;
    }
    this.onFull();
  }

  write(chat) {
    try {
      localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
      return true;
    } catch {
      return false;
    }
  }

  remove(chat) {
    this.all = this.all.filter((other) => other !== chat);
    try {
      localStorage.removeItem(PREFIX + chat.id);
    } catch {
      // It was not kept.
    }
  }
}

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

/** A copy of the messages that later changes do not reach; answers themselves never change once they are done. */
export const snapshot = (messages) => messages.map((message) => ({ ...message }));

/** What the server is told of the conversation so far. An answer that broke off counts as far as it came. */
export function history(messages) {
  return messages
    .map(({ role, content, answer }) => ({ role, content: answer ? answer.content : content }))
    .filter(({ role, content }) => role === "user" || content);
}

/** The first words of the first message. */
export function titleOf(chat) {
  const line = (chat.messages.find(({ role }) => role === "user")?.content ?? "").trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47).replace(/\p{Cs}$/u, "").trimEnd()}…` : line || "New chat";
}

/** The conversation as a file that other programs can read. */
export function exported(chat) {
  const messages = chat.messages.map(({ role, content, answer, model }) =>
    answer ? { role, model, content: answer.content, ...(answer.reasoning ? { reasoning: answer.reasoning } : {}) } : { role, content },
  );
  return JSON.stringify({ title: titleOf(chat), exported: new Date().toISOString(), messages }, null, 2);
}

function readable(key, text) {
  let stored;
  try {
    stored = JSON.parse(text);
  } catch {
    return null;
  }
  if (!Array.isArray(stored?.messages)) return null;
  const messages = stored.messages.filter((m) => m && (m.role === "user" || (m.role === "assistant" && m.answer)));
  return {
    id: key.slice(PREFIX.length),
    updated: Number(stored.updated) || 0,
    messages: messages.map((m) =>
      m.role === "user"
        ? { role: "user", content: String(m.content ?? "") }
        : { role: "assistant", answer: Answer.from(m.answer), model: String(m.model ?? ""), failure: failureOf(m.failure) },
    ),
  };
}

function failureOf(stored) {
  return stored ? { message: String(stored.message ?? ""), advice: String(stored.advice ?? "") } : null;
}
