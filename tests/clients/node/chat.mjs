// openai-node's ResponsesWS, unmodified, told by lines of JSON what to do (see ../program.py).
// Argument: base URL. The key is in OPENAI_API_KEY, where the package looks for it.
import { createInterface } from 'node:readline';
import OpenAI from 'openai';
import { ResponsesWS } from 'openai/resources/responses/ws';

const socket = new ResponsesWS(new OpenAI({ baseURL: process.argv[2] }), {
  // A server that starts anew takes longer than the package's five tries.
  reconnect: { onReconnecting: () => {}, maxRetries: 1000, initialDelay: 50, maxDelay: 200 },
});
let text = '';
let stop = false;

const say = (said) => console.log(JSON.stringify(said));

socket.on('response.created', () => (text = ''));
socket.on('response.output_text.delta', (event) => {
  text += event.delta;
  if (stop) socket.send({ type: 'response.cancel', response_id: event.response_id });
  stop = false;
});
for (const type of ['response.completed', 'response.incomplete', 'response.failed']) {
  socket.on(type, ({ response: { id, status, usage } }) =>
    say({
      id,
      text,
      status,
      input_tokens: usage.input_tokens,
      cached_tokens: usage.input_tokens_details.cached_tokens,
      total_tokens: usage.total_tokens,
    }),
  );
}
socket.on('error', ({ error, message }) => {
  // One without an event is about the socket, which the package opens again.
  if (error) say({ code: error.error.code, error: error.error.message });
  else console.error(message);
});
socket.on('reconnecting', ({ closeCode }) => console.error('reconnecting after', closeCode));
socket.on('reconnected', () => console.error('reconnected'));

const commands = createInterface({ input: process.stdin });
commands.on('line', (line) => {
  const asked = JSON.parse(line);
  stop = asked.stop;
  socket.send({
    type: 'response.create',
    model: asked.model,
    input: asked.say,
    previous_response_id: asked.previous,
    temperature: 0,
    max_output_tokens: asked.max_tokens,
    chatrt: asked.options,
  });
});
commands.on('close', () => socket.close());
