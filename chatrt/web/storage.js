// What the browser keeps for the page, and what to do where it does not.
//
// Knows: that storage may be full, or refused altogether. Does not know: what is kept, or for whom.
// Invariant: nothing here throws; what was set is read back until the page is left, kept or not.

export class Store {
  #open;
  #unkept = new Map(); // what the browser took no more of

  /** `open()` is the browser's storage; to name it is refused where cookies are. */
  constructor(open) {
    this.#open = open;
  }

  /** The text under `name`, or null. */
  get(name) {
    return this.#unkept.get(name) ?? this.#tried((storage) => storage.getItem(name)) ?? null;
  }

  /** Keeps a text; an empty one, or null, is none. */
  set(name, text) {
    this.#unkept.delete(name);
    this.#tried((storage) => storage.removeItem(name)); // an older text must not come back
    if (!text) return;
    const isKept = this.#tried((storage) => {
      storage.setItem(name, text);
      return true;
    });
    if (!isKept) this.#unkept.set(name, text);
  }

  /** The object that `setObject` kept under `name`; an empty one for none. */
  getObject(name) {
    try {
      return JSON.parse(this.get(name)) ?? {};
    } catch {
      return {};
    }
  }

  setObject(name, object) {
    this.set(name, Object.keys(object).length > 0 ? JSON.stringify(object) : null);
  }

  /** Forgets everything. */
  clear() {
    this.#unkept.clear();
    this.#tried((storage) => storage.clear());
  }

  #tried(work) {
    try {
      return work(this.#open());
    } catch {
      return null; // full, or refused
    }
  }
}
