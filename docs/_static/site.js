"use strict";
// Copy buttons of code blocks, and tables that are shown row by row where they do not fit.
(() => {
  const textOf = (block) => {
    const lines = block.innerText.replace(/\n$/, "").split("\n");
    if (!lines.some((line) => line.startsWith(">>> "))) {
      return lines.map((line) => line.replace(/^\$ /, "")).join("\n");
    }
    // Of a Python session only what was typed.
    return lines
      .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
      .map((line) => line.slice(4))
      .join("\n");
  };

  const addCopyButton = (frame) => {
    const block = frame.querySelector("pre");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(textOf(block));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    frame.append(button);
  };

  const labelCells = (table) => {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.innerText.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, number) => cell.setAttribute("data-name", names[number] || ""));
    }
  };

  const fitTables = () => {
    for (const table of document.querySelectorAll("table.docutils")) {
      table.classList.remove("stacked");
      if (table.scrollWidth > table.parentElement.clientWidth) table.classList.add("stacked");
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("div.highlight").forEach(addCopyButton);
    document.querySelectorAll("table.docutils").forEach(labelCells);
    fitTables();
    addEventListener("resize", fitTables);
  });
})();
