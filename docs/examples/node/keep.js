/** What the client keeps over restarts (PROTOCOL.md, "What a client keeps"): three files in its own folder. */

import fs from 'node:fs';
import path from 'node:path';
import v8 from 'node:v8';

/**
 * @typedef {{run_id: string, schema_hash: string, epoch: string, round: string, name: string, values: Float32Array}} Residual
 *   What past updates have left out, and the newest of these updates.
 * @typedef {{header: Buffer, payload_digest: string, name: string}} Offer The offer, with the same bytes each time.
 * @typedef {{offer: Offer, payload: Buffer, residual?: Residual}} Update A finished update, and what it leaves out.
 */
export class Keep {
  /** @param {string} folder Created if it does not exist, readable only by its owner. */
  constructor(folder) {
    fs.mkdirSync(folder, { recursive: true, mode: 0o700 });
    this.folder = folder;
    /** @type {string} */
    this.secret = this.#read('resume_secret') ?? '';
    /** @type {Update | undefined} */
    this.update = this.#read('update');
    /** @type {Residual | undefined} */
    this.residual = this.#read('residual');
  }

  saveSecret(secret) {
    if (secret !== this.secret) this.#write('resume_secret', secret);
    this.secret = secret;
  }

  /** @param {Update | undefined} update A new one, before its first byte is sent, or undefined when it is finished. */
  saveUpdate(update) {
    if (update !== this.update) this.#write('update', update);
    this.update = update;
  }

  /** @param {Residual | undefined} residual */
  saveResidual(residual) {
    if (residual !== this.residual) this.#write('residual', residual);
    this.residual = residual;
  }

  /** Replace the residual after an update was accepted. The order matters if the process is killed in between. */
  accepted(update) {
    this.saveResidual(update.residual);
    if (this.update === update) this.saveUpdate(undefined);
  }

  /**
   * Drop the residual if an update that this client does not know has sent its content since.
   *
   * @param {string} run The run_id of the server.
   * @param {{epoch: string, round: string, name: string} | null} last The newest update that the server has accepted.
   */
  compare(run, last) {
    if (!last) return;
    const kept = this.residual;
    if (kept?.run_id !== run || kept.name === last.name) return;
    const [ours, theirs] = [kept, last].map(({ epoch, round }) => (BigInt(epoch) << 64n) + BigInt(round));
    if (theirs >= ours) this.saveResidual(undefined);
  }

  #read(name) {
    const file = path.join(this.folder, name);
    return fs.existsSync(file) ? v8.deserialize(fs.readFileSync(file)) : undefined;
  }

  /** Write the file completely, then replace the older one. */
  #write(name, value) {
    const file = path.join(this.folder, name);
    if (value === undefined) {
      fs.rmSync(file, { force: true });
    } else {
      const handle = fs.openSync(`${file}.new`, 'w', 0o600);
      fs.writeSync(handle, v8.serialize(value));
      fs.fsyncSync(handle);
      fs.closeSync(handle);
      fs.renameSync(`${file}.new`, file);
    }
    const folder = fs.openSync(this.folder);
    fs.fsyncSync(folder);
    fs.closeSync(folder);
  }
}
