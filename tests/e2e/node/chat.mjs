// Chats with a server through openai-node's ResponsesWS, unmodified; prints one JSON line a turn.
// Arguments: base URL, API key, then one prompt for each turn.
import OpenAI from 'openai';
import { ResponsesWS } from 'openai/resources/responses/ws';

const [baseURL, apiKey, ...prompts] = process.argv.slice(2);
const socket = new ResponsesWS(new OpenAI({ baseURL, apiKey }));
let previous;

function ask() {
  socket.send({
    type: 'response.create',
    input: prompts.shift(),
    temperature: 0,
    max_output_tokens: 24,
    ...(previous && { previous_response_id: previous }),
  });
}

let text = '';
socket.on('response.output_text.delta', (event) => (text += event.delta));
const ended = ({ response }) => {
  console.log(JSON.stringify({ text, status: response.status, usage: response.usage }));
  text = '';
  previous = response.id;
  if (prompts.length > 0) ask();
  else socket.close();
};
socket.on('response.completed', ended);
socket.on('response.incomplete', ended);
socket.on('error', (error) => {
  console.error(error.message);
  process.exit(1);
});
ask();
