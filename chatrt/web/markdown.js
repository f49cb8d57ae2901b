// Markdown as DOM nodes, which grow with a text that is still being written.
//
// Knows: the DOM, which parts of a text can still change. Does not know: chats, sockets.
// Invariant: model text becomes text nodes, `href` of a checked link and nothing else; no markup is
// ever parsed. A view shows the same for a text however it arrived.
// Cost: an update touches the last block only, and of a list or a fence only what is new in it. No
// text becomes more than about `MOST_ELEMENTS`; what is behind them is shown as it was written.

import { parseBlocks } from './blocks.js';
import { parseInline } from './inline.js';

const MOST_ELEMENTS = 20_000; // a page of more of them is slow to lay out, whatever is in them
const BEGINS = /[[<\n]|https?:/g; // a link or a new line begins with one
const PAIRED = /[*_~`]/g; // any other inline element stands between two at least
const CODE_ELEMENTS = 6;
const TAGS = { strong: 'strong', em: 'em', del: 'del' };

/** Shows a text in `container`; `update` again and again while it grows. */
export class MarkdownView {
  #container;
  #done = 0; // characters of the text whose blocks cannot change any more
  #numDone = 0;
  #weightDone = 0;
  #mostElements;
  #shown = [];

  constructor(container, { mostElements = MOST_ELEMENTS } = {}) {
    this.#container = container;
    this.#mostElements = mostElements;
  }

  /** Shows `text`, which begins with all that was shown before, or is another one altogether. */
  update(text, { grows = true } = {}) {
    if (!grows) this.#done = this.#numDone = this.#weightDone = 0;
    const tail = text.slice(this.#done);
    const blocks = this.#fitting(parseBlocks(tail), tail);
    const settled = this.#shown.slice(0, this.#numDone);
    const open = this.#shown.slice(this.#numDone);
    this.#shown = [...settled, ...reconcile(this.#container, open, blocks)];
    this.#settle(tail, blocks);
  }

  /** `blocks` as far as there is room for them; the text from there on is one plain block. */
  #fitting(blocks, tail) {
    let left = this.#mostElements - this.#weightDone;
    for (const [index, block] of blocks.entries()) {
      block.weight = weightOf(block);
      left -= block.weight;
      if (left < 0) {
        const source = tail.split('\n').slice(block.line).join('\n');
        const plain = { type: 'plain', text: source, source, line: block.line, weight: 0 };
        return [...blocks.slice(0, index), plain];
      }
    }
    return blocks;
  }

  /** A block is settled once another one begins behind it, which the last line cannot change. */
  #settle(tail, blocks) {
    let last = blocks.length - 1;
    if (last < 1) return;
    const lines = tail.split('\n');
    const { type, line: first } = blocks[last];
    const begins = first + (type === 'table' || type === 'plain' ? 1 : 0);
    if (begins >= lines.length - 1) last -= 1;
    if (last < 1) return;
    for (let line = 0; line < blocks[last].line; line += 1) this.#done += lines[line].length + 1;
    this.#numDone += last;
    for (const { weight } of blocks.slice(0, last)) this.#weightDone += weight;
  }
}

/** How many elements a block becomes, or a few more: counted in its text, before any is made. */
function weightOf(block) {
  switch (block.type) {
    case 'code':
      return CODE_ELEMENTS;
    case 'quote':
    case 'item':
      return 1 + sum(block.blocks.map(weightOf));
    case 'list':
      return 1 + sum(asBlocks(block.items).map(weightOf));
    case 'table':
      return 4 + sum([block.head, ...block.rows].map((cells) => 1 + sum(cells.map(weightOfText))));
    default:
      return weightOfText(block.text ?? '');
  }
}

const count = (text, pattern) => text.match(pattern)?.length ?? 0;
const weightOfText = (text) => 1 + count(text, BEGINS) + count(text, PAIRED) / 2;

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** Makes the nodes behind `shown` those of `blocks`; nodes that stay the same are left alone. */
function reconcile(parent, shown, blocks) {
  const result = [];
  for (let index = 0; index < blocks.length; index += 1) {
    const before = shown[index];
    const block = blocks[index];
    if (before && before.source === block.source && before.type === block.type) {
      result.push(before);
    } else if (before && grown(before, block)) {
      result.push(before);
    } else {
      const made = { ...block, ...renderBlock(block) };
      if (before) before.node.replaceWith(made.node);
      else parent.append(made.node);
      result.push(made);
    }
  }
  for (const gone of shown.slice(blocks.length)) gone.node.remove();
  return result;
}

/** Brings what is shown up to date in place, where more of the same came; whether it could. */
function grown(before, block) {
  if (before.type !== block.type) return false;
  if (block.type === 'plain' || (block.type === 'code' && before.language === block.language)) {
    growText(before, block);
  } else if (block.type === 'list' && before.ordered === block.ordered) {
    if (before.start !== block.start) return false;
    before.shown = reconcile(before.node, before.shown, asBlocks(block.items));
  } else {
    return false;
  }
  before.source = block.source;
  return true;
}

function growText(before, block) {
  if (block.text.startsWith(before.text)) {
    before.textNode.appendData(block.text.slice(before.text.length));
  } else {
    before.textNode.data = block.text;
  }
  before.text = block.text;
}

const asBlocks = (items) => items.map((item) => ({ ...item, type: 'item' }));

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function renderBlock(block) {
  switch (block.type) {
    case 'code':
      return renderCode(block);
    case 'list':
      return renderList(block);
    case 'item':
      return { node: element('li', '', ...itemNodes(block)) };
    case 'heading':
      // The page's own headings come before those of an answer.
      return { node: element(`h${Math.min(block.level + 2, 6)}`, '', ...inline(block.text)) };
    case 'quote':
      return { node: element('blockquote', '', ...nodesOf(block.blocks)) };
    case 'plain':
      return renderPlain(block);
    case 'rule':
      return { node: element('hr') };
    case 'table':
      return renderTable(block);
    default:
      return { node: element('p', '', ...inline(block.text)) };
  }
}

const nodesOf = (blocks) => blocks.map((block) => renderBlock(block).node);

/** An item's first paragraph stands in the item itself. */
function itemNodes({ blocks }) {
  if (blocks[0]?.type !== 'paragraph') return nodesOf(blocks);
  return [...inline(blocks[0].text), ...nodesOf(blocks.slice(1))];
}

function renderList(block) {
  const node = element(block.ordered ? 'ol' : 'ul');
  if (block.ordered && block.start !== 1) node.start = block.start;
  return { node, shown: reconcile(node, [], asBlocks(block.items)) };
}

function renderCode(block) {
  const textNode = document.createTextNode(block.text);
  const copy = element('button', 'copy', 'Copy');
  copy.type = 'button';
  const bar = element('div', 'code-bar', element('span', '', block.language || 'text'), copy);
  const pre = element('pre', '', element('code', '', textNode));
  pre.tabIndex = 0; // so that keys can scroll a wide one
  return { node: element('div', 'code', bar, pre), textNode };
}

function renderPlain(block) {
  const textNode = document.createTextNode(block.text);
  return { node: element('p', 'plain', textNode), textNode };
}

function renderTable({ align, head, rows }) {
  const row = (tag, cells) =>
    element('tr', '', ...cells.map((cell, at) => element(tag, align[at], ...inline(cell))));
  const body = element('tbody', '', ...rows.map((cells) => row('td', cells)));
  const table = element('table', '', element('thead', '', row('th', head)), body);
  return { node: element('div', 'table', table) };
}

const inline = (text) => parseInline(text).map(renderInline);

function renderInline(node) {
  switch (node.type) {
    case 'text':
      return document.createTextNode(node.text);
    case 'break':
      return element('br');
    case 'code':
      return element('code', '', node.text);
    case 'link':
      return renderLink(node);
    default:
      return element(TAGS[node.type], '', ...node.children.map(renderInline));
  }
}

function renderLink({ href, children }) {
  const link = element('a', '', ...children.map(renderInline));
  link.href = href;
  link.title = href; // where it really leads, whatever its text says
  link.target = '_blank';
  link.rel = 'noopener noreferrer';
  return link;
}
