// One socket to the server, which mends itself.
//
// Knows: when to reconnect, why no socket opened, that an open one may carry nothing any more.
// Does not know: answers, lanes, what is said.
// Invariant: at most one socket at a time; of one that was left, nothing is heard any more.
// The key goes out in a subprotocol, never in an address.
// Cost: one small message for each `quietMs` of silence while something is waited for.

import { ChatrtError, FAULTS, callBack } from './answer.js';

const PATIENCE = { openMs: 15_000, quietMs: 15_000, replyMs: 10_000 };
const FIRST_RETRY_MS = 200;
const LONGEST_RETRY_MS = 8000;
const FATAL = new Set([401, 403]); // a refusal that trying again does not change
const OPEN = 1;
// Any server answers it at once, if only that it does not know it, and nothing changes by it.
const PROBE = { type: 'chatrt.conversation.unsubscribe', id: 'none', stream_id: 'probe' };

export class Connection {
  #url;
  #http;
  #options;
  #patience;
  #client;
  #socket = null;
  #state = 'connecting';
  #attempt = 0;
  #numLost = 0;
  #heardMs = 0;
  #retry = 0;
  #timers = { opening: 0, silence: 0, probe: 0 }; // of the socket that there is
  #settle;

  /** `client` has `stands()`, `lost()`, `take(event)`, `ended(error)`; `waits()`: for any event. */
  constructor(url, http, options, client) {
    this.#url = url;
    this.#http = http;
    this.#options = options;
    this.#patience = { ...PATIENCE, ...options.patience };
    this.#client = client;
    this.ready = new Promise((resolve, reject) => (this.#settle = { resolve, reject }));
    this.ready.catch(() => {});
  }

  get state() {
    return this.#state;
  }

  get isOpen() {
    return this.#socket?.readyState === OPEN;
  }

  /** Opens a socket; what comes of it is told to the client. */
  open() {
    clearTimeout(this.#retry);
    const { apiKey, WebSocket: Socket = globalThis.WebSocket } = this.#options;
    if (!Socket) return this.end(FAULTS.noWebSocket());
    const offered = ['realtime', ...(apiKey ? [`openai-insecure-api-key.${apiKey}`] : [])];
    let socket;
    try {
      socket = new Socket(this.#url, offered);
    } catch {
      this.end(new ChatrtError('this cannot be an API key', { code: 'invalid_api_key' }));
      return;
    }
    this.#socket = socket;
    const ifOurs = (hear) => (event) => this.#socket === socket && hear(event);
    socket.onopen = ifOurs(() => this.#stands());
    socket.onmessage = ifOurs(({ data }) => {
      this.#heardMs = performance.now();
      this.#listen();
      this.#client.take(JSON.parse(data));
    });
    socket.onclose = ifOurs(() => this.#lost());
    // A close follows, but not in every Node where the socket never opened.
    socket.onerror = ifOurs(() => socket.readyState !== OPEN && this.#lost());
    this.#timers.opening = setTimeout(() => this.#lost(), this.#patience.openMs);
  }

  /** Whether a message could be handed to an open socket. */
  send(message) {
    if (!this.isOpen) return false;
    this.#socket.send(JSON.stringify(message));
    this.#listen();
    return true;
  }

  /** Tries now instead of at the end of the pause; asks a connection whether it still is one. */
  retryNow() {
    if (this.#state === 'open') this.#probe();
    if (this.#state === 'reconnecting' && !this.#socket) this.open();
  }

  /** Ends it for good. */
  end(error) {
    clearTimeout(this.#retry);
    this.#leave();
    this.#settle.reject(error);
    this.#client.ended(error);
    this.#setState('closed', { error });
  }

  #stands() {
    clearTimeout(this.#timers.opening);
    this.#attempt = 0;
    this.#setState('open');
    this.#settle.resolve();
    this.#client.stands();
  }

  /** Turns away from the socket without waiting for its end, which may never be told. */
  #leave() {
    for (const timer of Object.values(this.#timers)) clearTimeout(timer);
    this.#timers = { opening: 0, silence: 0, probe: 0 };
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  async #lost() {
    this.#leave();
    const wasOpen = this.#state === 'open';
    const numLost = ++this.#numLost;
    this.#client.lost();
    if (!wasOpen) {
      const error = await this.#why();
      // While one asked, the client may have been closed, or told to try again.
      if (this.#state === 'closed' || this.#socket || numLost !== this.#numLost) return;
      if (FATAL.has(error.status) || this.#state === 'connecting') return this.end(error);
    }
    const delayMs = Math.min(FIRST_RETRY_MS * 2 ** this.#attempt++, LONGEST_RETRY_MS);
    const retryMs = delayMs * (0.5 + Math.random() / 2); // not all clients in the same moment
    this.#retry = setTimeout(() => this.open(), retryMs);
    this.#setState('reconnecting', { retryMs });
  }

  /** Why no socket opened, which browsers do not tell: what the server says to a plain request. */
  async #why() {
    try {
      await this.#http.call('GET', '/models', AbortSignal.timeout(this.#patience.openMs));
    } catch (error) {
      return error;
    }
    return new ChatrtError('the server takes no WebSocket here', { code: 'server_unavailable' });
  }

  #setState(state, details = {}) {
    if (state === this.#state && state !== 'reconnecting') return;
    this.#state = state;
    callBack(this.#options.onState, state, details);
  }

  // Silence: a connection whose other end, or the way to it, has gone stays open for ever.

  #listen(ms = this.#patience.quietMs) {
    this.#timers.silence ||= setTimeout(() => {
      this.#timers.silence = 0;
      if (!this.#client.waits()) return;
      const leftMs = this.#heardMs + this.#patience.quietMs - performance.now();
      if (leftMs > 0) this.#listen(leftMs);
      else this.#probe();
    }, ms);
  }

  #probe() {
    if (this.#timers.probe || !this.isOpen) return;
    const askedMs = performance.now();
    this.send(PROBE);
    const { bufferedAmount: before } = this.#socket;
    this.#timers.probe = setTimeout(() => {
      this.#timers.probe = 0;
      const { bufferedAmount: left } = this.#socket;
      if (this.#heardMs >= askedMs) this.#listen();
      else if (left > 0 && left < before) this.#probe(); // behind a long upload, which goes on
      else this.#lost();
    }, this.#patience.replyMs);
  }
}
