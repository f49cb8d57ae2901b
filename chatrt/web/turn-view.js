// One turn on the page: the question, the answer as it grows, and what can be done with both.
//
// Knows: the turn, its nodes. Does not know: sockets, the tree beyond the place among siblings.
// Invariant: what is painted is the turn's text as it stands, at most once for each frame.
// Cost: what a frame takes, the browser's layout and painting included, is measured, and the next one
// waits in proportion: an answer of any length leaves the machine to those who write it.

import { cleanText } from './clean.js';
import { button, make } from './dom.js';
import { canRepeat, ending, lines, milliseconds, stages, summary } from './figures.js';
import { MarkdownView } from './markdown.js';

const REST = 6; // times as long as a frame took: painting has at most a seventh of the time

export class TurnView {
  #turn;
  #actions;
  #markdown;
  #painted = null;
  #frame = 0;
  #restsUntilMs = 0;
  #footShown = '';

  /** `actions` are `edit(turn, text)`, `regenerate(turn)`, `step(turn, ±1)`, `details(turn)`. */
  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    this.question = make('div', { className: 'question' });
    this.body = make('div', { className: 'markdown', dir: 'auto' });
    this.note = make('p', { className: 'note' });
    this.foot = make('div', { className: 'foot' });
    this.answer = make(
      'div',
      { className: 'answer' },
      make('h2', { className: 'hidden' }, 'Answer'),
      this.body,
      this.note,
      this.foot,
    );
    this.node = make('article', { className: 'turn' }, this.question, this.answer);
    this.#markdown = new MarkdownView(this.body);
    this.showQuestion();
    this.paint();
  }

  showQuestion() {
    const { question } = this.#turn;
    const shown = question === null ? 'asked elsewhere' : cleanText(question);
    const edit = button('Edit', () => this.#edit(), { className: 'quiet edit' });
    this.question.replaceChildren(
      make('h2', { className: 'hidden' }, 'You'),
      make('div', { className: 'bubble', dir: 'auto' }, shown),
      ...(question === null ? [] : [make('div', { className: 'tools' }, edit)]),
    );
  }

  /** Asks for a repaint of the answer; `behind` is called when it was painted. */
  grow(behind) {
    if (this.#frame) return;
    const waitMs = this.#restsUntilMs - performance.now();
    if (waitMs > 0) {
      this.#frame = setTimeout(() => {
        this.#frame = this.#restsUntilMs = 0;
        this.grow(behind);
      }, waitMs);
      return;
    }
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      const startMs = performance.now();
      this.paint();
      behind();
      afterFrame(() => {
        const nowMs = performance.now();
        this.#restsUntilMs = nowMs + REST * (nowMs - startMs);
      });
    });
  }

  /** Paints the turn as it stands. */
  paint() {
    const turn = this.#turn;
    if (this.#painted !== turn.text) {
      this.#markdown.update(cleanText(turn.text), {
        grows: this.#painted !== null && turn.text.startsWith(this.#painted),
      });
      this.#painted = turn.text;
    }
    this.answer.classList.toggle('running', turn.running);
    this.answer.setAttribute('aria-busy', String(turn.running));
  }

  /** Shows what belongs below the answer; `place` is `{at, of}` among its siblings. */
  showFoot({ at, of }) {
    const turn = this.#turn;
    const state = [at, of, turn.id, turn.status, turn.error, turn.text !== '', turn.question];
    if (this.#footShown === JSON.stringify(state)) return; // the focus and what is open stay
    this.#footShown = JSON.stringify(state);
    this.note.textContent = turn.running ? '' : ending(turn.figures ?? turn);
    this.note.classList.toggle('error', turn.error !== null || turn.status === 'failed');
    const held = this.foot.contains(document.activeElement) ? document.activeElement : null;
    this.foot.replaceChildren(...this.#switcher(at, of), ...(turn.running ? [] : this.#tools()));
    if (held) this.#focusLike(held);
  }

  /** Puts the keyboard's focus on the branch switcher. */
  focusSwitcher(direction) {
    const wanted = this.foot.querySelector(direction < 0 ? '.before' : '.after');
    const other = this.foot.querySelector(direction < 0 ? '.after' : '.before');
    (wanted?.disabled ? other : wanted)?.focus();
  }

  /** Puts the focus on what stands for `held` now, or on the nearest thing to it. */
  #focusLike(held) {
    const name = [...held.classList].at(-1);
    const like = this.foot.querySelector(name ? `.${name}:not(:disabled)` : 'summary');
    (like ?? this.foot.querySelector('button:not(:disabled)'))?.focus();
  }

  #switcher(at, of) {
    if (of < 2) return [];
    const { step } = this.#actions;
    const before = button('‹', () => step(this.#turn, -1), {
      label: 'Previous version',
      className: 'quiet before',
    });
    const after = button('›', () => step(this.#turn, 1), {
      label: 'Next version',
      className: 'quiet after',
    });
    before.disabled = at === 1;
    after.disabled = at === of;
    const told = make('span', { 'aria-label': `Version ${at} of ${of}` }, `${at}/${of}`);
    return [make('span', { className: 'switcher', role: 'group', 'aria-label': 'Versions' },
      before, told, after)];
  }

  #tools() {
    const turn = this.#turn;
    const tools = [];
    if (turn.text) {
      const act = ({ target }) => copy(target, cleanText(turn.text));
      tools.push(button('Copy', act, { className: 'quiet copy' }));
    }
    const failure = turn.error ?? turn.figures?.error;
    if (turn.question !== null && canRepeat(failure)) {
      const again = failure ? 'Try again' : 'Regenerate';
      const act = () => this.#actions.regenerate(turn);
      tools.push(button(again, act, { className: 'quiet regenerate' }));
    }
    if (turn.continuable) tools.push(this.#details()); // else no history has its figures
    return tools;
  }

  #details() {
    const turn = this.#turn;
    const told = () => (turn.figures && summary(turn.figures, turn.ttftMs)) || 'Figures';
    const list = make('div', { className: 'figures' });
    const face = make('summary', {}, told());
    const details = make('details', {}, face, list);
    details.ontoggle = async () => {
      if (!details.open || list.childElementCount > 0) return;
      try {
        turn.figures ??= await this.#actions.details(turn); // the server kept them
        list.replaceChildren(...figureRows(turn.figures, turn.ttftMs));
        face.textContent = told();
      } catch (error) {
        list.replaceChildren(make('p', { className: 'error' }, error.message));
      }
    };
    return details;
  }

  #edit() {
    const area = make('textarea', { value: this.#turn.question, className: 'editor', dir: 'auto' });
    area.rows = Math.min(12, this.#turn.question.split('\n').length + 1);
    area.setAttribute('aria-label', 'Edit your message');
    const done = () => {
      this.showQuestion();
      this.question.querySelector('.edit')?.focus();
    };
    const send = () => {
      if (area.value.trim() && this.#actions.edit(this.#turn, area.value)) this.showQuestion();
    };
    area.onkeydown = (event) => {
      if (event.isComposing) return;
      if (event.key === 'Escape') {
        event.stopPropagation();
        done();
      } else if (event.key === 'Enter' && !event.shiftKey) {
        event.preventDefault();
        send();
      }
    };
    const tools = make(
      'div',
      { className: 'tools' },
      button('Send', send, { className: 'primary' }),
      button('Cancel', done, { className: 'quiet' }),
    );
    this.question.replaceChildren(make('h2', { className: 'hidden' }, 'You'), area, tools);
    area.focus();
  }
}

/** Calls back once the browser has laid out and painted the frame that is being made. */
function afterFrame(then) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = then;
  port2.postMessage(null);
}

/** Puts `text` on the clipboard, and says so on the button. */
export async function copy(face, text) {
  try {
    await navigator.clipboard.writeText(text);
    face.textContent = 'Copied';
  } catch {
    face.textContent = 'Cannot copy';
  }
  setTimeout(() => (face.textContent = 'Copy'), 1500);
}

function figureRows(response, ttftMs) {
  const rows = lines(response, ttftMs).map(([name, words]) =>
    make('div', { className: 'row' }, make('span', {}, name), make('span', {}, words)),
  );
  const found = stages(response);
  const longest = Math.max(...found.map(([, ms]) => ms));
  for (const [name, ms] of found) {
    const bar = make('meter', { min: 0, max: longest, value: ms, 'aria-hidden': 'true' });
    const words = make('span', {}, milliseconds(ms), bar);
    rows.push(make('div', { className: 'row stage' }, make('span', {}, name), words));
  }
  return rows.length > 0 ? rows : [make('p', {}, 'The server kept no figures of this turn.')];
}
