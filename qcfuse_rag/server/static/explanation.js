/** Show how the prompt of an answer was computed, token by token, as `qcfuse explain` does. */

import { count, element, seconds } from "./elements.js";

/** The parts of a prompt by how they were computed, with their numbers of tokens in a report. */
const PARTS = [
  ["prefix", "from earlier requests", (report) => report.prefix_tokens],
  ["stored", "from the store", (report) => report.reused_tokens - report.prefix_tokens],
  ["recomputed", "recomputed", (report) => report.selected.length],
  ["computed", "computed", (report) => report.rows - report.selected.length],
];

/** Fill a bar with the parts of a prompt, and a line with their numbers. */
export function showReport(bar, counts, report) {
  const parts = PARTS.map(([outcome, words, tokens]) => ({ outcome, words, tokens: Math.max(0, tokens(report)) }));
  const listed = parts.filter((part) => part.tokens > 0);
  bar.replaceChildren(
    ...listed.map((part) => {
      const segment = element("span", { class: part.outcome });
      segment.style.flexGrow = part.tokens;
      return segment;
    }),
  );
  const words = listed.map((part) => `${count(part.tokens)} ${part.words}`).join(", ");
  const sentence = `${count(report.prompt_tokens, "token")}: ${words}`;
  bar.setAttribute("aria-label", `The prompt of ${sentence}`);
  bar.hidden = false;
  counts.replaceChildren(`${count(report.prompt_tokens, "token")}: `);
  listed.forEach((part, index) => {
    const swatch = element("span", { class: `swatch ${part.outcome}`, "aria-hidden": "true" });
    counts.append(...(index ? [", "] : []), element("span", {}, swatch, ` ${count(part.tokens)} ${part.words}`));
  });
  counts.append(`; ${report.reuse}.`);
}

/** Fill a `details` element with an explanation once it is opened. */
export function showExplanation(details, explanation) {
  details.hidden = false;
  details.addEventListener("toggle", () => details.append(...parts(explanation)), { once: true });
}

function parts(explanation) {
  const stages = explanation.stages.map((stage) => `${stage.name} ${seconds(stage.seconds)} (${stage.meaning})`);
  const shown = [
    legend(explanation),
    element("p", { class: "muted" }, `Time to the first token: ${stages.join("; ")}.`),
  ];
  if (explanation.fallback) shown.push(element("p", {}, element("strong", {}, "Note: "), explanation.fallback));
  return [...shown, ...explanation.sections.map((section) => sectionOf(section, explanation.score))];
}

function legend(explanation) {
  const entries = [
    ["reused", "Reused", "taken as it was stored, or from an earlier request."],
    ["recomputed", "Recomputed", `stored, but computed again, because ${explanation.reason}.`],
    ["computed", "Computed", "new, or not stored."],
  ];
  return element(
    "ul",
    { class: "plain legend" },
    ...entries.map(([outcome, name, meaning]) => element("li", {}, element("span", { class: outcome }, name), `: ${meaning}`)),
  );
}

function sectionOf(section, score) {
  const shown = element("details", { class: `part ${section.missing ? "missing" : `from-${section.role}`}` });
  shown.open = section.role === "chunk";
  const status = element("p", { class: "muted" }, `${count(section.tokens, "token")}. ${section.status}`);
  shown.append(element("summary", {}, section.heading), status);
  if (section.probed !== null) {
    const percent = `${Math.round(100 * section.probed)} %`;
    const meter = element("meter", { min: 0, max: 1, value: section.probed, "aria-hidden": "true" });
    shown.append(element("p", { class: "muted" }, `${score}, share of this passage: `, meter, ` ${percent}`));
  }
  const text = element("div", { class: "text", tabindex: "0", role: "group", "aria-label": section.heading });
  text.append(...section.pieces.map(([outcome, words]) => piece(outcome, words)));
  shown.append(text);
  if (section.stretches.length) shown.append(...spansOf(section, score));
  return shown;
}

function piece(outcome, words) {
  return element(outcome === "recomputed" ? "mark" : "span", { class: outcome }, words);
}

function spansOf(section, score) {
  const order = score === null ? "in their order" : "those with the highest score first";
  const items = section.stretches.map((span) =>
    element("li", {}, element("q", {}, span.text), " ", element("span", { class: "muted" }, span.why)),
  );
  const shown = [element("p", { class: "muted" }, `The recomputed stretches, ${order}:`), element("ol", {}, ...items)];
  if (section.more_stretches) shown.push(element("p", { class: "muted" }, `and ${count(section.more_stretches)} more.`));
  return shown;
}
