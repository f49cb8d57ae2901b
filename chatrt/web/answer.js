// One answer as it arrives, and what a server refuses.
//
// Knows: which events are text, which one is the last. Does not know: sockets, lanes.
// Invariant: an event is taken once, by its number; the iterator ends behind the terminal event.
// Cost: an answer keeps its events as long as it is kept itself.

/** Events behind which nothing follows. */
export const TERMINAL = new Set([
  'response.completed',
  'response.incomplete',
  'response.failed',
  'error',
]);
export const DELTA = 'response.output_text.delta';

/** What a server refused, or that it cannot be reached; `code` is for programs. */
export class ChatrtError extends Error {
  constructor(message, { code = 'error', status = 0, param = null } = {}) {
    super(message);
    this.name = 'ChatrtError';
    Object.assign(this, { code, status, param });
  }
}

const fault = (code, message) => () => new ChatrtError(message, { code });

/** What ends an answer, or a request, without a word of the server about it. */
export const FAULTS = {
  answerLost: fault('response_lost', 'the server has lost the rest of this answer'),
  closed: fault('closed', 'the client is closed'),
  connectionLost: fault('connection_lost', 'the connection was lost'),
  noWebSocket: fault(
    'no_websocket',
    'this JavaScript has no WebSocket: Node 22 has one, Node 20 with --experimental-websocket; ' +
      'or name one in the option WebSocket',
  ),
  unsent: fault('cancelled', 'stopped before it was sent'),
};

/** The error in a refusal of the wire or of HTTP. */
export const refusal = (body, status) =>
  new ChatrtError(body?.message ?? `the server refused with HTTP status ${status}`, {
    code: body?.code ?? 'error',
    status,
    param: body?.param ?? null,
  });

/** Calls a listener. What it throws is told as an uncaught error, and keeps nothing here undone. */
export function callBack(listener, ...given) {
  try {
    listener?.(...given);
  } catch (error) {
    queueMicrotask(() => {
      throw error;
    });
  }
}

/** One answer: an async iterable of its events; each reader gets all, the terminal one last. */
export class Answer {
  #client;
  #events = [];
  #waiting = []; // readers that have read all
  #settle;

  constructor(client, request, id = null) {
    this.#client = client;
    this.request = request;
    this.id = id;
    this.lane = null;
    this.cancelAsked = false;
    this.text = '';
    this.begun = null; // the response object as it began
    this.response = null; // and as it ended
    this.error = null;
    this.lastSequenceNumber = -1;
    this.sentMs = performance.now();
    this.firstMs = null;
    this.finished = new Promise((resolve, reject) => (this.#settle = { resolve, reject }));
    this.finished.catch(() => {}); // who only iterates hears of it there
  }

  /** From `stream` to the first piece of text, as seen here; null before it. */
  get ttftMs() {
    return this.firstMs === null ? null : this.firstMs - this.sentMs;
  }

  get ended() {
    return this.response !== null || this.error !== null;
  }

  /** Asks the server to stop; what is left and the terminal event still come. */
  cancel() {
    this.#client.cancel(this);
  }

  async *[Symbol.asyncIterator]() {
    for (let next = 0; ; ) {
      while (next < this.#events.length) yield this.#events[next++];
      if (this.error) throw this.error;
      if (this.response) return;
      await new Promise((resolve) => this.#waiting.push(resolve));
    }
  }

  /** Takes the next event of the wire; one that was taken before is passed over. */
  take(event) {
    if (this.ended || event.sequence_number <= this.lastSequenceNumber) return;
    this.lastSequenceNumber = event.sequence_number ?? this.lastSequenceNumber;
    this.id ??= event.response?.id ?? null;
    this.begun ??= event.response ?? null;
    if (event.type === DELTA) {
      this.firstMs ??= performance.now();
      this.text += event.delta;
    }
    this.#events.push(event);
    if (TERMINAL.has(event.type)) {
      this.response = event.response;
      this.#settle.resolve(event.response);
    }
    this.#wake();
  }

  fail(error) {
    if (this.ended) return;
    this.error = error;
    this.#settle.reject(error);
    this.#wake();
  }

  #wake() {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const wake of waiting) wake();
  }
}
