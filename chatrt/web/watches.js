// Conversations that are watched: what others ask there, and how it is answered.
//
// Knows: one subscription serves all who listen to a conversation, over any number of connections.
// Does not know: sockets, lanes of one's own answers.
// Invariant: an answer that was told to a listener reaches its end, whatever becomes of the watch
// or of the connection; only a refusal by the server, or the last listener's leaving, ends a watch.
// Cost: a conversation that nobody listens to any more is unsubscribed once its answers have ended.

import { Answer, FAULTS, TERMINAL, callBack } from './answer.js';

const LOADING_MS = 1000; // between two looks at a server that has just begun again

export class Watches {
  #client;
  #ask;
  #byId = new Map(); // conversation → watch
  #byLane = new Map();
  #numLanes = 0;

  /** `ask(message, lane)` promises the server's reply; `client` is whose the answers are. */
  constructor(client, ask) {
    this.#client = client;
    this.#ask = ask;
  }

  /** Whether an answer is being received. */
  get isArriving() {
    return [...this.#byId.values()].some(({ arriving }) => arriving.size > 0);
  }

  /** Calls `onAnswer` with each answer, those that run included; promises what ends that. */
  async add(id, onAnswer) {
    const watch = this.#byId.get(id) ?? this.#begin(id);
    const listener = { onAnswer };
    watch.listeners.add(listener);
    for (const answer of watch.answers.values()) callBack(onAnswer, answer);
    if (!watch.isAsked) this.#subscribe(watch);
    await watch.granted;
    return () => {
      if (watch.listeners.delete(listener)) this.#leave(watch);
    };
  }

  /** Takes an event that belongs to a watch; whether it does. */
  take(event) {
    const watch = this.#byLane.get(event.stream_id);
    if (!watch) return false;
    const id = event.response?.id ?? event.response_id;
    if (event.type === 'response.created' && !watch.answers.has(id)) this.#began(watch, id);
    if (watch.arriving.has(id)) watch.answers.get(id).take(event);
    if (TERMINAL.has(event.type)) watch.arriving.delete(id);
    return true;
  }

  /** There is a connection again: to be called once what `lost` gave is resumed. */
  stands() {
    for (const watch of this.#byId.values()) {
      if (!watch.isAsked && watch.listeners.size > 0) this.#subscribe(watch);
    }
  }

  /** The connection is gone: the answers that arrived over it, which have to be resumed. */
  lost() {
    const cut = [];
    for (const watch of this.#byId.values()) {
      watch.isAsked = false;
      for (const id of watch.arriving) cut.push(watch.answers.get(id));
      watch.arriving.clear();
    }
    return cut;
  }

  /** The client is closed. */
  end(error) {
    for (const watch of this.#byId.values()) {
      watch.settle.reject(error);
      for (const answer of watch.answers.values()) answer.fail(error);
    }
    this.#byId.clear();
    this.#byLane.clear();
  }

  #begin(id) {
    const lane = `watch-${this.#numLanes++}`;
    const watch = { id, lane, isAsked: false, listeners: new Set(), answers: new Map() };
    watch.arriving = new Set(); // ids of the answers that the subscription brings
    watch.granted = new Promise((resolve, reject) => (watch.settle = { resolve, reject }));
    watch.granted.catch(() => {});
    this.#byId.set(id, watch);
    this.#byLane.set(lane, watch);
    return watch;
  }

  #began(watch, id) {
    const answer = new Answer(this.#client, null, id);
    watch.answers.set(id, answer);
    watch.arriving.add(id);
    const ended = () => {
      watch.answers.delete(id);
      this.#leave(watch);
    };
    answer.finished.then(ended, ended);
    for (const { onAnswer } of watch.listeners) callBack(onAnswer, answer);
  }

  async #subscribe(watch) {
    watch.isAsked = true;
    try {
      await this.#ask({ type: 'chatrt.conversation.subscribe', id: watch.id }, watch.lane);
      watch.settle.resolve();
    } catch (error) {
      if (error.code === FAULTS.connectionLost().code) watch.isAsked = false; // `stands` asks again
      else if (error.status === 503) setTimeout(() => this.#askAgain(watch), LOADING_MS);
      else {
        this.#forget(watch);
        watch.settle.reject(error);
      }
    }
  }

  #askAgain(watch) {
    if (this.#byId.get(watch.id) === watch && watch.isAsked) this.#subscribe(watch);
  }

  #leave(watch) {
    const isHeld = this.#byId.get(watch.id) === watch;
    if (!isHeld || watch.listeners.size > 0 || watch.answers.size > 0) return;
    this.#forget(watch);
    // A server that does not know this message ends the watch with the connection.
    if (watch.isAsked) {
      this.#ask({ type: 'chatrt.conversation.unsubscribe', id: watch.id }).catch(() => {});
    }
  }

  #forget(watch) {
    this.#byId.delete(watch.id);
    this.#byLane.delete(watch.lane);
  }
}
