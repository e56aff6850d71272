/** The client: its sessions, the commands, and the work that continues from one session to the next. */

import { setTimeout as pause } from 'node:timers/promises';

import { Session, Wrong, backOff, isFinal, reasonOf, remedy, say } from './calls.js';
import { modelOf } from './downloads.js';
import { Keep } from './keep.js';
import { evaluate, knows, train } from './train.js';
import { dump, isFor, makeUpdate, offer, push } from './updates.js';

const MAX_TIMER = 2 ** 31 - 1;

/** The work for one command. It continues from session to session until it is done or no longer wanted. */
class Task {
  constructor(command) {
    this.command = command;
    this.controller = new AbortController();
    this.signal = this.controller.signal;
    this.aborted = new Promise((_, reject) => this.signal.addEventListener('abort', () => reject(this.signal.reason)));
    this.aborted.catch(() => {});
    this.renew(command);
  }

  /** Set a new deadline, because the command has arrived again. */
  renew({ deadline_seconds: seconds }) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.over('its deadline has passed'), Math.min(seconds * 1000, MAX_TIMER));
    this.timer.unref();
  }

  over(why) {
    clearTimeout(this.timer);
    this.controller.abort(new Wrong(`round ${this.command.round}: ${why}`));
  }
}

export class Client {
  /** @param {{server: string, id: string, state: string, dump?: string, ca?: Buffer, token?: string}} options As in client.js. */
  constructor(options) {
    this.options = options;
    this.id = options.id;
    this.keep = new Keep(options.state);
    this.doing = {};
    this.work = Promise.resolve(); // one piece of work after the other
    this.#lose();
  }

  // --- sessions

  /** Keep a session until told to stop. @throws An error that a new session would not solve. */
  async run() {
    let failures = 0;
    let refusedUntil = Infinity;
    let told;
    while (!this.stopping) {
      try {
        await this.#beInSession(() => ([failures, refusedUntil, told] = [0, Infinity]));
      } catch (error) {
        if (this.stopping) return;
        if (this.fault || isFinal(error)) throw this.fault ?? error;
        if (reasonOf(error) === 'id_in_use') {
          const seconds = Number(error.metadata.get('fl-retry-seconds')[0] ?? 0);
          refusedUntil = Math.min(refusedUntil, Date.now() + seconds * 1000);
          if (Date.now() >= refusedUntil) throw error;
        }
        if (error.code !== told) say(`not in session: ${error.message}`);
        told = error.code;
      } finally {
        this.#lose();
      }
      await pause(backOff(failures++) * 1000);
    }
  }

  /** @param {() => void} begun Called when both directions work. */
  async #beInSession(begun) {
    const session = (this.session = new Session(this.options));
    const reply = await session.join({
      ...{ client_id: this.id, protocol: 3, software: 'fedring-node-example/1', resume_secret: this.keep.secret },
      startup_seconds: (this.startup ??= process.uptime()),
    });
    this.keep.saveSecret(reply.resume_secret);
    this.keep.compare(reply.run_id, reply.last_accepted);
    this.last = reply.last_accepted?.name;
    const watch = (this.watch = session.talk('Watch', { patience: reply.lost_after_seconds }));
    const beat = () => watch.call.write({ matched: this.matched, ...this.doing });
    const timer = setInterval(beat, reply.heartbeat_seconds * 1000);
    try {
      beat();
      for (let event; (event = await watch.next());) {
        if (!this.matched) {
          this.matched = true;
          beat();
          begun();
          this.found(session);
          say(`in session with ${reply.software}, run ${reply.run_id}`);
        }
        if (event.event === 'train') this.#train(event.train);
        if (event.event === 'evaluate') this.#evaluate(event.evaluate);
        if (event.event === 'round_ended') this.#roundEnded(event.round_ended);
      }
    } finally {
      clearInterval(timer);
    }
  }

  /** End the session, if there is one. Work that needs a session waits for the next one. */
  #lose() {
    this.session?.end();
    this.session = this.watch = undefined;
    if (this.matched !== false) this.next = new Promise((resolve) => (this.found = resolve));
    this.matched = false;
  }

  /** Leave in an orderly way: close this side of Watch. A finished update that is not accepted yet is on the disk. */
  stop() {
    this.stopping = true;
    if (!this.watch) process.exit(0);
    this.watch.call.end();
    setTimeout(() => process.exit(0), 2000).unref();
  }

  /**
   * Repeat a call until it succeeds, is finally refused, or the task has ended.
   *
   * @template T
   * @param {Task} task
   * @param {(session: Session, failures: number) => Promise<T>} call
   * @returns {Promise<T>}
   */
  async #persist(task, call) {
    for (let failures = 0, damaged = 0; ; failures++) {
      task.signal.throwIfAborted();
      const session = await Promise.race([this.next, task.aborted]);
      try {
        return await call(session, failures);
      } catch (error) {
        task.signal.throwIfAborted();
        const what = error instanceof Wrong ? 'drop' : remedy(error);
        say(`round ${task.command.round}: ${error.message}: ${what}`);
        if (what === 'stop') this.fault = error;
        if (what === 'drop' || what === 'stop' || (what === 'again' && ++damaged === 3)) throw error;
        // The third try after "again" uses a new connection, and a new session has one.
        if ((what === 'join' || damaged === 2) && session === this.session) this.#lose();
        if (what !== 'again') await pause(backOff(failures) * 1000);
      }
    }
  }

  // --- commands

  #train(command) {
    const old = this.task;
    const same = old && ['run_id', 'epoch', 'round', 'model_digest'].every((key) => old.command[key] === command[key]);
    if (same && !old.done) return old.renew(command);
    if (same && old.accepted && old.accepted === this.last) return;
    if (same && old.failure) return this.#fail(old, old.failure);
    old?.over('another command has replaced it');
    const task = (this.task = new Task(command));
    this.#queue(task, async () => {
      try {
        await this.#settle(task);
        if (!this.keep.update) this.keep.saveUpdate(await this.#learn(task));
        await this.#push(task, this.keep.update);
      } catch (error) {
        if (task.signal.aborted || isRoundOver(error)) throw error;
        this.#fail(task, { reason: error.failure ?? 'train_error', detail: error.message });
      }
    });
  }

  #evaluate(command) {
    this.evaluation?.over('another evaluation has replaced it');
    const task = (this.evaluation = new Task(command));
    this.#queue(task, async () => {
      let counts = { correct: 0, total: 0, loss_sum: 0 };
      try {
        if (this.#knows(command.job)) counts = evaluate(await this.#model(task), this.id);
      } catch (error) {
        say(`round ${command.round} is not evaluated: ${error.message}`);
      }
      const report = { round: command.round, model_digest: command.model_digest, ...counts };
      await this.#persist(task, (session) => session.ask('ReportEvaluation', report));
    });
  }

  /** Stop working for a round that has ended. The update may have been accepted, if its answer is still on the way. */
  #roundEnded({ round, reason }) {
    if (this.task?.command.round !== round) return;
    say(`round ${round} has ended without this client's update${reason && `: ${reason}`}`);
    this.task.over('it has ended');
    const task = (this.task = new Task({ ...this.task.command, round: '', deadline_seconds: Infinity }));
    this.#queue(task, () => this.#settle(task));
  }

  #queue(task, job) {
    this.work = this.work
      .then(job)
      .catch((error) => say(error.message))
      .then(() => {
        task.done = true;
        this.doing = {};
        if (this.fault) this.#lose();
      });
  }

  #fail(task, failure) {
    say(`round ${task.command.round} continues without this client: ${failure.reason}, ${failure.detail}`);
    task.failure = failure;
    this.watch?.call.write({ matched: this.matched, failure: { round: task.command.round, ...failure } });
  }

  // --- work

  #knows(job) {
    return knows(job) || Boolean(this.options['any-model'] && job.mode === 'federated');
  }

  async #model(task) {
    this.doing = { activity: 'ACTIVITY_FETCHING' };
    this.held = await modelOf(task.command, this.held, (call) => {
      return this.#persist(task, (session) => call(session, task.signal));
    });
    return this.held;
  }

  async #learn(task) {
    const { command, signal } = task;
    if (!this.#knows(command.job)) throw new Wrong(`this client has no code for ${command.job.model}`, 'unknown_job');
    const model = await this.#model(task);
    const began = performance.now();
    const tell = (progress) => (this.doing = { activity: 'ACTIVITY_TRAINING', progress });
    const learned = await train(command, model, this.id, tell, signal);
    const seconds = (performance.now() - began) / 1000;
    const { update, said } = makeUpdate(command, this.id, model, { ...learned, seconds }, this.keep.residual);
    if (this.options.dump) dump(this.options.dump, this.id, update, said);
    return update;
  }

  /** Find out what became of an earlier update, unless it is for this command. It may be from before a restart. */
  async #settle(task) {
    const { update } = this.keep;
    if (!update || isFor(update, task.command)) return;
    let accepted = false;
    try {
      accepted = await this.#persist(task, (session) => offer(session, update, task.signal));
    } catch (error) {
      task.signal.throwIfAborted(); // the outcome is unknown, so the next command asks again
      if (this.fault) throw error;
    }
    if (!accepted) return this.keep.saveUpdate(undefined);
    this.#accepted(update);
    const { run_id, last_accepted } = this.session?.reply ?? {};
    this.keep.compare(run_id, last_accepted); // if a later update was accepted, it has sent what this one left out
  }

  async #push(task, update) {
    this.doing = { activity: 'ACTIVITY_PUSHING' };
    try {
      await this.#persist(task, (session, failures) => push(session, update, failures, task.signal));
    } catch (error) {
      if (!task.signal.aborted && !this.fault) this.keep.saveUpdate(undefined);
      throw Object.assign(error, { failure: 'update_refused' });
    }
    task.accepted = this.last = update.offer.name;
    this.#accepted(update);
  }

  #accepted(update) {
    this.keep.accepted(update);
    say(`accepted: ${update.offer.name}`);
  }
}

/** Return whether the round no longer waits for an update of this client. Then there is no failure to report. */
const isRoundOver = (error) =>
  ['unknown_round', 'round_closed', 'not_selected', 'not_a_worker', 'already_accepted_other'].includes(reasonOf(error));
