// The server's plain HTTP routes, and its addresses.
//
// Knows: paths, the key's header. Does not know: sockets, answers.
// Invariant: the key goes out in a header, never in an address.

import { ChatrtError, refusal } from './answer.js';

/** Both addresses of the server at `url`; without one, of the page's own. */
export function addresses(url) {
  const base = new URL(url ?? globalThis.location.href);
  const tls = base.protocol === 'https:' || base.protocol === 'wss:';
  if (!tls && base.protocol !== 'http:' && base.protocol !== 'ws:') {
    throw new ChatrtError(`${url} is not an address like ws://127.0.0.1:8642`, {
      code: 'invalid_value',
    });
  }
  const api = base.pathname.replace(/(\/responses)?\/*$/, '').replace(/\/v1$/, '') + '/v1';
  return {
    http: `${tls ? 'https' : 'http'}://${base.host}${api}`,
    socket: `${tls ? 'wss' : 'ws'}://${base.host}${api}/responses`,
  };
}

/** Calls the routes; each rejects with a `ChatrtError`. */
export class HttpRoutes {
  #base;
  #apiKey;
  #fetch;

  constructor(base, { apiKey, fetch } = {}) {
    this.#base = base;
    this.#apiKey = apiKey;
    this.#fetch = fetch ?? globalThis.fetch.bind(globalThis);
  }

  /** The JSON that answers `method` at `path`, behind `/v1`; `signal` ends the wait. */
  async call(method, path, signal) {
    const headers = this.#apiKey ? { Authorization: `Bearer ${this.#apiKey}` } : {};
    let reply;
    try {
      reply = await this.#fetch(this.#base + path, {
        method,
        headers,
        credentials: 'omit',
        cache: 'no-store',
        signal,
      });
    } catch {
      throw new ChatrtError(`no server answers at ${this.#base}`, { code: 'server_unavailable' });
    }
    const body = await reply.json().catch(() => ({}));
    if (!reply.ok) throw refusal(body.error, reply.status);
    return body;
  }
}
