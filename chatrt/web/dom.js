// Small helpers around the DOM. Knows: elements. Does not know: chats.
// Invariant: strings become text nodes, never markup.

/** An element: `properties` are set on it, `aria…`, `data…` and `role` as attributes. */
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(?:aria-|data-|role$|for$)/.test(name)) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** A button with a label of its own where its face is only a sign. */
export function button(face, onclick, { label = '', className = '' } = {}) {
  const named = label ? { 'aria-label': label, title: label } : {};
  return make('button', { type: 'button', className, onclick, ...named }, face);
}

export const byId = (id) => document.getElementById(id);

/** Tells screen readers once, politely. */
export function announce(text) {
  byId('announcer').replaceChildren(make('p', {}, text));
}
