// One conversation: what is sent, what streams, and which branch is shown.
//
// Knows: the client, the tree, the transcript. Does not know: keys, the list of conversations.
// Invariant: at most one answer of ours runs in a conversation; what was asked is kept for this tab
// until it has ended, so that a reload goes on with it, or gives it back where no server has it. A
// turn that others began is shown as it streams, and becomes whole once it has ended.

import { cleanLine, cleanText } from './clean.js';
import { announce } from './dom.js';
import { ending } from './figures.js';
import { Transcript } from './transcript.js';
import { Tree, Turn, inputOf } from './tree.js';

const RUNNING = 'chatrt.running'; // in the tab: by conversation, what was asked and has not ended
const MAX_TITLE = 60;
const LOST = 'response_lost'; // the error of an answer that the server does not know any more
const PATIENCE_MS = 250; // a socket that is silent keeps nobody from what HTTP brings
const UNWATCHED = { stop() {} };

export class Chat {
  #client = null;
  #tab;
  #events;
  #tree = new Tree();
  #transcript;
  #typist = null;
  #watching = UNWATCHED;
  #opening = 0;
  #runs = new Map(); // by conversation: our turn that runs in it, shown or not

  /**
   * `tab` keeps what outlives a reload. `events.onChange()` hears of changes of `id` and `running`,
   * `onTurn()` of turns for the list, `onBegin(id)` of the conversation that an empty chat becomes.
   * `onAway()`, `onBusy()`: a version was asked for while no server is there, or an answer of ours
   * runs. `onLost(id, text)`: the server does not have this question; `onGone(id, text)`: its
   * conversation was deleted elsewhere.
   */
  constructor(tab, events) {
    this.#tab = tab;
    this.#events = events;
    this.id = null;
    this.wanted = null; // what was asked for and could not be fetched so far
    this.running = null;
    this.#transcript = new Transcript({
      edit: (turn, text) => this.#branch(turn, text),
      regenerate: (turn) => this.#branch(turn, turn.question),
      step: (turn, by) => this.#step(turn, by),
      details: (turn) => this.#client.response(turn.id),
    });
    this.#show();
  }

  /** Uses `client` from now on, null for none. */
  use(client) {
    this.#client = client;
    this.#typist = client?.typeAhead() ?? null;
  }

  /** Whether a turn runs in a conversation: one of ours, or any in the one that is shown. */
  runs(id) {
    return this.#runs.has(id) || (id === this.id && this.#tree.turns.some((turn) => turn.running));
  }

  /** What was asked in the branch that is shown, the newest last. */
  asked() {
    return this.#tree.path.map((turn) => turn.question).filter(Boolean);
  }

  /** An empty chat; its conversation begins with the first message. */
  clear() {
    this.#opening += 1;
    this.#watching.stop();
    this.#watching = UNWATCHED;
    this.id = null;
    this.wanted = null;
    this.running = null;
    this.#typist?.drop();
    this.#tree = new Tree();
    this.#show();
    this.#transcript.toEnd();
  }

  /** What is shown stays, whatever was to be opened instead. */
  stay() {
    if (this.wanted === null) return;
    this.#opening += 1;
    this.wanted = null;
  }

  /**
   * Shows a conversation, and goes on with what runs in it. Rejects where it cannot be had, unless
   * something else was asked for meanwhile; what was shown stays then, and `wanted` names it.
   */
  async open(id) {
    const opening = ++this.#opening;
    const client = this.#client;
    this.wanted = id;
    // First resumed, then watched: what is received already is not sent twice. First watched, then
    // listed: what ends in between is in either.
    const run = this.#runs.get(id) ?? this.#resume(id); // it may end while the turns are fetched
    const watched = this.#watch(id);
    const isListed = await within(PATIENCE_MS, watched);
    const { listed, error } = await client.turns(id).then(
      (listed) => ({ listed }),
      (error) => ({ error }),
    );
    if (opening !== this.#opening || error) watched.then(({ stop }) => stop());
    if (opening !== this.#opening) return; // another one was opened meanwhile
    if (error?.status === 404 && this.#leave(id)) return;
    if (error) throw error;
    this.clear();
    this.id = id;
    this.#tree = Tree.of(listed.filter((turn) => turn.status !== 'in_progress'));
    this.#show();
    this.#transcript.toEnd();
    const ours = run ?? this.#runs.get(id); // or it has begun meanwhile
    if (ours && !ours.error) this.#rejoin(ours);
    else this.#settle(Tree.of(listed).turns);
    this.#follow(watched, { isListed });
  }

  /** Brings in what happened in the conversation while nobody told us. */
  async catchUp() {
    const { id } = this;
    if (!id) return;
    this.#watching.stop();
    await null; // behind the client, which asks for the rest of what was watched as its own first
    if (this.id === id) await this.#follow(this.#watch(id), { isListed: false });
  }

  /** Sends `text` behind the branch that is shown; false where that was left before it could be. */
  async send(text) {
    if (!this.id && !(await this.#begin(text))) return false;
    this.#ask(inputOf(text), this.#tree.parentOfNext, { typed: this.#typist });
    return true;
  }

  /** What stands in the prompt so far, to be read ahead; an empty text forgets what waits. */
  typing(text) {
    if (!text.trim() || this.running) return this.#typist?.drop();
    this.#typist?.type(requestFor(inputOf(text), this.#tree.parentOfNext, null));
  }

  /** Stops the answer that runs; what there is of it stays. */
  stop() {
    this.running?.answer.cancel();
  }

  async #begin(text) {
    const opening = this.#opening;
    const { id } = await this.#client.createConversation(cleanLine(text).slice(0, MAX_TITLE));
    if (opening !== this.#opening) return false;
    this.id = id;
    this.#events.onBegin(id);
    this.#events.onTurn();
    this.#follow(this.#watch(id), { isListed: true });
    return true;
  }

  #ask(input, parent, { typed = null, extra = {} } = {}) {
    this.wanted = null; // who goes on here is no longer waiting to be elsewhere
    const turn = this.#tree.add(new Turn({ input, parent }));
    const request = requestFor(input, parent, this.id, extra);
    this.#run(this.id, turn, this.#client.stream(request, { typed }));
    this.#transcript.toEnd();
    return turn;
  }

  /** The same question again, or another one in its place, behind the same turn. */
  #branch(turn, text) {
    if (this.running) {
      this.#events.onBusy();
      return false;
    }
    if (this.#client?.state !== 'open') {
      this.#events.onAway();
      return false;
    }
    const seed = crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
    const version = this.#ask(inputOf(text, turn), turn.parent, { extra: { seed } });
    this.#transcript.view(version).focusSwitcher(1); // what had the focus is gone with its turn
    return true;
  }

  #step(turn, by) {
    const siblings = this.#tree.siblings(turn);
    const other = siblings[siblings.indexOf(turn) + by];
    if (!other) return;
    this.#tree.show(other);
    this.#show();
    this.#transcript.view(other).focusSwitcher(by);
  }

  /** Shows a turn of ours again that ran while another conversation was shown. */
  #rejoin(turn) {
    if (this.#tree.find(turn.id)) return;
    turn.parent = this.#tree.find(turn.parent?.id);
    this.#tree.add(turn);
    this.running = turn.running ? turn : null;
    this.#show();
  }

  /** Goes on with the turn that this tab waited for when it was reloaded; null for none. */
  #resume(conversation) {
    const { id, parent, input } = this.#tab.getObject(RUNNING)[conversation] ?? {};
    if (!id) return null;
    const turn = new Turn({ id, input, parent: parent ? { id: parent } : null });
    this.#run(conversation, turn, this.#client.resume(id)).then(() => {
      if (turn.error?.code === LOST && this.id === conversation) this.#settle([], turn);
    });
    this.#events.onTurn();
    return turn;
  }

  /** What was asked here and has not ended is shown, or among those that run, or is given back. */
  #settle(running, asked = null) {
    const { id, input, parent = null } = this.#tab.getObject(RUNNING)[this.id] ?? {};
    if (!input) return;
    const lost = asked ?? new Turn({ id, input });
    this.#tree.drop(lost);
    const isLost = ({ id: other, question, parent: before }) =>
      other === id || (question === lost.question && (before?.id ?? null) === parent);
    const isKnown = [...this.#tree.turns, ...running].some(isLost);
    this.#keep(this.id, null);
    this.#show();
    if (!isKnown) this.#events.onLost(this.id, lost.question);
  }

  /** Follows our turn in a conversation, shown or not, from its question to its end. */
  async #run(conversation, turn, answer) {
    turn.answer = answer;
    this.#runs.set(conversation, turn);
    if (this.id === conversation) this.running = turn;
    this.#show();
    const keep = () => {
      this.#keep(conversation, { id: turn.id, input: turn.input, parent: turn.parent?.id });
    };
    keep();
    await this.#stream(turn, keep);
    if (turn.status !== 'failed') this.#keep(conversation, null); // else no history holds it
    this.#runs.delete(conversation);
    if (this.running === turn) this.running = null;
    this.#events.onTurn();
    const isGone = turn.error?.status === 404 && (await this.#isGone(conversation));
    if (isGone) this.#leave(conversation);
    if (isGone || this.id !== conversation) return;
    this.#show();
    tell(turn);
  }

  /** A conversation is gone: tells what was asked there and has not ended; whether there was such. */
  #leave(conversation) {
    const { input } = this.#tab.getObject(RUNNING)[conversation] ?? {};
    if (!input) return false;
    this.#keep(conversation, null);
    if ([this.id, this.wanted].includes(conversation)) this.clear();
    this.#events.onGone(conversation, new Turn({ input }).question);
    return true;
  }

  async #isGone(conversation) {
    const error = await this.#client?.turns(conversation).then(() => null, (refused) => refused);
    return error?.status === 404;
  }

  /** Follows an answer to its end; `onBegun` is called once it has an id. */
  async #stream(turn, onBegun) {
    const { answer } = turn;
    try {
      for await (const event of answer) {
        if (turn.id === null || event.type === 'response.created') {
          turn.id = answer.id;
          onBegun();
        }
        turn.text = answer.text;
        this.#transcript.grow(turn);
      }
      turn.figures = answer.response;
      turn.status = answer.response.status;
    } catch (error) {
      turn.error = error;
      turn.status = 'failed';
    }
    turn.text = answer.text;
    turn.ttftMs = turn.question === null || answer.request === null ? null : answer.ttftMs;
    turn.answer = null;
    this.#transcript.view(turn)?.paint();
  }

  /** What others ask in a conversation from now on; kept until it is followed. */
  async #watch(id) {
    const watch = { told: [], take: (answer) => watch.told.push(answer), stop: () => {} };
    try {
      watch.stop = await this.#client.watch(id, (answer) => watch.take(answer));
    } catch {
      // It is only about what others ask; with the next connection it is tried again.
    }
    return watch;
  }

  /** Joins what is asked where we are, once that is told; `isListed`: the list is no older. */
  async #follow(watched, { isListed }) {
    const { id } = this;
    const watch = await watched;
    if (this.id !== id) return watch.stop();
    this.#watching.stop();
    this.#watching = watch;
    watch.take = (answer) => this.#joined(id, answer);
    watch.told.splice(0).forEach((answer) => watch.take(answer));
    if (!isListed) await this.#merge(id);
  }

  /** An answer that somebody else began in this conversation, or this tab before its reload. */
  async #joined(conversation, answer) {
    if (this.id !== conversation || this.#tree.find(answer.id)) return;
    await null; // its first event is taken behind this call
    const { previous_response_id: before, chatrt } = answer.begun ?? {};
    const newest = this.#tree.turns.findLast((turn) => turn.continuable) ?? null;
    const parent = before ? this.#tree.find(before) : chatrt?.new_branch ? null : newest;
    const turn = this.#tree.addBehind(new Turn({ id: answer.id, parent }));
    turn.answer = answer;
    this.#show();
    this.#events.onTurn();
    await this.#stream(turn, () => {});
    this.#events.onTurn();
    if (this.id !== conversation) return;
    await this.#merge(conversation); // what was asked is known once the turn is stored
    if (this.id === conversation) tell(turn);
  }

  async #merge(conversation) {
    const listed = await this.#client.turns(conversation).catch(() => []);
    if (this.id !== conversation) return;
    for (const turn of this.#tree.merge(listed)) this.#transcript.view(turn)?.showQuestion();
    this.#show();
  }

  /** Keeps which turn of ours runs in a conversation: `{id, input, parent}`, null for none. */
  #keep(conversation, running) {
    const all = { ...this.#tab.getObject(RUNNING), [conversation]: running };
    if (running === null) delete all[conversation];
    this.#tab.setObject(RUNNING, all);
  }

  #show() {
    this.#transcript.show(this.#tree);
    this.#events.onChange(this);
  }
}

/** The request for `input` behind `parent`; null there begins a new branch of the conversation. */
function requestFor(input, parent, conversation, extra = {}) {
  if (parent) return { input, previous_response_id: parent.id, chatrt: extra };
  if (!conversation) return { input, chatrt: extra }; // half-typed: a first message of any chat
  return { input, conversation, chatrt: { ...extra, new_branch: true } };
}

/** Whether `promised` is there in that time. */
function within(patienceMs, promised) {
  const late = new Promise((resolve) => setTimeout(() => resolve(false), patienceMs));
  return Promise.race([promised.then(() => true), late]);
}

function tell(turn) {
  const stopped = turn.status === 'cancelled' ? 'Stopped. ' : '';
  const failed = turn.status === 'failed' ? ending(turn.figures ?? turn) : '';
  announce(cleanText(failed || `${stopped}Answer: ${turn.text}`));
}
