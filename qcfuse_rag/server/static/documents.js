/** The documents of the library: list them, warm dropped or pasted texts with progress, remove them. */

import { events, send } from "./api.js";
import { byId, count, fromTemplate } from "./elements.js";

const READ_ONLY = "Start the server with --editable to add and remove documents here.";

/** The documents' part of the page. */
export class Documents {
  constructor() {
    this.available = false;
    this.editable = false;
    this.adding = Promise.resolve();
    byId("files").addEventListener("change", (event) => {
      this.addFiles(event.target.files);
      event.target.value = "";
    });
    byId("paste").addEventListener("submit", (event) => {
      event.preventDefault();
      const [name, text] = [byId("paste-name").value, byId("paste-text").value];
      event.target.reset();
      this.add(name, async () => text);
    });
    this.listenForDrops(byId("documents"));
  }

  /** List the documents, and say plainly if there are none or they cannot be changed. */
  async load() {
    let notes = [];
    let documents = [];
    try {
      const listed = await (await send("GET", "v1/documents")).json();
      documents = listed.data;
      [this.available, this.editable] = [true, listed.editable];
      const passages = documents.reduce((sum, document) => sum + document.passages, 0);
      notes = [`${count(documents.length, "document")}, ${count(passages, "passage")}.`];
      if (!this.editable) notes.push(READ_ONLY);
    } catch (error) {
      [this.available, this.editable] = [false, false];
      notes = [`${error.message}.`];
    }
    byId("documents-note").textContent = notes.join(" ");
    byId("editing").hidden = !this.editable;
    byId("document-list").replaceChildren(...documents.map((document) => this.itemOf(document)));
  }

  itemOf({ source, name, passages }) {
    const item = fromTemplate("document-template");
    item.querySelector(".name").textContent = name;
    item.querySelector(".passages").textContent = count(passages, "passage");
    const button = item.querySelector("button");
    button.hidden = !this.editable;
    button.setAttribute("aria-label", `Remove ${name}`);
    button.addEventListener("click", () => this.remove(source, name, button));
    return item;
  }

  async remove(source, name, button) {
    if (!confirm(`Remove ${name} and its caches from the library?`)) return;
    button.disabled = true;
    try {
      await send("DELETE", `v1/documents/${encodeURIComponent(source)}`);
      announce(`${name} was removed.`);
    } catch (error) {
      announce(`${name} was not removed: ${error.message}.`);
    }
    await this.load();
    byId("documents-heading").focus();
  }

  addFiles(files) {
    for (const file of files) this.add(file.name, () => textOf(file));
  }

  /** Add a document after those that are being added; show its progress and outcome. */
  add(name, read) {
    const job = fromTemplate("job-template");
    const [progress, state] = [job.querySelector("progress"), job.querySelector(".state")];
    job.querySelector(".name").textContent = name;
    progress.setAttribute("aria-label", `Warming ${name}`);
    state.textContent = "waits";
    byId("jobs").append(job);
    this.adding = this.adding.then(async () => {
      try {
        const summary = await warm(name, await read(), (done, total) => {
          [progress.max, progress.value] = [total, done];
          state.textContent = `${count(done)} of ${count(total)} tokens`;
        });
        const unstored = summary.left_out + summary.failed.length;
        const rest = unstored ? `, but ${count(unstored, "cache")} could not be stored` : "";
        announce(`${name} was warmed: ${count(summary.passages, "passage")}${rest}.`);
        job.remove();
      } catch (error) {
        progress.remove();
        state.classList.add("error");
        state.setAttribute("role", "alert");
        state.textContent = error.message;
      }
      await this.load();
    });
    return this.adding;
  }

  listenForDrops(target) {
    const mark = (event, over) => {
      if (!this.editable) return;
      event.preventDefault();
      byId("drop").classList.toggle("over", over);
    };
    target.addEventListener("dragover", (event) => mark(event, true));
    target.addEventListener("dragleave", (event) => mark(event, false));
    target.addEventListener("drop", (event) => {
      mark(event, false);
      if (this.editable) this.addFiles(event.dataTransfer.files);
    });
  }
}

async function warm(source, text, onProgress) {
  const response = await send("POST", "v1/documents", { documents: [{ source, text }], stream: true });
  let summary = null;
  for await (const event of events(response)) {
    if ("total" in event) onProgress(event.done, event.total);
    else summary = event;
  }
  return summary;
}

async function textOf(file) {
  const text = new TextDecoder("utf-8", { fatal: true });
  let decoded;
  try {
    decoded = text.decode(await file.arrayBuffer());
  } catch {
    throw new Error("not a text file in UTF-8");
  }
  if (decoded.includes("\0")) throw new Error("not a text file in UTF-8");
  return decoded;
}

function announce(text) {
  byId("documents-status").textContent = text;
}
