// The list of conversations: search, open, delete.
//
// Knows: the client's routes. Does not know: what is in a conversation.
// Invariant: an answer to an older search never replaces a newer one's; nothing is deleted by one
// click alone; a conversation without a turn is no row, unless its first one runs here.
// Cost: a row is made when its conversation changed, for the newest of them until more are asked for.

import { cleanLine } from './clean.js';
import { announce, button, byId, make } from './dom.js';
import { inFull, shortly } from './when.js';

const PAUSE_MS = 150;
const NUM_MORE = 200; // rows that are shown at first, and with each wish for more
const TIMES_MS = 60_000; // how often the rows' times are told anew

export class Sidebar {
  #client = null;
  #list = byId('conversations');
  #search = byId('search');
  #asked = 0;
  #timer = 0;
  #current = null;
  #listed = []; // the newest first, shown or not
  #numShown = NUM_MORE;
  #rows = new Map(); // by what a conversation is like: its row
  #more = byId('more');

  /** `actions` are `open(id)`, `deleted(id)`, `failed(error)`, `runs(id)`: whether a turn does. */
  constructor(actions) {
    this.actions = actions;
    this.#search.oninput = () => {
      clearTimeout(this.#timer);
      this.#numShown = NUM_MORE;
      this.#timer = setTimeout(() => this.refresh(), PAUSE_MS);
    };
    this.#more.onclick = () => this.#showMore();
    setInterval(() => this.#list.querySelectorAll('time').forEach(tellTime), TIMES_MS);
  }

  use(client) {
    this.#client = client;
    this.#search.value = '';
    if (client) this.refresh();
    else {
      this.#listed = [];
      this.#paint();
    }
  }

  /** Marks the conversation that is shown; null for none. */
  mark(id) {
    this.#current = id;
    for (const row of this.#list.children) markRow(row, id);
  }

  async refresh() {
    if (!this.#client) return;
    const asked = ++this.#asked;
    let found;
    try {
      found = await this.#client.conversations(this.#search.value.trim());
    } catch {
      return; // the banner tells of a server that cannot be reached
    }
    if (asked !== this.#asked) return;
    this.#listed = found.filter(({ id, num_turns }) => num_turns > 0 || this.actions.runs(id));
    this.#paint();
    byId('none').hidden = this.#listed.length > 0;
  }

  /** Shows the newest conversations; rows of those that are as they were stay. */
  #paint() {
    const focused = this.#focused();
    const before = this.#rows;
    this.#rows = new Map();
    for (const conversation of this.#listed.slice(0, this.#numShown)) {
      const key = JSON.stringify(conversation);
      this.#rows.set(key, before.get(key) ?? this.#row(conversation));
    }
    for (const [key, row] of before) if (!this.#rows.has(key)) row.remove();
    [...this.#rows.values()].forEach((row, index) => {
      const there = this.#list.children[index];
      if (there !== row) this.#list.insertBefore(row, there ?? null);
      tellTime(row.querySelector('time'));
    });
    const numLeft = this.#listed.length - this.#rows.size;
    this.#more.hidden = numLeft === 0;
    this.#more.textContent = `Show more (${numLeft} older)`;
    this.mark(this.#current);
    if (focused) this.#focusLike(focused);
  }

  #showMore() {
    const at = this.#rows.size;
    this.#numShown += NUM_MORE;
    this.#paint();
    this.#list.children[at].querySelector('.open').focus();
  }

  /** What of the list has the focus: the row, where it stands, which of its buttons; or null. */
  #focused() {
    const { activeElement: button } = document;
    const row = button?.closest('#conversations li');
    if (!row) return null;
    const at = [...this.#list.children].indexOf(row);
    const face = button.classList.contains('delete') ? '.delete' : '.open';
    return { id: row.dataset.id, at, face };
  }

  /** The same button again; where its row is gone, the row in its place. */
  #focusLike({ id, at, face }) {
    const rows = [...this.#list.children];
    const same = rows.find((row) => row.dataset.id === id)?.querySelector(face);
    const near = rows[Math.min(at, rows.length - 1)]?.querySelector('.open');
    (same ?? near ?? byId('new-chat')).focus();
  }

  #row({ id, title, num_turns: numTurns, updated_at: updatedS }) {
    const shown = cleanLine(title ?? '') || 'Untitled';
    const open = button(shown, () => this.actions.open(id), { className: 'open' });
    open.dir = 'auto';
    const updated = new Date(updatedS * 1000);
    open.title = `${shown}\n${numTurns} turn${numTurns === 1 ? '' : 's'} · ${inFull(updated)}`;
    const when = make('time', { dateTime: updated.toISOString() });
    tellTime(when);
    const remove = button('✕', () => this.#remove(id, shown, remove), {
      label: `Delete ${shown}`,
      className: 'quiet delete',
    });
    remove.onblur = () => disarm(remove, shown);
    return make('li', { 'data-id': id }, open, remove, when);
  }

  async #remove(id, title, face) {
    if (!face.classList.contains('armed')) {
      face.classList.add('armed');
      face.textContent = 'Delete?';
      face.setAttribute('aria-label', `Really delete ${title}`);
      return;
    }
    try {
      await this.#client.deleteConversation(id);
    } catch (error) {
      disarm(face, title);
      this.actions.failed(error);
      return;
    }
    announce(`Deleted ${title}`);
    this.actions.deleted(id);
    await this.refresh();
  }
}

function disarm(face, title) {
  face.classList.remove('armed');
  face.textContent = '✕';
  face.setAttribute('aria-label', `Delete ${title}`);
}

function tellTime(when) {
  when.textContent = shortly(new Date(when.dateTime));
}

function markRow(row, id) {
  const open = row.querySelector('.open');
  if (row.dataset.id === id) open.setAttribute('aria-current', 'page');
  else open.removeAttribute('aria-current');
}
