// The theme that was chosen, set before the first paint; without a choice the system's holds. No module, so that it blocks.
"use strict";

{
  const THEMES = ["system", "light", "dark"];
  const root = document.documentElement;

  function apply(theme) {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  let theme = "system";
  try {
    theme = localStorage.getItem("foretoken.theme") ?? "system";
  } catch {
    // A browser that keeps nothing: the system's theme.
  }
  if (!THEMES.includes(theme)) theme = "system";
  apply(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.dataset.choice = theme;
      const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      button.title = `Theme: ${theme}. Click for ${next}.`;
      button.setAttribute("aria-label", button.title);
    };
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      apply(theme);
      try {
        localStorage.setItem("foretoken.theme", theme);
      } catch {
        // It holds for this visit.
      }
      show();
    });
    show();
  });
}
