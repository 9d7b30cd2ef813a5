/** A conversation: questions, their streamed answers with clocks, and what each turn reused. */

import { events, send } from "./api.js";
import { byId, element, fromTemplate, seconds } from "./elements.js";
import { showExplanation, showReport } from "./explanation.js";

const CLOCK_MS = 100;

/** One answer on the page: its text while it streams, and its clock. */
class Answer {
  constructor(title, turn) {
    this.root = fromTemplate("answer-template");
    this.turn = turn;
    this.text = "";
    this.firstToken = null;
    this.root.querySelector("h4").textContent = title;
    this.part("clock").textContent = "Waiting for the first answer to finish.";
    turn.querySelector(".answers").append(this.root);
  }

  part(name) {
    return this.root.querySelector(`:scope > .${name}`);
  }

  /** Ask and show the answer as it comes; return whether it came to its end. */
  async stream(body, signal) {
    const started = performance.now();
    const elapsed = () => (performance.now() - started) / 1000;
    const clock = this.part("clock");
    const tick = () => {
      clock.textContent = `No token yet after ${seconds(elapsed())}.`;
    };
    tick();
    const ticking = setInterval(tick, CLOCK_MS);
    try {
      for await (const event of events(await send("POST", "v1/chat/completions", body, signal))) {
        const delta = event.choices[0]?.delta ?? {};
        const [content, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
        if ((content || reasoning) && this.firstToken === null) {
          this.firstToken = elapsed();
          clearInterval(ticking);
          clock.textContent = `First token after ${seconds(this.firstToken)}.`;
        }
        if (reasoning) this.showReasoning(reasoning);
        this.text += content;
        this.part("text").append(content);
        if (event.choices[0]?.finish_reason === "length") this.part("text").append(" …");
        if (event.fusion) {
          this.report = event.fusion;
          showReport(this.part("bar"), this.part("counts"), event.fusion);
        }
        if (event.explanation) showExplanation(this.turn.querySelector(".explanation"), event.explanation);
      }
      this.firstToken ??= elapsed();
      clock.textContent = `First token after ${seconds(this.firstToken)}, whole answer after ${seconds(elapsed())}.`;
      return true;
    } catch (error) {
      clock.textContent = signal.aborted ? `Stopped after ${seconds(elapsed())}.` : "";
      if (!signal.aborted) this.fail(error);
      return false;
    } finally {
      clearInterval(ticking);
      this.part("text").setAttribute("aria-busy", "false");
    }
  }

  showReasoning(piece) {
    this.part("reasoning").hidden = false;
    this.part("reasoning").querySelector(".text").append(piece);
  }

  fail(error) {
    const shown = this.part("error");
    shown.textContent = error.message;
    shown.hidden = false;
  }

  skip() {
    this.part("clock").textContent = "Not asked.";
    this.part("text").setAttribute("aria-busy", "false");
  }

  /** Say how much later the first token came than that of another answer. */
  compareWith(other) {
    const times = (this.firstToken / other.firstToken).toFixed(1);
    this.part("clock").append(" ", element("strong", {}, `That took ${times} times as long.`));
  }
}

/** The conversation of this page; the server keeps none. */
export class Conversation {
  constructor() {
    this.messages = [];
    this.running = null;
  }

  /** Ask a question, first over stored caches and then, to compare, by full prefill. */
  async ask(question, { documents, compare, maxTokens }) {
    this.running = new AbortController();
    const { signal } = this.running;
    const turn = fromTemplate("turn-template");
    turn.querySelector(".question").textContent = question;
    byId("hint").hidden = true;
    byId("turns").append(turn);
    const fused = new Answer("Over stored caches", turn);
    const full = compare ? new Answer("Full prefill", turn) : null;
    turn.scrollIntoView({ block: "start" });
    const earlier = this.messages;
    const messages = [...earlier, { role: "user", content: question }];
    const body = { messages, max_tokens: maxTokens, stream: true, stream_options: { include_usage: true } };
    if (documents !== null) body.documents = documents;
    try {
      const complete = await fused.stream({ ...body, explain: true }, signal);
      if (fused.text && this.messages === earlier) this.messages = [...messages, { role: "assistant", content: fused.text }];
      if (full !== null && !complete) full.skip();
      else if (full !== null && (await full.stream({ ...body, method: "full" }, signal))) full.compareWith(fused);
    } finally {
      this.running = null;
    }
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    for (const turn of byId("turns").querySelectorAll(".turn")) turn.remove();
    byId("hint").hidden = false;
  }
}
