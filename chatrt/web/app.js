// The page: its key, its connection, and the parts around one chat.
//
// Knows: how the parts are put together, the address of the page. Does not know: the wire.
// Invariant: the key is in sessionStorage and in the client, nowhere else: not in the address, not
// in localStorage, not in a message on the page.

import { Chat } from './chat.js';
import { connect } from './chatrt.js';
import { Composer } from './composer.js';
import { announce, byId } from './dom.js';
import { HttpRoutes, addresses } from './http.js';
import { Sidebar } from './sidebar.js';
import { Store } from './storage.js';
import { copy } from './turn-view.js';

const KEY = 'chatrt.key'; // in the tab: gone with it
const TYPES_AHEAD = 'chatrt.types-ahead'; // in the browser: a choice, no secret
const RETRY_MS = 1500;
const BUSY = 'An answer is being written: stop it first, or wait for its end.';

const tab = new Store(() => sessionStorage);
const choices = new Store(() => localStorage);
const banner = byId('banner');
let client = null;
let retry = 0;
let isSending = false;

const composer = new Composer(named(), tab, { send, typed, page, asked: () => chat.asked() });
const sidebar = new Sidebar({
  open: (id) => (location.hash = id),
  deleted,
  failed: (error) => tellAbove(error.message),
  runs: (id) => chat.runs(id),
});
const chat = new Chat(tab, {
  onBegin: (id) => composer.move(id),
  onAway: () => tellBelow('The server is away: nothing was sent.'),
  onBusy: () => tellAbove(BUSY),
  onLost,
  onGone,
  onChange: showState,
  onTurn: () => sidebar.refresh(),
});

function tellAbove(text, { action = null, label = '' } = {}) {
  const button = byId('banner-action');
  byId('banner-text').textContent = text;
  if (!action && document.activeElement === button) composer.focus();
  banner.hidden = !text;
  button.hidden = !action;
  button.textContent = label;
  button.onclick = action;
}

/** The line below the prompt, until the server is back. */
function tellBelow(text) {
  byId('told').textContent = text;
  if (text) announce(text);
}

/** What was told is over with the next thing one does, unless it is about the connection. */
function tellNoMore() {
  if (client?.state === 'open') tellAbove('');
}

// The connection --------------------------------------------------------------------------------

/** Connects as soon as the server can; asks for a key where it needs one. */
async function start() {
  clearTimeout(retry);
  const apiKey = tab.get(KEY);
  try {
    // Asked before a socket is opened: browsers do not say why one was refused.
    const { data } = await new HttpRoutes(addresses().http, { apiKey }).call('GET', '/models');
    if (data.length === 0) return tryLater({ status: 503 }); // no model is loaded yet
    byId('model').textContent = data[0].id;
    client = await connect({ apiKey, onState });
  } catch (error) {
    return error.status === 401 ? askForKey(apiKey !== null) : tryLater(error);
  }
  byId('sign-in').hidden = true;
  byId('app').hidden = false;
  byId('sign-out').hidden = apiKey === null;
  tellAbove('');
  chat.use(client);
  sidebar.use(client);
  showState();
  await openNamed();
  composer.focus();
}

function tryLater(error) {
  byId('app').hidden = false;
  tellAbove(error.status === 503 ? 'The model is loading…' : `${error.message}. Trying again…`);
  retry = setTimeout(start, RETRY_MS);
}

function onState(state, { retryMs }) {
  if (state === 'open') {
    if (!banner.hidden) announce('Connected again');
    tellAbove('');
    tellBelow('');
    sidebar.refresh();
    if (chat.wanted) openNamed();
    else chat.catchUp();
  }
  if (state === 'reconnecting') {
    const seconds = Math.max(1, Math.round(retryMs / 1000));
    const label = 'Try now';
    tellAbove(`The connection was lost. Trying again in ${seconds} s.`, {
      action: () => client?.retryNow(),
      label,
    });
  }
  if (state === 'closed' && client) leave({ wrong: true });
  showState();
}

function askForKey(wrong) {
  tab.set(KEY, null);
  byId('app').hidden = true;
  byId('sign-in').hidden = false;
  byId('key-error').textContent = wrong ? 'The server does not take this key.' : '';
  byId('key').setAttribute('aria-invalid', String(wrong));
  byId('key').focus();
}

byId('key-form').onsubmit = (event) => {
  event.preventDefault();
  const key = byId('key').value.trim();
  byId('key').value = '';
  if (!key) return;
  tab.set(KEY, key);
  start();
};

function signOut() {
  leave({ wrong: false });
  tab.clear();
  composer.clear();
  history.replaceState(null, '', location.pathname);
}

/** Asks for a key; what was typed, and where, is there for whoever has one again. */
function leave({ wrong }) {
  const left = client;
  client = null;
  left?.close();
  byId('announcer').replaceChildren();
  tellBelow('');
  chat.clear();
  chat.use(null);
  sidebar.use(null);
  askForKey(wrong);
}
byId('sign-out').onclick = () => signOut();

for (const event of ['online', 'pageshow']) addEventListener(event, () => client?.retryNow());
document.addEventListener('visibilitychange', () => {
  if (!document.hidden) client?.retryNow();
});

// Conversations ---------------------------------------------------------------------------------

/** The conversation that the address names, '' for none; an id is no key. */
function named() {
  return location.hash.slice(1);
}

/** Opens the conversation that the address names. */
async function openNamed() {
  const id = named();
  if (!client) return;
  if (id === (chat.id ?? '')) return chat.stay();
  closeDrawer();
  tellNoMore();
  if (!id) return chat.clear();
  try {
    await chat.open(id);
  } catch (error) {
    if (error.status === 404) tellGone();
    else if (client?.state === 'open') tellAbove(error.message);
    // Else it is told already; the conversation is opened once there is a connection again.
  }
}
addEventListener('hashchange', openNamed);

function onLost(id, text) {
  composer.giveBack(id, text);
  tellAbove('The server does not have your last message: it is in the prompt again.');
}

function onGone(id, text) {
  if (named() === id) history.replaceState(null, '', location.pathname);
  composer.leave(id, text);
  showState();
  tellAbove('The conversation was deleted elsewhere: your message is the draft of a new chat.');
}

function tellGone() {
  history.replaceState(null, '', location.pathname);
  if (!chat.id) composer.move(''); // what was typed before one could know
  chat.clear();
  const offer = { action: newChat, label: 'New chat' };
  tellAbove('There is no such conversation, or no longer.', offer);
}

function newChat() {
  history.pushState(null, '', location.pathname);
  tellNoMore();
  chat.clear();
  closeDrawer();
  composer.focus();
}
byId('new-chat').onclick = newChat;

function deleted(id) {
  if (id === chat.id) newChat();
  composer.forget(id);
}

function showState({ id, wanted, running: turn } = chat) {
  const running = turn !== null;
  byId('stop').hidden = !running;
  byId('send').hidden = running;
  byId('send').disabled = client?.state !== 'open';
  const address = wanted ?? id;
  if (address && named() !== address) history.replaceState(null, '', `#${address}`);
  composer.show(id ?? named());
  byId('turns').classList.toggle('busy', running);
  if (!running && byId('banner-text').textContent === BUSY) tellNoMore();
  sidebar.mark(id);
}

// The prompt ------------------------------------------------------------------------------------

async function send() {
  const { text } = composer;
  if (!text.trim() || isSending || chat.running) return;
  if (client?.state !== 'open') return tellBelow('The server is away: your text stays here.');
  isSending = true;
  tellNoMore();
  const { isAsked, putBack } = composer.take();
  try {
    if (await chat.send(text)) isAsked();
    else putBack();
  } catch (error) {
    putBack();
    if (client?.state === 'open') tellAbove(error.message); // else it is told already
  } finally {
    isSending = false;
  }
}

function typed(text) {
  if (typesAhead.checked) chat.typing(text);
}

function page(by) {
  byId('scroller').scrollBy(0, by * 0.85 * byId('scroller').clientHeight);
}

byId('prompt-form').onsubmit = (event) => {
  event.preventDefault();
  send();
};
const typesAhead = byId('types-ahead');
typesAhead.checked = choices.get(TYPES_AHEAD) !== 'no';
typesAhead.onchange = () => {
  choices.set(TYPES_AHEAD, typesAhead.checked ? 'yes' : 'no');
  if (!typesAhead.checked) chat.typing('');
};

function stop() {
  chat.stop();
  if (chat.running?.answer?.ended === false && client?.state !== 'open') {
    tellBelow('The answer stops when the server is back.');
  }
}
byId('stop').onclick = () => {
  stop();
  composer.focus();
};

// Everything else -------------------------------------------------------------------------------

const drawer = byId('sidebar');
const opener = byId('open-drawer');

function closeDrawer() {
  drawer.classList.remove('open');
  opener.setAttribute('aria-expanded', 'false');
}
opener.onclick = () => {
  const isOpen = drawer.classList.toggle('open');
  opener.setAttribute('aria-expanded', String(isOpen));
  if (isOpen) byId('new-chat').focus();
};
byId('shade').onclick = closeDrawer;

addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.isComposing) return;
  if (drawer.classList.contains('open')) {
    closeDrawer();
    opener.focus();
  } else {
    stop();
  }
});

byId('skip').onclick = (event) => {
  event.preventDefault(); // the address names a conversation, and nothing else
  composer.focus();
};

byId('turns').addEventListener('click', ({ target }) => {
  const code = target.closest('.code');
  if (code && target.classList.contains('copy')) copy(target, code.querySelector('code').textContent);
});

start();
