/** How to make, offer and push an update (PROTOCOL.md, "Updates"). */

import fs from 'node:fs';
import path from 'node:path';

import { Wrong, say } from './calls.js';
import { decode, encode } from './formats.js';
import { bytesOf, digest, updateName } from './names.js';
import { parse, serialise } from './protocol.js';

const SMALL = 65_536;
const CHUNK = 1 << 18;
const WITHOUT_RESIDUAL = ['fp32', 'uniform'];

/**
 * Make an update from what was learned, and from what earlier updates left out.
 *
 * @param {object} command The TrainCmd.
 * @param {string} clientId
 * @param {import('./models.js').Values} model The model that the training started from.
 * @param {import('./models.js').Values & {samples: number, seconds: number, metrics: object}} learned
 * @param {import('./keep.js').Residual | undefined} residual
 * @returns {{update: import('./keep.js').Update, said: object}} Also its content: what was learned, what earlier updates
 *   left out, both vectors as the server reads them, and what this update leaves out.
 */
export function makeUpdate(command, clientId, model, learned, residual) {
  const { run_id, epoch, round, model_digest: base_digest } = command;
  const schema_hash = command.schema_hash.toString('hex');
  const owed = residual?.run_id === run_id && residual.schema_hash === schema_hash ? residual.values : undefined;
  const delta = learned.parameters.map((x, i) => x - model.parameters[i]);
  const target = owed ? delta.map((x, i) => x + owed[i]) : delta;
  const vectors = [
    { vector: 'VECTOR_PARAMETERS', encoding: command.encoding, values: target },
    {
      vector: 'VECTOR_BUFFERS',
      encoding: { name: 'fp64' },
      values: learned.buffers.map((x, i) => x - model.buffers[i]),
    },
  ].filter(({ values }) => values.length);
  const parts = vectors.map(({ encoding, values }) => encode(encoding, values));
  const read = vectors.map(({ encoding, values }, i) => decode(encoding.name, parts[i], values.length));
  const [parameters = new Float32Array(0), buffers] = target.length ? read : [undefined, ...read];

  const payload = Buffer.concat(parts);
  const header = serialise('UpdateHeader', {
    ...{ run_id, epoch, round, client_id: clientId, base_digest, schema_hash: command.schema_hash },
    packets: vectors.map(({ vector, encoding }, i) => {
      return {
        vector,
        kind: 'KIND_DELTA',
        encoding: encoding.name,
        bytes: parts[i].length,
        num_samples: learned.samples,
      };
    }),
    ...{ total_bytes: payload.length, train_seconds: learned.seconds, metrics: learned.metrics },
  });
  const payload_digest = digest(payload);
  const name = updateName(header, payload_digest);
  const update = { offer: { header, payload_digest, name }, payload };
  const left = target.map((x, i) => x - parameters[i]);
  if (!WITHOUT_RESIDUAL.includes(command.encoding.name))
    update.residual = { run_id, schema_hash, epoch, round, name, values: left };
  return { update, said: { learned: delta, carried: owed, parameters, left: update.residual?.values, buffers } };
}

/** Write the content of an update to a file, so that somebody can check the server's arithmetic. */
export function dump(folder, clientId, { offer }, said) {
  const { round, packets } = parse('UpdateHeader', offer.header);
  const hex = Object.entries(said).map(([key, values]) => [
    key,
    values ? Buffer.from(bytesOf(values)).toString('hex') : '',
  ]);
  const { encoding, num_samples } = packets[0];
  const file = path.join(folder, `${clientId}.${round}.json`);
  const text = { name: offer.name, encoding, num_samples: Number(num_samples), ...Object.fromEntries(hex) };
  fs.writeFileSync(`${file}.new`, JSON.stringify(text));
  fs.renameSync(`${file}.new`, file);
}

/** Return whether an update from the disk is the one that this command asks for. */
export function isFor({ offer }, command) {
  const { run_id, round, base_digest } = parse('UpdateHeader', offer.header);
  return run_id === command.run_id && round === command.round && base_digest === command.model_digest;
}

/** Offer an update without sending it. @returns {Promise<boolean>} Whether the server has accepted it before. */
export async function offer(session, update, signal) {
  const talk = session.talk('PushUpdate', { signal });
  try {
    await talk.send({ offer: update.offer });
    return (await talk.next())?.reply === 'accepted';
  } finally {
    talk.call.cancel();
  }
}

/** Push an update. After a failure, use PushUpdate in any case, because the server may have the update. */
export async function push(session, update, failures, signal) {
  if (update.payload.length <= SMALL && failures === 0) return pushSmall(session, update, signal);
  const { offer, payload } = update;
  const talk = session.talk('PushUpdate', { signal });
  await talk.send({ offer });
  let answer = await talk.next();
  if (answer?.reply === 'resume_offset') {
    if (answer.resume_offset !== '0')
      say(`the server has ${answer.resume_offset} of ${payload.length} bytes; continuing there`);
    for (let at = Number(answer.resume_offset); at < payload.length; at += CHUNK) {
      await talk.send({ chunk: { offset: at, data: payload.subarray(at, at + CHUNK) } });
    }
    answer = await talk.next();
  }
  talk.call.end();
  if (answer?.reply !== 'accepted') throw new Wrong('the upload ended without an answer');
  await talk.next().catch(() => {}); // wait for the end of the call, and ignore its status
}

/** Push a small update. All small updates of a session use one call. */
async function pushSmall(session, { offer, payload }, signal) {
  const talk = (session.small ??= session.talk('PushSmallUpdates'));
  const cancel = () => talk.call.cancel();
  signal.addEventListener('abort', cancel);
  try {
    await talk.send({ offer, payload });
    if (!(await talk.next())) throw new Wrong('the small update was not answered');
  } catch (error) {
    session.small = undefined;
    throw error;
  } finally {
    signal.removeEventListener('abort', cancel);
  }
}
