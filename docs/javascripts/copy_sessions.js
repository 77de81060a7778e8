// The copy button of a Python session gives the code without prompts and results.
document.querySelectorAll(".language-pycon code").forEach((code) => {
  const lines = code.textContent.split("\n");
  const typed = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  code.dataset.copy = typed.map((line) => line.slice(4)).join("\n");
});
