// Small things that the browser keeps: settings, the draft of a message, switches. A browser that keeps nothing is no error.

/** null if there is none, or the browser does not tell. */
export function kept(name) {
  try {
    return localStorage.getItem(`foretoken.${name}`);
  } catch {
    return null;
  }
}

export function keep(name, text) {
  try {
    localStorage.setItem(`foretoken.${name}`, text);
  } catch {
    // It holds for this visit.
  }
}
