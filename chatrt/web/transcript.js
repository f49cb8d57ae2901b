// The transcript: the turns of the branch that is shown, growing while one reads.
//
// Knows: which turns are shown, whether the reader is at the end. Does not know: sockets.
// Invariant: the view follows the text only while its reader is at the end of it; who has scrolled
// back stays where they are.

import { byId } from './dom.js';
import { TurnView } from './turn-view.js';

const NEAR_PX = 48;

export class Transcript {
  #views = new Map();
  #scroller = byId('scroller');
  #list = byId('turns');
  #latest = byId('latest');
  #follows = true;
  #top = 0;

  constructor(actions) {
    this.actions = actions;
    this.#scroller.addEventListener('scroll', () => {
      // Text that grew below moves nothing: only who scrolls up leaves the end.
      const { scrollTop } = this.#scroller;
      if (scrollTop < this.#top - 1 || this.#isAtEnd()) this.#follows = this.#isAtEnd();
      this.#top = scrollTop;
      this.#showLatest();
    });
    this.#latest.onclick = () => {
      this.toEnd(); // which hides the button
      this.#scroller.focus({ preventScroll: true });
    };
    new ResizeObserver(() => this.#keepUp()).observe(this.#list);
  }

  /** Shows the path of `tree`; views of turns that are shown already stay. */
  show(tree) {
    const { path } = tree;
    const kept = new Set(path);
    for (const [turn, view] of this.#views) {
      if (kept.has(turn)) continue;
      view.node.remove();
      this.#views.delete(turn);
    }
    path.forEach((turn, index) => {
      const view = this.#view(turn);
      if (this.#list.children[index] !== view.node) {
        this.#list.insertBefore(view.node, this.#list.children[index] ?? null);
      }
      const siblings = tree.siblings(turn);
      view.showFoot({ at: siblings.indexOf(turn) + 1, of: siblings.length });
    });
    byId('empty').hidden = path.length > 0;
    this.#keepUp();
  }

  view(turn) {
    return this.#views.get(turn) ?? null;
  }

  /** The text of a turn grew. */
  grow(turn) {
    this.view(turn)?.grow(() => this.#keepUp());
  }

  /** Goes to the end, and follows it from now on. */
  toEnd() {
    this.#follows = true;
    this.#keepUp();
  }

  #view(turn) {
    if (!this.#views.has(turn)) this.#views.set(turn, new TurnView(turn, this.actions));
    return this.#views.get(turn);
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  #keepUp() {
    if (this.#follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#showLatest();
  }

  #showLatest() {
    this.#latest.hidden = this.#follows || this.#isAtEnd();
  }
}
