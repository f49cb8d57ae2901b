// Types of chatrt.js. What the wire's objects hold beyond this is in docs/protocol.md.

export interface ConnectOptions {
  /** ws, wss, http or https; `/v1` and `/responses` may be left out. In a page: the page's own. */
  url?: string;
  /** Goes out in a subprotocol and in a header, never in an address. */
  apiKey?: string | null;
  /** Hears of each change; `retryMs` comes with 'reconnecting', `error` with 'closed'. */
  onState?: (state: ClientState, details: { retryMs?: number; error?: ChatrtError }) => void;
  /** In place of the global ones, for Node before 22. */
  WebSocket?: new (url: string, protocols?: string[]) => WebSocket;
  fetch?: typeof fetch;
  /**
   * When a connection is given up, in milliseconds: one that does not open within `openMs`
   * (15,000); one that, while something is waited for, is silent for `quietMs` (15,000) and then
   * does not answer a question within `replyMs` (10,000).
   */
  patience?: { openMs?: number; quietMs?: number; replyMs?: number };
}

export type ClientState = 'connecting' | 'open' | 'reconnecting' | 'closed';

export interface InputItem {
  type?: 'message';
  role: 'user' | 'system' | 'developer' | 'assistant';
  content: string | { type: string; text: string }[];
}

/** The fields of `response.create`. */
export interface ResponseRequest {
  input: string | InputItem[];
  model?: string;
  instructions?: string;
  previous_response_id?: string;
  conversation?: string;
  generate?: boolean;
  store?: boolean;
  max_output_tokens?: number;
  temperature?: number;
  top_p?: number;
  truncation?: 'auto' | 'disabled';
  metadata?: Record<string, string>;
  chatrt?: {
    seed?: number;
    top_k?: number;
    min_p?: number;
    stop?: string[];
    new_branch?: boolean;
    timing?: 'response' | 'token';
    [option: string]: unknown;
  };
  [field: string]: unknown;
}

export interface OutputItem {
  id: string;
  type: 'message';
  role: 'assistant';
  status: string;
  content: { type: 'output_text'; text: string }[];
}

export interface ChatResponse {
  id: string;
  status: 'in_progress' | 'completed' | 'incomplete' | 'cancelled' | 'failed';
  output: OutputItem[];
  previous_response_id: string | null;
  conversation?: { id: string };
  error: { code: string; message: string } | null;
  incomplete_details: { reason: string } | null;
  usage: {
    input_tokens: number;
    input_tokens_details: { cached_tokens: number; cache_write_tokens: number };
    output_tokens: number;
    total_tokens: number;
  } | null;
  /** The turn's own figures: `ttft_ms`, `stages`, `decode_tps`, `kv`, … */
  chatrt?: Record<string, any>;
  [field: string]: unknown;
}

export interface ResponseEvent {
  type: string;
  sequence_number?: number;
  stream_id?: string;
  delta?: string;
  response?: ChatResponse;
  [field: string]: unknown;
}

export interface Conversation {
  id: string;
  title: string | null;
  created_at: number;
  updated_at: number;
  num_turns: number;
  last_response_id: string | null;
}

export interface Item {
  id: string;
  type: 'message';
  role: string;
  content: { type: string; text: string }[];
}

export interface StoredTurn {
  id: string;
  previous_response_id: string | null;
  created_at: number;
  status: string;
  input: Item[];
  output: Item[];
}

/** What a server refused, or that it cannot be reached. */
export class ChatrtError extends Error {
  /**
   * The server's code, or one of this module's own: `no_websocket` (this JavaScript has none),
   * `invalid_api_key` (it cannot be one), `invalid_value` (the address), `server_unavailable`,
   * `connection_lost`, `response_lost`, `cancelled` (stopped before it was sent), `closed`.
   */
  readonly code: string;
  /** The HTTP status that belongs to it, 0 where no server answered. */
  readonly status: number;
  readonly param: string | null;
}

/** One answer: an async iterable of its events; each reader gets all, and ends behind the last. */
export interface Answer extends AsyncIterable<ResponseEvent> {
  readonly id: string | null;
  /** All text so far. */
  readonly text: string;
  /** The response object as it began, and as it ended. */
  readonly begun: ChatResponse | null;
  readonly response: ChatResponse | null;
  readonly error: ChatrtError | null;
  readonly ended: boolean;
  readonly lastSequenceNumber: number;
  /** From `stream` to the first text, as seen here. */
  readonly ttftMs: number | null;
  /** Settles with the end: a refusal or a lost answer rejects. */
  readonly finished: Promise<ChatResponse>;
  cancel(): void;
}

/** Sends what a person types once they pause: the newest text only. */
export interface Typist {
  type(request: ResponseRequest): void;
  /** Forgets it, and takes no room on the connection any more until something is typed again. */
  drop(): void;
}

export class Client {
  constructor(options?: ConnectOptions);
  readonly ready: Promise<Client>;
  readonly state: ClientState;
  /** Begins a turn. `typed` is what was typed of it ahead. */
  stream(request: string | ResponseRequest, options?: { typed?: Typist | null }): Answer;
  /** A turn as a whole. */
  send(request: string | ResponseRequest, options?: { typed?: Typist | null }): Promise<ChatResponse>;
  /** Goes on with a response that runs, or ended a moment ago. */
  resume(responseId: string, afterSequenceNumber?: number): Answer;
  cancel(answer: Answer): void;
  typeAhead(): Typist;
  /**
   * Answers that others begin in a conversation, and those that run, for any number of listeners.
   * Resolves, once the server agreed, with what ends the watch: answers that were begun are still
   * told to their end. Rejects where the server refuses; a lost connection ends no watch.
   */
  watch(conversationId: string, onAnswer: (answer: Answer) => void): Promise<() => void>;
  createConversation(title?: string): Promise<Conversation>;
  renameConversation(id: string, title: string): Promise<Conversation>;
  models(): Promise<{ id: string; max_context?: number }[]>;
  conversations(query?: string): Promise<Conversation[]>;
  items(id: string): Promise<Item[]>;
  turns(id: string): Promise<StoredTurn[]>;
  response(id: string): Promise<ChatResponse>;
  deleteConversation(id: string): Promise<unknown>;
  deleteResponse(id: string): Promise<unknown>;
  /**
   * Ends the pause before the next try to reconnect; asks an open connection whether it still is
   * one. For the moments when a machine wakes up, or is on a network again.
   */
  retryNow(): void;
  close(): void;
}

/** A connected client. Rejects where the server cannot be reached, or refuses the key. */
export function connect(options?: ConnectOptions): Promise<Client>;
