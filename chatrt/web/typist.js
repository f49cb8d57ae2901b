// Typing ahead: the half-typed prompt is read by the server before it is sent.
//
// Knows: when a half-typed text is worth sending, which one was sent last.
// Does not know: sockets, what is shown.
// Invariant: at most one partial is outstanding; none follows the question that it became.
// Cost: one request for each pause, with the whole text in it.

// A pause this long is one between words; who types on without one is waited for no longer than
// the second figure. A longer text fills any context.
const PAUSE_MS = 120;
const LONGEST_WAIT_MS = 500;
const SETTLED_WITHIN_MS = 5000;
const MOST_TYPED_CHARS = 2 ** 18;
const MARK = 'typed_ahead';

/** Whether an event is a partial's: by the mark that its response repeats, or as its error. */
export const isOfPartial = (event) =>
  event.response?.metadata?.[MARK] !== undefined || event.chatrt?.partial === true;

/** A request as a partial, to be sent on `lane`. */
export const partialOf = (request, lane) => ({
  ...request,
  type: 'response.create',
  stream_id: lane,
  generate: false,
  metadata: { ...request.metadata, [MARK]: 'true' },
  chatrt: { ...request.chatrt, partial: true },
});

/** Sends what a person types once they pause: the newest text only, one request at a time. */
export class Typist {
  #client;
  #waiting = null;
  #sent = '';
  #timer = 0;
  #sinceMs = 0;
  #settled = null;
  #leaves = false; // as soon as the server is done with what was sent

  /** `client` has `send(typist, request)`, whether a partial went out, and `leave(typist)`. */
  constructor(client) {
    this.#client = client;
    this.lane = null;
  }

  /** The request as it stands so far; nothing of it is stored or answered. */
  type(request) {
    const key = JSON.stringify(request);
    this.#leaves = false;
    this.#stopTimer();
    if (key === this.#sent || key.length > MOST_TYPED_CHARS) {
      this.#waiting = null;
      return;
    }
    const nowMs = performance.now();
    if (!this.#waiting) this.#sinceMs = nowMs;
    this.#waiting = { request, key };
    const atMs = Math.min(nowMs + PAUSE_MS, this.#sinceMs + LONGEST_WAIT_MS);
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.#due();
    }, atMs - nowMs);
  }

  /** Forgets what was not sent yet, and leaves the lane to others. */
  drop() {
    this.#forget();
    if (this.#settled) this.#leaves = true;
    else this.#leave();
  }

  /** For the client: the lane that the question goes out on, which is the answer's from now on. */
  hand() {
    this.#forget();
    this.#sent = '';
    this.#leaves = false;
    this.settle();
    const { lane } = this;
    this.lane = null;
    return lane;
  }

  /** For the client: the server is done with the newest partial, or the connection is gone. */
  settle() {
    const settled = this.#settled;
    this.#settled = null;
    if (settled) settled();
    if (this.#leaves) this.#leave();
  }

  #forget() {
    this.#stopTimer();
    this.#waiting = null;
  }

  #leave() {
    this.#leaves = false;
    this.#sent = '';
    this.#client.leave(this);
    this.lane = null;
  }

  #stopTimer() {
    clearTimeout(this.#timer);
    this.#timer = 0;
  }

  async #due() {
    // While the timer runs, newer text is on its way.
    while (this.#waiting && !this.#settled && this.#timer === 0) {
      const { request, key } = this.#waiting;
      if (!this.#client.send(this, request)) return this.drop();
      this.#waiting = null;
      this.#sent = key;
      const patience = new Promise((resolve) => (this.#settled = resolve));
      const timer = setTimeout(() => this.settle(), SETTLED_WITHIN_MS);
      await patience;
      clearTimeout(timer);
    }
  }
}
