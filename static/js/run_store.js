/**
 * What the page knows of one run: its summary as the server last sent it, and its events as columns.
 *
 * Only `load`, `receive` and `setConnection` change it. After each message one DOM event is dispatched for each kind
 * that it held (an event type, or "run"), so a view does its work once a message, not once an event.
 */

/** Twice what a series has at most; with more the columns are "crowded" and want to be thinned again. */
const MOST_STEPS = 4000;
/** As webapp/thinning.py has it, whose average goes on here. */
const SMOOTHING = 0.95;
const FEED_LENGTH = 200;
const PACE_STEPS = 50;

/** What each type of event does to the store; the types are those of trainer_core/events.py. */
export const handlers = {
  phase(store, event) {
    store.phase = event;
    store.addToFeed(event);
  },
  started(store, event) {
    store.started = event;
    store.addToFeed(event);
  },
  step(store, event) {
    store.addStep(event);
    store.phase = null;
  },
  skipped(store, event) {
    store.skips.push(event.step);
    store.addToFeed(event);
  },
  epoch(store, event) {
    store.addToFeed(event);
  },
  validation(store, event) {
    if (event.loss !== null) store.validations.push({ step: event.step, loss: event.loss });
    store.addToFeed(event);
  },
  checkpoint(store, event) {
    store.savedSteps.push(event.step);
    store.addToFeed(event);
  },
  warning(store, event) {
    store.addToFeed(event);
  },
  finished(store, event) {
    store.phase = null;
    store.finished = event;
    store.addToFeed(event);
    if (store.run) store.run = { ...store.run, status: event.reason, active: false, message: event.message };
  },
};

export class RunStore extends EventTarget {
  run = null;
  /** "connecting", "connected", "reconnecting", "ended" or "deleted" */
  connection = "connecting";
  lastSeq = 0;

  started = null;
  phase = null;
  finished = null;
  firstTime = null;
  lastTime = null;

  columns = { step: [], epoch: [], loss: [], smoothed: [], learning_rate: [], grad_norm: [], seconds: [], time: [], memory_bytes: [] };
  /** Steps whose update was discarded, or whose loss was not finite. */
  skips = [];
  /** Losses of the held-out samples, oldest first. */
  validations = [];
  /** Steps at which a checkpoint was written. */
  savedSteps = [];
  /** The newest events worth a line, oldest first. */
  feed = [];

  #average = 0;
  #averageWeight = 0;

  /** Begin again with the run as it was after the event `seq`: all that `receive` would have made of it, thinned. */
  load(snapshot) {
    this.lastSeq = snapshot.seq;
    this.columns = snapshot.columns;
    [this.#average, this.#averageWeight] = snapshot.average;
    this.skips = snapshot.skips;
    this.validations = snapshot.validations;
    this.savedSteps = snapshot.saved_steps;
    this.started = snapshot.started;
    this.phase = snapshot.phase;
    this.finished = snapshot.finished;
    this.firstTime = snapshot.first_time;
    this.lastTime = snapshot.last_time;
    this.feed = snapshot.feed.filter((event) => Object.hasOwn(handlers, event.type));
    for (const kind of Object.keys(handlers)) this.dispatchEvent(new Event(kind));
  }

  /** Take in one message of the server. A gap in the numbers ends it with a "gap" event: the rest has to be asked for again. */
  receive({ run, snapshot, events = [] }) {
    const kinds = new Set();
    if (snapshot) this.load(snapshot);
    let hasGap = false;
    if (run) {
      this.run = run;
      kinds.add("run");
    }
    for (const event of events) {
      if (event.seq <= this.lastSeq) continue;
      hasGap = event.seq > this.lastSeq + 1;
      if (hasGap) break;
      this.lastSeq = event.seq;
      // That of a damaged line is not known.
      if (event.time) {
        this.firstTime ??= event.time;
        this.lastTime = event.time;
      }
      if (Object.hasOwn(handlers, event.type)) handlers[event.type](this, event);
      kinds.add(event.type);
    }
    if (hasGap) kinds.add("gap");
    if (this.columns.step.length > MOST_STEPS) kinds.add("crowded");
    for (const kind of kinds) this.dispatchEvent(new Event(kind));
  }

  setConnection(state) {
    this.connection = state;
    this.dispatchEvent(new Event("connection"));
  }

  addStep(event) {
    for (const name of Object.keys(this.columns)) if (name !== "smoothed") this.columns[name].push(event[name]);
    this.columns.smoothed.push(this.#smooth(event.loss));
    if (event.loss === null) this.skips.push(event.step);
  }

  addToFeed(event) {
    this.feed.push(event);
    if (this.feed.length > FEED_LENGTH) this.feed.shift();
  }

  /** An exponential moving average, divided by the weight gathered so far so that it doesn't start near zero. */
  #smooth(loss) {
    if (loss !== null) {
      this.#average = SMOOTHING * this.#average + (1 - SMOOTHING) * loss;
      this.#averageWeight = SMOOTHING * this.#averageWeight + (1 - SMOOTHING);
    }
    return this.#averageWeight ? this.#average / this.#averageWeight : null;
  }

  get isActive() {
    return this.run?.active ?? false;
  }

  get isFinal() {
    return this.run !== null && !this.run.active && this.run.status !== "queued";
  }

  get stepsDone() {
    return this.columns.step.at(-1) ?? (this.started ? this.started.first_step - 1 : (this.run?.step ?? 0));
  }

  get totalSteps() {
    return this.started?.total_steps ?? this.run?.total_steps ?? null;
  }

  /** Seconds a step, the mean of the latest ones: a single step may have waited for another program. */
  get pace() {
    const latest = this.columns.seconds.slice(-PACE_STEPS);
    return latest.length ? latest.reduce((sum, seconds) => sum + seconds, 0) / latest.length : null;
  }

  /** Seconds until the last step at that pace. */
  get timeLeft() {
    return this.pace === null || !this.totalSteps ? null : this.pace * (this.totalSteps - this.stepsDone);
  }
}
