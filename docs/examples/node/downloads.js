/** Models from the server: in the command, or by FetchModel, which resumes where it broke off (PROTOCOL.md, "Models"). */

import { Wrong, reasonOf, say } from './calls.js';
import { addUp, readSchema } from './models.js';
import { modelDigest, sha256 } from './names.js';

const ALLOWANCE = 65_536;

/**
 * Return the model that a command names. It is held already, or it is in the command, or it comes from the server.
 *
 * @typedef {import('./models.js').Values & {digest: string, schema_hash: Buffer}} Model
 * @param {object} command A TrainCmd or an EvaluateCmd.
 * @param {Model | undefined} held
 * @param {(call: Function) => Promise<any>} persist Makes a call with a session and a signal, until it succeeds.
 * @returns {Promise<Model>}
 */
export async function modelOf(command, held, persist) {
  const { model: small, schema_hash } = command;
  if (held && !held.schema_hash.equals(schema_hash)) held = undefined;
  if (held?.digest === command.model_digest) return held;
  const model =
    (small && made(command, small.header, small.payload)) ??
    (await fetchModel(command, held, persist)) ??
    (await fetchModel(command, undefined, persist));
  if (!model) throw new Wrong(`no model with the digest ${command.model_digest} arrived`, 'no_model');
  return model;
}

/** @returns {Promise<Model | undefined>} Undefined if the received model is not the wanted one. */
async function fetchModel(command, held, persist) {
  let [at, name, payload] = [0, '', Buffer.alloc(0)];
  return persist(async (session, signal) => {
    const request = { digest: command.model_digest, held_digest: held?.digest ?? '', offset: at, payload_name: name };
    const talk = session.talk('FetchModel', { request, signal });
    try {
      const header = (await talk.next())?.header;
      if (!header || !sizesOf(command, header, held)) return undefined;
      say(
        `${command.model_digest} comes as ${header.total_bytes} bytes${header.base_digest && ' to add to the model held'}`,
      );
      if (header.payload_name !== name) {
        [at, name, payload] = [0, header.payload_name, Buffer.alloc(Number(header.total_bytes))];
      }
      for (let message; (message = await talk.next());) {
        const { offset, data } = message.chunk ?? {};
        if (Number(offset) !== at || data.length > payload.length - at) return undefined;
        payload.set(data, at);
        at += data.length;
      }
      return at === payload.length ? made(command, header, payload, held) : undefined;
    } catch (error) {
      if (reasonOf(error) === 'bad_offset') [at, name] = [0, ''];
      error.failure = 'no_model';
      throw error;
    } finally {
      talk.call.cancel();
    }
  });
}

/** Return the lengths of the model's vectors, or undefined if the header is not that of the wanted model. */
function sizesOf(command, header, held) {
  const right =
    header.model_digest === command.model_digest &&
    header.schema_hash.equals(command.schema_hash) &&
    sha256(header.schema).equals(command.schema_hash) &&
    (header.base_digest === '' || header.base_digest === held?.digest) &&
    header.packets.length <= 1024;
  const sizes = right && readSchema(header.schema.toString('latin1'));
  const total = header.packets.reduce((sum, { bytes }) => sum + Number(bytes), 0);
  const most = 2 * (4 * sizes.parameters + 8 * sizes.buffers) + ALLOWANCE;
  return total === Number(header.total_bytes) && total <= most ? sizes : undefined;
}

/** Return the model in a complete payload, or undefined if it is not the wanted one. */
function made(command, header, payload, held) {
  const { model_digest: digest, schema_hash } = command;
  try {
    const sizes = sizesOf(command, header, held);
    const values = sizes && addUp(header.packets, payload, sizes, header.base_digest ? held : undefined);
    if (values && modelDigest(values.parameters, values.buffers, digest) === digest)
      return { ...values, digest, schema_hash };
  } catch {
    // The bytes are not a model.
  }
  return undefined;
}
