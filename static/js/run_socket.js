/**
 * Keeps the store in step with the server: loads the run's series, then follows its events from there, and comes back
 * to what is missing whenever the connection is cut, also where nobody says so.
 */

const FIRST_DELAY = 500;
const LONGEST_DELAY = 5000;
/** The server sends something every ten seconds; without anything for so long the connection is dead. */
const LONGEST_SILENCE = 25_000;
const CHECK_EVERY = 5000;
const CLOSED_NORMALLY = 1000;
const RUN_DELETED = 4404;

export class RunSocket {
  #store;
  #run;
  #live;
  #socket = null;
  #failures = 0;
  #heardAt = 0;
  #retry = null;
  #isOver = false;
  /** Messages that came while a series is being loaded; they go on from it. */
  #held = null;

  constructor(store, runId) {
    this.#store = store;
    const id = encodeURIComponent(runId);
    this.#run = `/api/runs/${id}`;
    this.#live = new URL(`/runs/${id}/live`, location.href);
    this.#live.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    store.addEventListener("gap", () => this.#comeBack());
    store.addEventListener("crowded", () => this.#thin());
    setInterval(() => this.#check(), CHECK_EVERY);
    // A computer that wakes up has had no timers; what it can tell is checked at once.
    document.addEventListener("visibilitychange", () => this.#wake());
    addEventListener("online", () => this.#wake());
    this.#connect();
  }

  async #connect() {
    this.#retry = null;
    try {
      if (this.#store.lastSeq === 0) await this.#load();
      else if (this.#failures) await this.#ask(this.#run); // a refused socket doesn't say why
    } catch {
      return this.#comeBack();
    }
    if (this.#isOver) return;
    this.#live.searchParams.set("after", this.#store.lastSeq);
    const socket = new WebSocket(this.#live);
    this.#socket = socket;
    this.#heardAt = Date.now();
    socket.addEventListener("message", (message) => socket === this.#socket && this.#onMessage(JSON.parse(message.data)));
    socket.addEventListener("close", (close) => socket === this.#socket && this.#onClose(close.code));
  }

  async #load() {
    // The page's head asks for the same address, so that it is on its way already.
    const answer = await this.#ask(`${this.#run}/series`);
    if (answer.ok) this.#store.load(await answer.json());
  }

  /** Fetch from the server; where the run is gone or this browser signed out, this page is over. */
  async #ask(address) {
    const answer = await fetch(address, { signal: AbortSignal.timeout(LONGEST_SILENCE) });
    if (answer.status === 404) this.#end("deleted");
    else if (answer.status === 401) location.reload();
    else if (!answer.ok) throw new Error(answer.statusText);
    return answer;
  }

  /** Replace columns that have grown long by a thinned series, so that the page's memory stays as it is. */
  async #thin() {
    if (this.#held) return;
    const held = (this.#held = []);
    try {
      await this.#load();
    } catch {
      this.#comeBack();
    }
    this.#held = null;
    for (const message of held) this.#store.receive(message);
  }

  #onMessage(message) {
    this.#heardAt = Date.now();
    this.#failures = 0;
    if (this.#store.connection !== "connected") this.#store.setConnection("connected");
    if (this.#held) this.#held.push(message);
    else this.#store.receive(message);
  }

  #onClose(code) {
    if (code === RUN_DELETED) this.#end("deleted");
    else if (code === CLOSED_NORMALLY && this.#store.isFinal) this.#end("ended");
    else this.#comeBack();
  }

  #end(connection) {
    this.#isOver = true;
    this.#leave();
    this.#store.setConnection(connection);
  }

  /** Let go of the socket without waiting for its close: on a dead connection that takes minutes. */
  #leave() {
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #comeBack() {
    if (this.#isOver) return;
    this.#leave();
    this.#store.setConnection("reconnecting");
    const delay = Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** this.#failures);
    this.#failures += 1;
    clearTimeout(this.#retry);
    // Spread out, so that many open pages don't all come back to a restarted server at once.
    this.#retry = setTimeout(() => this.#connect(), delay * (0.75 + Math.random() / 4));
  }

  #check() {
    if (this.#socket && Date.now() - this.#heardAt > LONGEST_SILENCE) this.#comeBack();
  }

  #wake() {
    if (this.#retry) {
      clearTimeout(this.#retry);
      this.#connect();
    } else this.#check();
  }
}
