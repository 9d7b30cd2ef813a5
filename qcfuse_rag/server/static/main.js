/** The page: wires its forms to documents and conversation, and asks for the token if the server wants one. */

import { forgetToken, hasToken, onTokenNeeded, send } from "./api.js";
import { Conversation } from "./conversation.js";
import { Documents } from "./documents.js";
import { byId } from "./elements.js";

const conversation = new Conversation();
const documents = new Documents();

onTokenNeeded(
  (error) =>
    new Promise((resolve) => {
      const dialog = byId("token-dialog");
      byId("token-error").textContent = error ?? "";
      byId("token-error").hidden = error === null;
      byId("token").value = "";
      dialog.returnValue = "cancelled";
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "typed" ? byId("token").value : null), {
        once: true,
      });
      dialog.showModal();
    }),
);

async function load() {
  try {
    const { data } = await (await send("GET", "v1/models")).json();
    byId("model").textContent = data[0].id;
  } catch (error) {
    byId("model").textContent = error.message;
    if (error.status === 401) return; // the user typed no token
  }
  byId("forget-token").hidden = !hasToken();
  await documents.load();
  byId("use-documents").disabled = !documents.available;
}

function setBusy(busy) {
  const [hidden, shown] = busy ? ["send", "stop"] : ["stop", "send"];
  const hadFocus = document.activeElement === byId(hidden);
  byId(hidden).hidden = true;
  byId(shown).hidden = false;
  if (hadFocus) byId(busy ? "stop" : "question").focus(); // else the keyboard's place on the page would be lost
}

async function ask() {
  const question = byId("question").value.trim();
  if (question === "" || conversation.running !== null) return;
  byId("question").value = "";
  setBusy(true);
  const fromDocuments = byId("use-documents").checked ? "library" : [];
  try {
    await conversation.ask(question, {
      documents: documents.available ? fromDocuments : null,
      compare: byId("compare").checked,
      maxTokens: byId("tokens").valueAsNumber,
    });
  } finally {
    setBusy(false);
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") conversation.stop();
});
byId("stop").addEventListener("click", () => {
  conversation.stop();
  byId("question").focus();
});
byId("clear").addEventListener("click", () => {
  conversation.clear();
  byId("question").focus();
});
byId("forget-token").addEventListener("click", () => {
  forgetToken();
  location.reload();
});

load();
