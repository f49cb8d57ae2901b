// Puts a turn's figures into words.
//
// Knows: which figures people look at, and their units; what helps against a refusal.
// Does not know: the DOM, how they came.

const STAGES = ['queue', 'tokenize', 'match', 'restore', 'prefill', 'first_sample', 'send'];
const MISSES = {
  evicted: 'the server had given some of these pages away',
  instructions_changed: 'the instructions are not those of the turn before',
  model_changed: 'another model answered before',
  truncated: 'the oldest turns were left out',
  template_drift: 'the template writes an earlier answer differently now',
};
const ENDINGS = {
  cancelled: 'stopped',
  max_output_tokens: 'cut off at the longest answer allowed',
  incomplete: 'cut off at the longest answer allowed',
};

const ADVICE = { context_length_exceeded: 'Shorten the message, or begin a new chat.' };
const IN_VAIN = new Set([
  'context_length_exceeded',
  'invalid_request_error',
  'invalid_value',
  'model_not_found',
  'unsupported_parameter',
]);

const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

export const milliseconds = (value) =>
  `${value > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ms`;

/** One line: `TTFT 8 ms · 243 tok/s · 96 % cached`, of what is known. */
export function summary(response, ttftMs = null) {
  const { chatrt = {}, usage } = response;
  const parts = [];
  const shown = ttftMs ?? chatrt.ttft_ms;
  if (isNumber(shown)) parts.push(`TTFT ${milliseconds(shown)}`);
  if (isNumber(chatrt.decode_tps) && chatrt.decode_tps > 0) {
    parts.push(`${chatrt.decode_tps.toFixed(0)} tok/s`);
  }
  if (usage?.input_tokens) {
    const cached = usage.input_tokens_details?.cached_tokens ?? 0;
    parts.push(`${((100 * cached) / usage.input_tokens).toFixed(0)} % cached`);
  }
  return parts.join(' · ');
}

/** Whether the same request can end otherwise than with `error`; true where there was none. */
export const canRepeat = (error) => !IN_VAIN.has(error?.code);

/** Why a response, or a stored turn, is not whole, and what helps; empty for one that is. */
export function ending(response) {
  if (response.status === 'completed') return '';
  if (response.error) {
    const { code, message } = response.error;
    const advice = ADVICE[code];
    return advice ? `${message.replace(/\.$/, '')}. ${advice}` : message;
  }
  const reason = response.incomplete_details?.reason ?? response.status;
  return ENDINGS[reason] ?? reason;
}

/** The stages of TTFT: `[name, ms]`, those that took no time left out. */
export function stages({ chatrt = {} }) {
  const named = STAGES.map((name) => [name.replace('_', ' '), chatrt.stages?.[`${name}_ms`]]);
  return named.filter(([, ms]) => isNumber(ms) && ms >= 0.05);
}

/** Lines `[name, words]` about tokens, gaps and drafts. */
export function lines({ chatrt = {}, usage }, ttftMs = null) {
  const found = [];
  if (isNumber(ttftMs) && isNumber(chatrt.ttft_ms)) {
    const server = milliseconds(chatrt.ttft_ms);
    found.push(['TTFT', `${milliseconds(ttftMs)} here, ${server} of it in the server`]);
  }
  const { kv = {}, gap_ms: gaps = {}, speculation = {} } = chatrt;
  const tokens = [];
  if (kv.reused_tokens) {
    const ahead = kv.typed_ahead_tokens ? `, ${kv.typed_ahead_tokens} of them typed ahead` : '';
    tokens.push(`${kv.reused_tokens} cached${ahead}`);
  }
  if (kv.computed_tokens) tokens.push(`${kv.computed_tokens} computed`);
  if (usage?.output_tokens) tokens.push(`${usage.output_tokens} written`);
  if (tokens.length > 0) found.push(['tokens', tokens.join(' · ')]);
  if (kv.miss_reason) found.push(['cache miss', MISSES[kv.miss_reason] ?? kv.miss_reason]);
  const shown = ['p50', 'p95', 'max'].filter((name) => isNumber(gaps[name]));
  if (shown.length > 0) {
    found.push(['gaps', shown.map((name) => `${name} ${milliseconds(gaps[name])}`).join(' · ')]);
  }
  if (speculation.drafted) {
    const drafter = speculation.drafter ? ` (${speculation.drafter})` : '';
    const accepted = speculation.accepted ?? 0;
    found.push(['drafts', `${accepted} of ${speculation.drafted} accepted${drafter}`]);
  }
  return found;
}
