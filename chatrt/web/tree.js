// A conversation as a tree of turns, and the branch of it that is shown.
//
// Knows: which turn follows which, siblings, where a next message belongs.
// Does not know: the DOM, sockets.
// Invariant: the shown path runs from a first turn to `tip`; a turn that no history holds (it was
// refused, or failed) is nobody's parent.

const contentOf = ({ content }) =>
  typeof content === 'string' ? content : content.map((part) => part.text).join('');

const textOf = (items, role) =>
  items
    .filter((item) => item.role === role)
    .map(contentOf)
    .join('\n\n');

/** The input of a turn whose question is `text`: that of `turn` but for the question, if given. */
export function inputOf(text, turn = null) {
  const before = turn?.input ?? [];
  const others = before.filter(({ role }) => role === 'system' || role === 'developer');
  const kept = others.map((item) => ({ type: 'message', role: item.role, content: contentOf(item) }));
  return [...kept, { type: 'message', role: 'user', content: text }];
}

/** One turn: a question and its answer, however far that is. */
export class Turn {
  constructor({ id = null, parent = null, input = null, text = '', status = 'in_progress' }) {
    Object.assign(this, { id, parent, input, text, status });
    this.error = null;
    this.figures = null; // the response object as it ended, with the figures in it
    this.answer = null; // what streams while it runs
    this.ttftMs = null;
  }

  /** What was asked; null where only its answer is known. */
  get question() {
    return this.input && textOf(this.input, 'user');
  }

  get running() {
    return this.status === 'in_progress';
  }

  /** Whether a further turn can follow this one. */
  get continuable() {
    return this.id !== null && !this.running && this.status !== 'failed';
  }
}

export class Tree {
  constructor() {
    this.turns = []; // the oldest first
    this.tip = null;
  }

  /** The tree of the turns that a server lists. */
  static of(listed) {
    const tree = new Tree();
    const known = new Map();
    for (const { id, previous_response_id, status, input, output } of listed) {
      const text = textOf(output, 'assistant');
      const parent = known.get(previous_response_id) ?? null;
      known.set(id, tree.add(new Turn({ id, parent, input, text, status })));
    }
    return tree;
  }

  /** Adds a turn and shows it. */
  add(turn) {
    this.turns.push(turn);
    this.tip = turn;
    return turn;
  }

  /** Adds a turn, and shows it where the turn before it is the last one shown. */
  addBehind(turn) {
    const { tip } = this;
    this.add(turn);
    if (tip !== turn.parent) this.tip = tip; // who reads another branch stays there
    return turn;
  }

  /** Takes out a turn that nothing follows. */
  drop(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    if (this.tip === turn) this.tip = turn.parent;
  }

  /** Takes over what a server lists and is not known here; the turns that changed. */
  merge(listed) {
    const changed = [];
    for (const one of Tree.of(listed).turns) {
      const known = this.find(one.id);
      if (one.running || (known && known.input !== null)) continue;
      const parent = one.parent && this.find(one.parent.id);
      if (known) Object.assign(known, { parent, input: one.input });
      else this.addBehind(Object.assign(one, { parent }));
      changed.push(known ?? one);
    }
    return changed;
  }

  find(id) {
    return this.turns.find((turn) => turn.id === id) ?? null;
  }

  /** The turns that are shown, the first one first. */
  get path() {
    const path = [];
    for (let turn = this.tip; turn; turn = turn.parent) path.unshift(turn);
    return path;
  }

  /** The turn that a next message follows; null where it is a first one. */
  get parentOfNext() {
    return this.path.findLast((turn) => turn.continuable) ?? null;
  }

  /** The turns behind the same parent, the oldest first; the turn itself is among them. */
  siblings(turn) {
    return this.turns.filter((other) => other.parent === turn.parent);
  }

  /** Shows the newest branch below `turn`. */
  show(turn) {
    const below = new Set([turn]);
    this.tip = turn;
    for (const other of this.turns) {
      if (!below.has(other.parent)) continue; // a parent stands before its children
      below.add(other);
      this.tip = other;
    }
  }
}
