// Light, dark, or as the system has it.

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const KEY = "ssd-theme";

export function offerThemes(button) {
  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme === "auto" ? "system" : theme}`;
  };
  button.addEventListener("click", () => {
    const theme = NEXT[document.documentElement.dataset.theme];
    localStorage.setItem(KEY, theme);
    use(theme);
  });
  const kept = localStorage.getItem(KEY);
  use(kept in NEXT ? kept : "auto");
}
