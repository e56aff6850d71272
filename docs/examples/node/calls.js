/** Calls as promises, a session with its connection, and what to do when a call fails (see the tables of PROTOCOL.md). */

import grpc from '@grpc/grpc-js';

import { services } from './protocol.js';

const { status } = grpc;
const words = (text) => text.split(' ');

const JOIN = words(
  'no_session gone no_identity bad_token expired_token revoked_token revoked_certificate tokens_off token_in_plaintext',
);
const AGAIN = words('bad_request digest_mismatch bad_chunk truncated');
const STOP = words('two_identities not_client superseded wrong_protocol bad_client_id other_client');
const STOP_AT_JOIN = [...STOP, ...JOIN.slice(2), 'bad_request'];
const LATER = [
  ...[status.UNAVAILABLE, status.RESOURCE_EXHAUSTED, status.DEADLINE_EXCEEDED, status.CANCELLED],
  ...[status.INTERNAL, status.UNKNOWN, status.DATA_LOSS],
];

/** Write a line for the operator. */
export const say = (text) => console.error(`${new Date().toISOString()} ${text}`);

/** A fault on this side, which repeating a call does not help. `failure` is the reason for a Failure message. */
export class Wrong extends Error {
  constructor(text, failure) {
    super(text);
    this.failure = failure;
  }
}

export const reasonOf = (error) => error.metadata?.get('fl-reason')[0] ?? '';

/**
 * Return what to do about a call that failed. A reason that is not listed here is decided by its status. These are all
 * reasons that the tables mark with "drop", except those whose status would otherwise mean "later".
 *
 * @returns {'again' | 'later' | 'join' | 'drop' | 'stop'}
 */
export function remedy(error) {
  const reason = reasonOf(error);
  if (JOIN.includes(reason)) return 'join';
  if (AGAIN.includes(reason)) return 'again';
  if (STOP.includes(reason)) return 'stop';
  if (reason === 'too_large' || (reason === 'damaged_blob' && error.code === status.DATA_LOSS)) return 'drop';
  return LATER.includes(error.code) ? 'later' : 'drop';
}

/** Return whether a failed Join, or a Watch that ended with this error, is final. Anything else is tried again. */
export const isFinal = (error) => STOP_AT_JOIN.includes(reasonOf(error));

/** Return how many seconds to wait after this number of failures in a row. */
export const backOff = (failures) => Math.random() * Math.min(5, 0.2 * 2 ** failures);

/** A call with streams. It is cancelled, and fails, if nothing moves for `patience` seconds while somebody waits. */
class Talk {
  constructor(call, patience) {
    this.call = call;
    this.patience = patience;
    this.messages = call[Symbol.asyncIterator]();
    this.failed = new Promise((_, reject) => call.on('error', reject));
    this.failed.catch(() => {});
  }

  /** Return the server's next message, or undefined at the end. */
  async next() {
    return (await this.#patiently(this.messages.next())).value;
  }

  async send(message) {
    await this.#patiently(new Promise((written) => this.call.write(message, written)));
  }

  async #patiently(moved) {
    const timer = setTimeout(() => this.call.cancel(), this.patience * 1000);
    try {
      return await Promise.race([moved, this.failed]);
    } finally {
      clearTimeout(timer);
    }
  }
}

/** A session with its own connection. Every new session uses a new connection. */
export class Session {
  /** @param {{server: string, ca?: Buffer, key?: Buffer, cert?: Buffer, token?: string}} options */
  constructor({ server, ca, key, cert, token }) {
    const credentials = ca ? grpc.credentials.createSsl(ca, key, cert) : grpc.credentials.createInsecure();
    this.channel = new grpc.Channel(server, credentials, { 'grpc.use_local_subchannel_pool': 1 });
    this.metadata = new grpc.Metadata();
    if (token) this.metadata.set('authorization', `Bearer ${token}`);
    this.stubs = {};
    for (const name of ['TrainCmdService', 'ModelBlobService', 'ClientUpdateService']) {
      const stub = new services[name](server, credentials, { channelOverride: this.channel });
      for (const method of Object.keys(services[name].service)) this.stubs[method] = stub;
    }
    this.open = new Set();
  }

  /** Open the session. All later calls belong to it. @param {object} request A JoinRequest. */
  async join(request) {
    this.reply = await this.ask('Join', request);
    this.metadata.set('fl-session', this.reply.session_id);
    return this.reply;
  }

  /** Make a call with one message and one reply. */
  ask(method, request) {
    const options = { deadline: Date.now() + 10_000 };
    return new Promise((resolve, reject) => {
      this.stubs[method][method](request, this.metadata, options, (error, reply) =>
        error ? reject(error) : resolve(reply),
      );
    });
  }

  /**
   * Begin a call with streams. It ends with the session, or when `signal` aborts it.
   *
   * @param {string} method
   * @param {{request?: object, patience?: number, signal?: AbortSignal}} options
   */
  talk(method, { request, patience = this.reply.no_progress_seconds, signal } = {}) {
    const call = this.stubs[method][method](...(request ? [request] : []), this.metadata);
    const cancel = () => call.cancel();
    this.open.add(call);
    signal?.addEventListener('abort', cancel);
    call.on('status', () => {
      this.open.delete(call);
      signal?.removeEventListener('abort', cancel);
    });
    return new Talk(call, patience);
  }

  end() {
    for (const call of this.open) call.cancel();
    this.channel.close();
  }
}
