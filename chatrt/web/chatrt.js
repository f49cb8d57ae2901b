// A client for a chatrt server: answers as async iterators, over one socket that mends itself.
//
// Knows: the wire (docs/protocol.md), lanes, where to go on.
// Does not know: the page, Markdown, where a key is kept.
// Invariant: an answer's deltas are its text, in order, each once, over any number of connections.
// The key goes out in a header or a subprotocol, never in an address.
// Cost: an answer keeps its events, for any reader. No dependencies; browsers and Node 22.

import { Answer, ChatrtError, DELTA, FAULTS, TERMINAL, refusal } from './answer.js';
import { Connection } from './connection.js';
import { HttpRoutes, addresses } from './http.js';
import { Typist, isOfPartial, partialOf } from './typist.js';
import { Watches } from './watches.js';

export { ChatrtError };

const NUM_LANES = 16; // as many answers run at once on one connection; further ones wait
const LOADING_MS = 1000; // between two looks at a server that has just begun again

/** A connected client. Rejects where the server cannot be reached, or refuses the key. */
export async function connect(options = {}) {
  const client = new Client(options);
  await client.ready;
  return client;
}

/** One server. `ready` settles once the first connection stands, or cannot be had. */
export class Client {
  #http;
  #connection;
  #free = Array.from({ length: NUM_LANES }, (_, index) => `lane-${NUM_LANES - 1 - index}`);
  #lanes = new Map(); // lane → Answer | Typist
  #queue = []; // answers that wait for a lane or for a connection
  #asked = new Map(); // stream_id → the settlers of a request
  #watches = new Watches(this, (...message) => this.#ask(...message));
  #numAsked = 0;

  constructor(options = {}) {
    const urls = addresses(options.url);
    this.#http = new HttpRoutes(urls.http, options);
    this.#connection = new Connection(urls.socket, this.#http, options, {
      stands: () => this.#stands(),
      lost: () => this.#lost(),
      take: (event) => this.#route(event),
      ended: (error) => this.#ended(error),
      waits: () => this.#waits(),
    });
    this.ready = this.#connection.ready.then(() => this);
    this.ready.catch(() => {});
    this.#connection.open();
  }

  /** 'connecting', 'open', 'reconnecting' or 'closed'; `onState` hears of each change. */
  get state() {
    return this.#connection.state;
  }

  /** Begins a turn: the fields of `response.create`. `typed` is what was typed of it ahead. */
  stream(request, { typed = null } = {}) {
    const answer = new Answer(this, typeof request === 'string' ? { input: request } : request);
    if (this.state === 'closed') {
      answer.fail(FAULTS.closed());
      return answer;
    }
    answer.lane = typed?.hand() ?? null;
    if (answer.lane) this.#lanes.set(answer.lane, answer);
    this.#queue.push(answer);
    this.#pump();
    return answer;
  }

  /** A turn as a whole: resolves with the response object once it ended. */
  send(request, options) {
    return this.stream(request, options).finished;
  }

  /** Goes on with a response that runs, or ended a moment ago: all its events, or those behind. */
  resume(responseId, afterSequenceNumber = -1) {
    const answer = new Answer(this, null, responseId);
    answer.lastSequenceNumber = afterSequenceNumber;
    if (this.state === 'closed') {
      answer.fail(FAULTS.closed());
      return answer;
    }
    this.#queue.push(answer);
    this.#pump();
    return answer;
  }

  cancel(answer) {
    if (answer.ended) return;
    const waits = this.#queue.indexOf(answer);
    if (waits >= 0 && answer.id === null) {
      this.#queue.splice(waits, 1);
      this.#release(answer);
      answer.fail(FAULTS.unsent());
      return;
    }
    const named = answer.id ? { response_id: answer.id } : { stream_id: answer.lane };
    answer.cancelAsked = true; // said again where it has to be resumed first
    this.#write({ type: 'response.cancel', ...named });
  }

  typeAhead() {
    return new Typist({
      send: (typist, request) => this.#sendPartial(typist, request),
      leave: (typist) => this.#release(typist),
    });
  }

  /** Answers of a conversation that others began, or that run: `onAnswer(answer)` for each. */
  async watch(conversationId, onAnswer) {
    if (this.state === 'closed') throw FAULTS.closed();
    return this.#watches.add(conversationId, onAnswer);
  }

  async createConversation(title) {
    const named = title ? { title } : {};
    return (await this.#ask({ type: 'chatrt.conversation.create', ...named })).conversation;
  }

  async renameConversation(id, title) {
    const message = { type: 'chatrt.conversation.update', id, title };
    return (await this.#ask(message)).conversation;
  }

  async models() {
    return (await this.#http.call('GET', '/models')).data;
  }

  async conversations(query = '') {
    const suffix = query ? `?q=${encodeURIComponent(query)}` : '';
    return (await this.#http.call('GET', `/conversations${suffix}`)).data;
  }

  async items(id) {
    return (await this.#http.call('GET', `/conversations/${encodeURIComponent(id)}/items`)).data;
  }

  async turns(id) {
    return (await this.#http.call('GET', `/conversations/${encodeURIComponent(id)}/turns`)).data;
  }

  response(id) {
    return this.#http.call('GET', `/responses/${encodeURIComponent(id)}`);
  }

  deleteConversation(id) {
    return this.#http.call('DELETE', `/conversations/${encodeURIComponent(id)}`);
  }

  deleteResponse(id) {
    return this.#http.call('DELETE', `/responses/${encodeURIComponent(id)}`);
  }

  /** Tries to reconnect now instead of at the end of the pause, or asks whether it has to. */
  retryNow() {
    this.#connection.retryNow();
  }

  /** Ends the connection; what runs ends with `closed`, and on the server after its grace. */
  close() {
    this.#connection.end(FAULTS.closed());
  }

  // The connection ------------------------------------------------------------------------------

  #stands() {
    for (const answer of new Set(this.#lanes.values())) {
      if (answer instanceof Answer && answer.id !== null) this.#resume(answer);
    }
    this.#pump(); // first resumed, then subscribed: what is received already is not sent twice
    this.#watches.stands();
  }

  #lost() {
    const lost = FAULTS.connectionLost();
    for (const { reject } of this.#asked.values()) reject(lost);
    this.#asked.clear();
    for (const [lane, holder] of this.#lanes) {
      if (holder instanceof Typist) {
        this.#lanes.delete(lane);
        this.#free.push(holder.hand());
      } else if (holder.id === null && !this.#queue.includes(holder)) {
        this.#release(holder);
        holder.fail(lost); // the server drops what it could not tell us the name of
      }
    }
    // What was only watched goes on as a response of ours, behind what was seen of it.
    this.#queue.unshift(...this.#watches.lost());
  }

  #ended(error) {
    for (const { reject } of this.#asked.values()) reject(error);
    for (const holder of [...this.#lanes.values(), ...this.#queue]) {
      if (holder instanceof Answer) holder.fail(error);
      else holder.hand();
    }
    this.#watches.end(error);
    for (const kept of [this.#asked, this.#lanes]) kept.clear();
    this.#queue.length = 0;
  }

  /** Whether anything has to come: a silence then may be that of a connection that is none. */
  #waits() {
    const runs = [...this.#lanes.values()].some((holder) => holder instanceof Answer);
    return runs || this.#asked.size > 0 || this.#watches.isArriving;
  }

  // Answers -------------------------------------------------------------------------------------

  #pump() {
    while (this.#queue.length > 0 && this.#connection.isOpen) {
      const [answer] = this.#queue;
      answer.lane ??= this.#free.pop() ?? this.#laneOfTypist();
      if (answer.lane === null) return;
      this.#queue.shift();
      this.#lanes.set(answer.lane, answer);
      if (answer.id !== null) this.#resume(answer);
      else this.#create(answer);
    }
  }

  #create(answer) {
    try {
      this.#write({ ...answer.request, type: 'response.create', stream_id: answer.lane });
    } catch (error) {
      this.#release(answer); // it is no JSON
      answer.fail(error);
    }
  }

  #resume(answer) {
    const after = answer.lastSequenceNumber;
    this.#write({
      type: 'chatrt.resume',
      response_id: answer.id,
      stream_id: answer.lane,
      ...(after >= 0 && { after_sequence_number: after }),
    });
    if (answer.cancelAsked) this.#write({ type: 'response.cancel', response_id: answer.id });
  }

  /** Whoever only types gives way to a question. */
  #laneOfTypist() {
    const holders = [...this.#lanes.values()];
    return holders.find((holder) => holder instanceof Typist)?.hand() ?? null;
  }

  /** Sends a partial; false while there is no connection or no lane for it. */
  #sendPartial(typist, request) {
    if (!this.#connection.isOpen) return false;
    typist.lane ??= this.#free.pop() ?? null;
    if (typist.lane === null) return false;
    this.#lanes.set(typist.lane, typist);
    return this.#write(partialOf(request, typist.lane));
  }

  #release(holder) {
    if (holder.lane === null || this.#lanes.get(holder.lane) !== holder) return;
    this.#lanes.delete(holder.lane);
    this.#free.push(holder.lane);
    this.#pump();
  }

  #route(event) {
    const lane = event.stream_id;
    const asked = this.#asked.get(lane);
    if (asked && (event.type === 'error' || event.type.startsWith('chatrt.'))) {
      this.#asked.delete(lane);
      if (event.type === 'error') asked.reject(refusal(event.error, event.status));
      else asked.resolve(event);
      return;
    }
    if (this.#watches.take(event)) return;
    const holder = this.#lanes.get(lane);
    if (holder instanceof Typist || (holder && isOfPartial(event))) {
      // A question overtakes the partial before it: told apart by the mark, never by the order.
      if (holder instanceof Typist && TERMINAL.has(event.type)) holder.settle();
      return;
    }
    if (!holder) return; // its answer has ended: a cancel that came too late
    if (TERMINAL.has(event.type)) this.#release(holder);
    if (event.type === 'error') this.#refused(holder, event);
    else holder.take(event);
  }

  #refused(answer, event) {
    const error = refusal(event.error, event.status);
    if (answer.id !== null && error.status === 503) this.#resumeLater(answer);
    else if (answer.id !== null && error.code === 'response_not_found') {
      this.#recover(answer);
    } else answer.fail(error);
  }

  /** A server that has begun again knows its responses once its model is loaded. */
  #resumeLater(answer) {
    answer.lane = null;
    setTimeout(() => {
      if (this.state === 'closed') return answer.fail(FAULTS.closed());
      this.#queue.push(answer);
      this.#pump();
    }, LOADING_MS);
  }

  /** The events are no longer held: what the server stored of the answer is its end. */
  async #recover(answer) {
    const lost = FAULTS.answerLost();
    try {
      const response = await this.response(answer.id);
      const parts = response.output.flatMap((item) => item.content);
      const text = parts.map((part) => part.text).join('');
      if (response.status === 'in_progress' || !text.startsWith(answer.text)) throw lost;
      const delta = text.slice(answer.text.length);
      if (delta) answer.take({ type: DELTA, delta, response_id: answer.id });
      const end = { completed: 'completed', failed: 'failed' }[response.status] ?? 'incomplete';
      answer.take({ type: `response.${end}`, response });
    } catch {
      answer.fail(lost);
    }
  }

  #write(message) {
    return this.#connection.send(message);
  }

  #ask(message, lane = `ask-${this.#numAsked++}`) {
    return new Promise((resolve, reject) => {
      if (this.#write({ ...message, stream_id: lane })) this.#asked.set(lane, { resolve, reject });
      else reject(this.state === 'closed' ? FAULTS.closed() : FAULTS.connectionLost());
    });
  }
}
