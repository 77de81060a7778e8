// The copy button of a Python session gives the code without prompts and results.
document.querySelectorAll(".language-pycon code").forEach((code) => {
  const lines = code.textContent.split("\n");
  const typed = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  code.dataset.copy = typed.map((line) => line.slice(4)).join("\n");
});

// Long names in tables break at dots, underscores and capital letters only; options do not.
document.querySelectorAll(".md-typeset table code").forEach((code) => {
  if (/^-[-\w]+$/.test(code.textContent)) {
    code.style.whiteSpace = "nowrap"; // An option, such as --max-restarts.
  } else if (code.childElementCount === 0) {
    const parts = code.textContent.split(/(?<=[._/(,=])|(?<=[a-z])(?=[A-Z])/);
    code.replaceChildren(...parts.flatMap((part) => [document.createElement("wbr"), part]));
  }
});
