// The prompt: its text, a draft for each conversation, and what was sent before.
//
// Knows: the field, its keys, the tab's storage.
// Does not know: conversations beyond their ids, the wire.
// Invariant: a draft is shown only where it was typed, outlives a reload of the tab, and leaves with
// what was sent or deleted. A text that could not be sent is not lost.

import { byId } from './dom.js';

const DRAFTS = 'chatrt.drafts'; // in the tab: by conversation, what was typed; '' is a new chat
const SENT = 'chatrt.sent'; // in the tab: the same, of what is on its way and that nobody holds yet
const PAGES = { PageUp: -1, PageDown: 1 };
const LINES = { ArrowUp: -1, ArrowDown: 1 };

export class Composer {
  #field = byId('prompt');
  #tab;
  #drafts;
  #place;
  #sent = []; // the newest last
  #recalled = null; // which earlier message is shown

  /**
   * Shows the draft of `place`. `actions` are `send()`, `typed(text)`, `page(±1)`, and `asked()`:
   * the messages of the chat that is shown.
   */
  constructor(place, tab, actions) {
    this.actions = actions;
    this.#tab = tab;
    this.#drafts = new Map(Object.entries(tab.getObject(DRAFTS)));
    this.#place = place;
    this.#field.oninput = () => this.#changed();
    this.#field.onkeydown = (event) => this.#key(event);
    this.#put(this.#drafts.get(place) ?? '');
    for (const [from, text] of Object.entries(tab.getObject(SENT))) this.giveBack(from, text);
    tab.setObject(SENT, {});
  }

  get text() {
    return this.#field.value;
  }

  focus() {
    this.#field.focus();
  }

  /** Shows the draft of a conversation, `''` for that of a new chat. */
  show(place) {
    if (place === this.#place) return;
    this.#place = place;
    this.#put(this.#drafts.get(place) ?? '');
  }

  /** What is shown belongs to `place` from now on, unless a draft is there already. */
  move(place) {
    const from = this.#place;
    this.#place = place;
    if (this.#drafts.has(place)) this.#put(this.#drafts.get(place));
    else {
      this.#keep(from, '');
      this.#keep(place, this.text);
    }
  }

  /** Takes the text out, to be sent. Until it `isAsked()` or is `putBack()` it outlives a reload. */
  take() {
    const { text } = this;
    const place = this.#place;
    this.#sent.push(text);
    this.#put('');
    this.#tab.setObject(SENT, { [place]: text });
    const isAsked = () => this.#tab.setObject(SENT, {});
    const putBack = () => {
      if (this.#tab.get(SENT) === null) return; // signed out, which forgets everything
      isAsked();
      this.giveBack(place, text);
    };
    return { isAsked, putBack };
  }

  /** Puts a text that was not asked into the draft of `place`, before what was typed there since. */
  giveBack(place, text) {
    const since = this.#drafts.get(place);
    const whole = since ? `${text}\n\n${since}` : text;
    if (place === this.#place) this.#put(whole);
    else this.#keep(place, whole);
  }

  /** Forgets the draft of a conversation that is gone. */
  forget(place) {
    this.#keep(place, '');
    if (place === this.#place) this.#put('');
  }

  /** A conversation is gone: what was asked, and what was typed there, is a draft of a new chat. */
  leave(place, asked) {
    const draft = this.#drafts.get(place);
    this.forget(place);
    this.giveBack('', draft ? `${asked}\n\n${draft}` : asked);
  }

  /** Forgets all drafts, and what was sent. */
  clear() {
    this.#sent = [];
    this.#drafts.clear();
    this.#put('');
  }

  #put(text) {
    this.#field.value = text;
    this.#keep(this.#place, text);
    this.#fit();
  }

  #changed() {
    this.#keep(this.#place, this.text);
    this.#fit();
    this.actions.typed(this.text);
  }

  #keep(place, text) {
    if (text) this.#drafts.set(place, text);
    else this.#drafts.delete(place);
    this.#tab.setObject(DRAFTS, Object.fromEntries(this.#drafts));
  }

  /** As high as its text, where the style sheet cannot say so. */
  #fit() {
    if (CSS.supports('field-sizing', 'content')) return;
    this.#field.style.height = 'auto';
    this.#field.style.height = `${this.#field.scrollHeight}px`;
  }

  /**
   * Shows the message before, or behind, the one that is shown; the last one in an empty prompt.
   * Whether it did: not in a text of one's own, and in one of several lines only from its edge.
   */
  #recall(by) {
    const { selectionStart: from, selectionEnd: to, value: text } = this.#field;
    const isRecalled = text !== '' && text === this.#recalled?.text;
    const beside = by < 0 ? text.slice(0, from) : text.slice(to);
    if ((text && !isRecalled) || beside.includes('\n')) return false;
    const messages = isRecalled ? this.#recalled.messages : this.#messages();
    const at = (isRecalled ? this.#recalled.at : messages.length) + by;
    if (at < 0 || at > messages.length) return false;
    this.#put(messages[at] ?? '');
    this.#field.setSelectionRange(this.text.length, this.text.length);
    this.#recalled = { messages, at, text: this.text };
    this.actions.typed(this.text);
    return true;
  }

  /** Each message once, the newest last: those of this chat behind those of others. */
  #messages() {
    const newestFirst = [...this.#sent, ...this.actions.asked()].reverse();
    return [...new Set(newestFirst)].reverse();
  }

  #key(event) {
    const isPlain = !(event.shiftKey || event.altKey || event.ctrlKey || event.metaKey);
    if (event.key in LINES && isPlain && !event.isComposing && this.#recall(LINES[event.key])) {
      event.preventDefault();
    }
    if (event.key in PAGES) {
      event.preventDefault();
      this.actions.page(PAGES[event.key]);
    }
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.actions.send();
  }
}
