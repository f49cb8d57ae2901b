// Markdown as DOM nodes, which grow with a text that is still being written.
//
// Knows: the DOM, which parts of a text can still change. Does not know: chats, sockets.
// Invariant: model text becomes text nodes, `href` of a checked link and nothing else; no markup is
// ever parsed. A view shows the same for a text however it arrived.
// Cost: an update touches the last block only, and of a list or a fence only what is new in it.

import { parseBlocks } from './blocks.js';
import { parseInline } from './inline.js';

const TAGS = { strong: 'strong', em: 'em', del: 'del' };

/** Shows a text in `container`; `update` again and again while it grows. */
export class MarkdownView {
  #container;
  #done = 0; // characters of the text whose blocks cannot change any more
  #numDone = 0;
  #shown = [];

  constructor(container) {
    this.#container = container;
  }

  /** Shows `text`, which begins with all that was shown before, or is another one altogether. */
  update(text, { grows = true } = {}) {
    if (!grows) this.#done = this.#numDone = 0;
    const tail = text.slice(this.#done);
    const blocks = parseBlocks(tail);
    const settled = this.#shown.slice(0, this.#numDone);
    const open = this.#shown.slice(this.#numDone);
    this.#shown = [...settled, ...reconcile(this.#container, open, blocks)];
    this.#settle(tail, blocks);
  }

  /** A block is settled once another one begins behind it, which the last line cannot change. */
  #settle(tail, blocks) {
    let last = blocks.length - 1;
    if (last < 1) return;
    const lines = tail.split('\n');
    const begins = blocks[last].line + (blocks[last].type === 'table' ? 1 : 0);
    if (begins >= lines.length - 1) last -= 1;
    if (last < 1) return;
    for (let line = 0; line < blocks[last].line; line += 1) this.#done += lines[line].length + 1;
    this.#numDone += last;
  }
}

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
  if (block.type === 'code' && before.language === block.language) {
    growCode(before, block);
  } else if (block.type === 'list' && before.ordered === block.ordered) {
    if (before.start !== block.start) return false;
    before.shown = reconcile(before.node, before.shown, asBlocks(block.items));
  } else {
    return false;
  }
  before.source = block.source;
  return true;
}

function growCode(before, block) {
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
