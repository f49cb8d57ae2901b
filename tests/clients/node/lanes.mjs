// openai-node's lanes over one ResponsesWS, unmodified: a fork of one answer on two of them, a stop
// on one while the other is answered, a refusal on one. Prints one line of JSON.
// Argument: base URL. The key is in OPENAI_API_KEY, where the package looks for it.
import OpenAI from 'openai';
import { ResponsesWebSocketSession } from 'openai/lib/responses/responses-websocket-session';
import { ResponsesWS } from 'openai/resources/responses/ws';

const socket = new ResponsesWS(new OpenAI({ baseURL: process.argv[2] }));
for await (const { type } of socket.stream()) if (type === 'open') break;
const session = new ResponsesWebSocketSession(socket, {
  maxLanes: 8,
  maxBufferedEvents: 4096,
  maxBufferedBytes: 2 ** 24,
});
const greedy = { temperature: 0, max_output_tokens: 24 };
const summary = (response) => ({
  text: response.output_text,
  status: response.status,
  cached: response.usage.input_tokens_details.cached_tokens,
  total: response.usage.total_tokens,
});
const order = [];
let toStop = false;
socket.on('response.output_text.delta', (event) => {
  order.push(event.stream_id);
  if (toStop && event.stream_id === 'a') {
    toStop = false;
    socket.send({ type: 'response.cancel', response_id: event.response_id });
  }
});

const plain = session.lane();
plain.create({ input: 'My name is Ada. Say hello.', ...greedy });
const root = await plain.finalResponse();

const [a, b] = ['a', 'b'].map((name) => session.lane(name));
order.length = 0;
for (const lane of [a, b]) {
  lane.create({ input: 'What is my name?', previous_response_id: root.id, ...greedy });
}
const forks = await Promise.all([a.finalResponse(), b.finalResponse()]);
const switches = order.filter((name, index) => index > 0 && name !== order[index - 1]).length;

toStop = true;
const endless = { max_output_tokens: 700, chatrt: { ignore_eos: true } };
a.create({ input: 'Count to fifty.', ...greedy, ...endless });
b.create({ input: 'What is the capital of France?', ...greedy });
const [stopped, meanwhile] = await Promise.all([a.finalResponse(), b.finalResponse()]);

socket.on('error', () => {});
b.create({ input: 'Hi.', previous_response_id: 'resp_nowhere' });
const refused = await b.finalResponse().catch(({ error }) => error.error.code);

const told = { root, a: forks[0], b: forks[1], stopped, meanwhile };
for (const name in told) told[name] = summary(told[name]);
console.log(JSON.stringify({ ...told, switches, refused }));
session.close();
socket.close();
