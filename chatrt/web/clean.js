// Takes out of a text what would reorder or hide what one reads.
//
// Knows: control characters, escape sequences, bidirectional controls. Does not know: Markdown.
// Invariant: what comes out holds no control character but newline and tab, and nothing that turns
// the direction of the text around it.
// Source: ECMA-48 for the shape of the sequences; Unicode's bidirectional controls.

const SEQUENCE =
  /(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,1024}(?:\x07|\x1b\\|\x9c|$)|(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}(?:[@-~]|$)|\x1b[ -/]{0,8}(?:[0-~]|$)/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** The text as it may be shown; the whole of it, not a piece. */
export function cleanText(text) {
  const lines = text.replaceAll('\r\n', '\n');
  return lines.replace(SEQUENCE, '').replace(CONTROL, '');
}

/** A text cleaned and put on one line, for titles and messages. */
export function cleanLine(text) {
  return cleanText(text).replace(/\s+/g, ' ').trim();
}
