/** Keeps the store in step with the server: connects, asks for what is missing, and connects again when cut off. */

const FIRST_DELAY = 500;
const LONGEST_DELAY = 5000;
const CLOSED_NORMALLY = 1000;
const RUN_DELETED = 4404;
const ASK_AGAIN = 4000;

export class RunSocket {
  #store;
  #address;
  #socket;
  #failures = 0;

  constructor(store, runId) {
    this.#store = store;
    this.#address = new URL(`/runs/${encodeURIComponent(runId)}/live`, location.href);
    this.#address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    store.addEventListener("gap", () => this.#socket.close(ASK_AGAIN));
    this.#connect();
  }

  #connect() {
    this.#address.searchParams.set("after", this.#store.lastSeq);
    this.#socket = new WebSocket(this.#address);
    this.#socket.addEventListener("message", (message) => this.#onMessage(JSON.parse(message.data)));
    this.#socket.addEventListener("close", (close) => this.#onClose(close.code));
  }

  #onMessage(message) {
    this.#failures = 0;
    if (this.#store.connection !== "connected") this.#store.setConnection("connected");
    this.#store.receive(message);
  }

  #onClose(code) {
    if (code === RUN_DELETED) return this.#store.setConnection("deleted");
    if (code === CLOSED_NORMALLY && this.#store.isFinal) return this.#store.setConnection("ended");
    this.#store.setConnection("reconnecting");
    const delay = Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** this.#failures);
    this.#failures += 1;
    // Spread out, so that many open pages don't all come back to a restarted server at once.
    setTimeout(() => this.#connect(), delay * (0.75 + Math.random() / 4));
  }
}
