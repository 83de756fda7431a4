const theme = document.body.dataset.theme;
const dark = theme === "dark" || (theme !== "light" && window.matchMedia("(prefers-color-scheme: dark)").matches);
mermaid.initialize({
  startOnLoad: true,
  securityLevel: "strict",
  theme: dark ? "dark" : "neutral",
  flowchart: { useMaxWidth: false, rankSpacing: 36, nodeSpacing: 36, wrappingWidth: 260 }, // letters as large as the text's; a wide diagram scrolls
});
