// Inline Markdown: a line of text to nodes of plain data.
//
// Knows: emphasis, code, links, addresses in the text. Does not know: blocks, the DOM.
// Invariant: every character of the input is text of some node, or a mark that a node stands for;
// a link leads to http, https or mailto, all others stay the text they were.
// Cost: linear in the text, whatever it holds.
// Source: CommonMark 0.31, simplified: emphasis closes its nearest opener, links do not nest.

const MOST_OPEN = 24; // marks that are open at once; more of them stay text, and nodes stay shallow
const MOST_MISSES = 8; // places in one run of letters where an address might begin, and none does
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TAILS = /[.,:;!?'"*_~)\]]/;
const WORD = /[\p{L}\p{N}]/u;
const MARKS = /[\p{P}\p{S}]/u;

/** The address that a link may lead to, null for any that is not http, https or mailto. */
export function safeHref(text) {
  if (!/^(?:https?:\/\/|mailto:)[^\s\\]/i.test(text)) return null;
  try {
    const { protocol, href } = new URL(text);
    return ['http:', 'https:', 'mailto:'].includes(protocol) ? href : null;
  } catch {
    return null;
  }
}

/** Nodes `{type, text}`, `{type, children}` or, for links, `{type, href, children}`. */
export function parseInline(text, { links = true } = {}) {
  return new Inline(text, links).parse();
}

class Inline {
  constructor(text, links) {
    this.text = text;
    this.links = links;
    this.pos = 0;
    this.plain = '';
    this.open = []; // marks that may still be closed, each with the nodes behind it
    this.nodes = [];
    this.spans = codeSpans(text);
    this.missed = { end: 0, count: 0 }; // the run of letters that was last taken for an address
    this.brackets = links ? bracketPairs(text, this.spans) : new Map();
  }

  get current() {
    return this.open.length > 0 ? this.open[this.open.length - 1].nodes : this.nodes;
  }

  parse() {
    while (this.pos < this.text.length) this.step(this.text[this.pos]);
    while (this.open.length > 0) this.giveUp();
    this.flush();
    return this.nodes;
  }

  step(char) {
    if (char === '\\' && this.escape()) return;
    if (char === '`' && this.code()) return;
    if (char === '\n') return this.add({ type: 'break' }, 1);
    if ('*_~'.includes(char)) return this.mark(char);
    if (this.links && '[!<h'.includes(char) && this.link(char)) return;
    this.plain += char;
    this.pos += 1;
  }

  escape() {
    const next = this.text[this.pos + 1];
    if (next === undefined || !ESCAPABLE.test(next)) return false;
    this.plain += next;
    this.pos += 2;
    return true;
  }

  code() {
    const span = this.spans.get(this.pos);
    if (span !== undefined) {
      this.add({ type: 'code', text: span.text }, span.end - this.pos);
      return true;
    }
    const run = runLength(this.text, this.pos);
    this.plain += '`'.repeat(run);
    this.pos += run;
    return true;
  }

  link(char) {
    if (char === 'h' || char === '<') return this.address(char);
    const start = char === '!' ? this.pos + 1 : this.pos;
    if (this.text[start] !== '[') return false;
    const close = this.brackets.get(start);
    const target = close === undefined ? null : destination(this.text, close + 1);
    const href = target && safeHref(target.text);
    if (!href) return false;
    const children = parseInline(this.text.slice(start + 1, close), { links: false });
    if (children.length === 0) children.push({ type: 'text', text: target.text });
    // A picture is a link too: the page fetches nothing that a model names.
    this.add({ type: 'link', href, children }, target.end - this.pos);
    return true;
  }

  address(char) {
    const angled = char === '<';
    if (!angled && (WORD.test(this.text[this.pos - 1] ?? '') || this.missedOften())) return false;
    const pattern = angled ? ANGLED : ADDRESS;
    pattern.lastIndex = this.pos;
    const found = pattern.exec(this.text);
    if (!found) return false;
    const shown = angled ? found[1] : withoutTail(found[0]);
    const href = safeHref(shown);
    if (!href) {
      if (!angled) this.miss(pattern.lastIndex);
      return false;
    }
    const children = [{ type: 'text', text: shown }];
    this.add({ type: 'link', href, children }, angled ? found[0].length : shown.length);
    return true;
  }

  /** Each try reads to the end of the run: a run is not read again for each of its letters. */
  missedOften() {
    return this.pos < this.missed.end && this.missed.count >= MOST_MISSES;
  }

  miss(end) {
    const count = this.pos < this.missed.end ? this.missed.count + 1 : 1;
    this.missed = { end, count };
  }

  mark(char) {
    const run = runLength(this.text, this.pos);
    const before = this.text[this.pos - 1] ?? ' ';
    const after = this.text[this.pos + run] ?? ' ';
    const leans = (one, other) =>
      !/\s/.test(one) && (!MARKS.test(one) || /\s/.test(other) || MARKS.test(other));
    let [opens, closes] = [leans(after, before), leans(before, after)];
    if (char === '_') {
      if (WORD.test(before)) opens = false;
      if (WORD.test(after)) closes = false;
    }
    this.pos += run;
    let left = run;
    if (char === '~' && run !== 2) opens = closes = false;
    if (closes) left = this.close(char, run);
    if (left === 0) return;
    if (opens && left <= 3 && this.open.length < MOST_OPEN) {
      this.flush();
      this.open.push({ char, count: left, nodes: [] });
    } else {
      this.plain += char.repeat(left);
    }
  }

  /** Closes what is open of this mark; how many characters of the run are left. */
  close(char, run) {
    let left = run;
    while (left > 0 && this.open.some((one) => one.char === char)) {
      while (this.open[this.open.length - 1].char !== char) this.giveUp();
      this.flush();
      const top = this.open[this.open.length - 1];
      const used = left >= 2 && top.count >= 2 ? 2 : 1;
      const type = char === '~' ? 'del' : used === 2 ? 'strong' : 'em';
      top.nodes = [{ type, children: top.nodes }];
      top.count -= used;
      left -= used;
      if (top.count === 0) {
        this.open.pop();
        this.current.push(...top.nodes);
      }
    }
    return left;
  }

  /** The innermost open mark was none: it becomes text, before what followed it. */
  giveUp() {
    this.flush();
    const { char, count, nodes } = this.open.pop();
    this.current.push({ type: 'text', text: char.repeat(count) });
    for (const node of nodes) this.current.push(node);
  }

  add(node, length) {
    this.flush();
    this.current.push(node);
    this.pos += length;
  }

  flush() {
    if (this.plain) this.current.push({ type: 'text', text: this.plain });
    this.plain = '';
  }
}

function runLength(text, start) {
  let end = start + 1;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

/** Code spans by where they begin: a run of backticks up to the next one of the same length. */
function codeSpans(text) {
  const runs = [];
  for (let pos = text.indexOf('`'); pos >= 0; pos = text.indexOf('`', pos)) {
    const length = runLength(text, pos);
    const escaped = text[pos - 1] === '\\' && text[pos - 2] !== '\\';
    runs.push({ pos, length, escaped });
    pos += length;
  }
  const next = new Map(); // length → index of the next such run, seen from the end
  const partner = runs.map(() => undefined);
  for (let index = runs.length - 1; index >= 0; index -= 1) {
    partner[index] = next.get(runs[index].length);
    next.set(runs[index].length, index);
  }
  const spans = new Map();
  for (let index = 0; index < runs.length; index += 1) {
    const { pos, length, escaped } = runs[index];
    if (partner[index] === undefined || escaped) continue;
    const close = runs[partner[index]];
    const inner = text.slice(pos + length, close.pos).replaceAll('\n', ' ');
    const padded = inner.startsWith(' ') && inner.endsWith(' ') && inner.trim() !== '';
    spans.set(pos, { end: close.pos + length, text: padded ? inner.slice(1, -1) : inner });
    index = partner[index];
  }
  return spans;
}

/** Which `]` belongs to which `[`, outside of code. */
function bracketPairs(text, spans) {
  const pairs = new Map();
  const open = [];
  for (let pos = 0; pos < text.length; pos += 1) {
    const span = text[pos] === '`' ? spans.get(pos) : undefined;
    if (span) pos = span.end - 1;
    else if (text[pos] === '\\') pos += 1;
    else if (text[pos] === '[') open.push(pos);
    else if (text[pos] === ']' && open.length > 0) pairs.set(open.pop(), pos);
  }
  return pairs;
}

/** The address in `(address "title")` at `start`, and where it ends; null where there is none. */
function destination(text, start) {
  if (text[start] !== '(') return null;
  let pos = start + 1;
  let depth = 0;
  while (pos < text.length && !/[\s<>[\]]/.test(text[pos])) {
    if (text[pos] === '(') depth += 1;
    if (text[pos] === ')' && depth-- === 0) break;
    pos += 1;
  }
  const address = text.slice(start + 1, pos);
  const title = /[ \t]+(?:"[^"\n]*"|'[^'\n]*')[ \t]*/y;
  title.lastIndex = pos;
  if (title.test(text)) pos = title.lastIndex;
  return text[pos] === ')' && address ? { text: address, end: pos + 1 } : null;
}

/** An address without the punctuation of the sentence around it. */
function withoutTail(address) {
  // A bracket that closes one of the address's own belongs to it.
  let surplus = address.split(')').length - address.split('(').length;
  let end = address.length;
  while (end > 0 && TAILS.test(address[end - 1])) {
    if (address[end - 1] === ')' && surplus-- <= 0) break;
    end -= 1;
  }
  return address.slice(0, end);
}
