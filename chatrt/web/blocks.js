// Block Markdown: a text to blocks of plain data.
//
// Knows: paragraphs, headings, lists, quotes, fences, tables, rules. Does not know: inline marks.
// Invariant: `source` is the lines a block was made of, and its `line` their first one's number;
// raw HTML is a paragraph like any other. An open fence reaches to the end of the text.
// Cost: linear in the text for each level of nesting, of which there are at most eight.

const DEEPEST = 8;
const FENCE = /^( {0,3})(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/; // each part can end in one place only
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DASHES = /^:?-+:?$/;

const isBlank = (line) => line.trim() === '';

/** The blocks of `text`. */
export function parseBlocks(text) {
  return blocksOf(text.split('\n'), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { block, end } = blockAt(lines, at, depth);
    blocks.push({ ...block, line: at, source: lines.slice(at, end).join('\n') });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  if (RULE.test(line)) return { block: { type: 'rule' }, end: at + 1 };
  const heading = HEADING.exec(line);
  if (heading) {
    const text = withoutHashes(line.slice(heading[0].length).trim());
    return { block: { type: 'heading', level: heading[1].length, text }, end: at + 1 };
  }
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function fence(lines, at) {
  const [, indent, marks, info] = FENCE.exec(lines[at]);
  const closes = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent.length}}`);
  let end = at + 1;
  while (end < lines.length && !closes.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.replace(strip, ''));
  const closed = end < lines.length;
  const [language] = info.trim().split(/\s/);
  return {
    block: { type: 'code', language, text: text.join('\n'), closed },
    end: closed ? end + 1 : end,
  };
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ''));
  return { block: { type: 'quote', blocks: blocksOf(inner, depth + 1) }, end };
}

function list(lines, at, depth) {
  const [, , mark] = ITEM.exec(lines[at]);
  const ordered = mark.length > 1;
  const items = [];
  let end = at;
  while (end < lines.length && isItem(lines[end], ordered) && !RULE.test(lines[end])) {
    const next = itemEnd(lines, end);
    const source = lines.slice(end, next).join('\n');
    items.push({ source, blocks: blocksOf(itemLines(lines, end, next), depth + 1) });
    end = next;
    let behind = end;
    while (behind < lines.length && isBlank(lines[behind])) behind += 1;
    if (behind < lines.length && isItem(lines[behind], ordered)) end = behind;
  }
  return { block: { type: 'list', ordered, start: parseInt(mark, 10) || 1, items }, end };
}

function isItem(line, ordered) {
  const found = ITEM.exec(line);
  return found !== null && found[2].length > 1 === ordered;
}

const contentIndent = (line) => {
  const [, indent, mark] = ITEM.exec(line);
  return indent.length + mark.length + 1;
};

const indentOf = (line) => line.length - line.trimStart().length;

/** The line behind an item: its own lines are indented, or go on with its paragraph. */
function itemEnd(lines, at) {
  const least = Math.min(contentIndent(lines[at]), 2 + indentOf(lines[at]));
  let end = at + 1;
  let blank = false;
  let last = end; // blank lines at the end are not the item's
  while (end < lines.length) {
    const line = lines[end];
    if (!isBlank(line) && indentOf(line) < least && (blank || startsBlock(line))) break;
    blank = isBlank(line);
    end += 1;
    if (!blank) last = end;
  }
  return last;
}

function itemLines(lines, at, end) {
  const width = contentIndent(lines[at]);
  const first = lines[at].slice(ITEM.exec(lines[at])[0].length);
  const rest = lines.slice(at + 1, end);
  const indents = rest.filter((line) => !isBlank(line)).map(indentOf);
  const strip = Math.min(width, indents.find((indent) => indent > 0) ?? width);
  return [first, ...rest.map((line) => line.slice(Math.min(strip, indentOf(line))))];
}

const startsBlock = (line) =>
  FENCE.test(line) || RULE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line);

function paragraph(lines, at, depth) {
  const ends = (line) =>
    isBlank(line) || (depth < DEEPEST ? startsBlock(line) : FENCE.test(line) || HEADING.test(line));
  let end = at + 1;
  while (end < lines.length && !ends(lines[end]) && !isTable(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim());
  return { block: { type: 'paragraph', text: text.join('\n') }, end };
}

const isTable = (lines, at) =>
  lines[at].includes('|') &&
  at + 1 < lines.length &&
  lines[at + 1].includes('-') &&
  cells(lines[at + 1]).every((cell) => DASHES.test(cell)) &&
  cells(lines[at + 1]).length === cells(lines[at]).length;

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'right') : 'left',
  );
  let end = at + 2;
  while (end < lines.length && lines[end].includes('|')) end += 1;
  const rows = filled(lines.slice(at, end), head.length);
  return { block: { type: 'table', align, head, rows }, end };
}

/**
 * The rows below a head of `width` cells, all as wide as it: what is beyond is cut, what lacks is
 * empty. No more cells are made up than the table has characters: short rows below a wide head
 * would make millions.
 */
function filled(lines, width) {
  let left = lines.reduce((sum, line) => sum + line.length, 0);
  return lines.slice(2).map((line) => {
    const row = cells(line).slice(0, width);
    const num = Math.min(width - row.length, left);
    left -= num;
    return row.concat(Array(num).fill(''));
  });
}

/** The cells of a table's row; `\|` is a bar in a cell. */
function cells(line) {
  const found = line.trim().split(/(?<!\\)\|/);
  if (found[0].trim() === '') found.shift();
  if (found.length > 0 && found[found.length - 1].trim() === '') found.pop();
  return found.map((cell) => cell.trim().replaceAll('\\|', '|'));
}

/** A heading's text without the hashes that may close it. */
function withoutHashes(text) {
  let end = text.length;
  while (end > 0 && text[end - 1] === '#') end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trim() : text;
}
