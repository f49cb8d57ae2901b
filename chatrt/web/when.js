// When something was, in one short word and in full.
//
// Knows: the calendar of the reader's time zone. Does not know: the DOM, whose time it is.

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * HOUR_MS;

/** `now`, `5 min`, `2 h`, `Mon` within a week, `12 Nov` before it, `Nov 2024` in an earlier year. */
export function shortly(date, now = new Date()) {
  const agoMs = now - date;
  if (agoMs < MINUTE_MS) return 'now';
  if (agoMs < HOUR_MS) return `${Math.floor(agoMs / MINUTE_MS)} min`;
  if (agoMs < DAY_MS) return `${Math.floor(agoMs / HOUR_MS)} h`;
  // Not a whole week: the same day of the week would be taken for today.
  if (agoMs < 6 * DAY_MS) return named(date, { weekday: 'short' });
  const isThisYear = date.getFullYear() === now.getFullYear();
  return named(date, { month: 'short', ...(isThisYear ? { day: 'numeric' } : { year: 'numeric' }) });
}

/** `12 Nov 2026, 14:03`. */
export const inFull = (date) =>
  date.toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });

const named = (date, parts) => date.toLocaleDateString('en-GB', parts);
