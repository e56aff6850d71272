/** Models: two vectors, the schema that says what is in them, and how their packets add up (FORMATS.md). */

import { decode } from './formats.js';

const MAX_TENSORS = 100_000;
const MAX_VALUES = 2 ** 40;

/**
 * @typedef {{parameters: Float32Array, buffers: Float64Array}} Values
 * @typedef {{vector: string, kind: string, encoding: string, bytes: number}} Packet As in payload.proto.
 * @typedef {{name: string, shape: number[], dtype: string, role: string}} Tensor
 */

/**
 * Read a schema. Refuse any spelling other than the canonical one.
 *
 * @param {string} json
 * @returns {{tensors: Tensor[], parameters: number, buffers: number}} The tensors, and the lengths of the two vectors.
 */
export function readSchema(json) {
  const rows = JSON.parse(json);
  if (!Array.isArray(rows) || rows.length > MAX_TENSORS) throw new RangeError('the schema is not a list, or is too long');
  const sizes = { parameter: 0, buffer: 0 };
  const tensors = rows.map(([name, shape, dtype, role]) => {
    const right = typeof name === 'string' && typeof dtype === 'string' && Object.hasOwn(sizes, role);
    if (!right || !shape.every((size) => Number.isSafeInteger(size) && size >= 0))
      throw new RangeError(`tensor ${name}`);
    sizes[role] += shape.reduce((product, size) => product * size, 1);
    return { name, shape, dtype, role };
  });
  const canonical = JSON.stringify(tensors.map(({ name, shape, dtype, role }) => [name, shape, dtype, role])).replace(
    /[\u007f-\uffff]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, '0')}`,
  );
  if (canonical !== json) throw new RangeError('the schema is not in canonical form');
  if (new Set(tensors.map(({ name }) => name)).size < rows.length) throw new RangeError('two tensors have the same name');
  if (!(sizes.parameter + sizes.buffer <= MAX_VALUES)) throw new RangeError('the model is too large');
  return { tensors, parameters: sizes.parameter, buffers: sizes.buffer };
}

/**
 * Return the model in a payload. Use one addition for each value of each packet, in the type of the vector.
 *
 * @param {Packet[]} packets
 * @param {Uint8Array} payload
 * @param {{parameters: number, buffers: number}} sizes
 * @param {Values | undefined} held The model to add to, if the header names one.
 * @returns {Values}
 */
export function addUp(packets, payload, sizes, held) {
  const vectors = { VECTOR_PARAMETERS: held?.parameters, VECTOR_BUFFERS: held?.buffers };
  const begun = new Set();
  let at = 0;
  for (const { vector, kind, encoding, bytes } of packets) {
    const dim = vector === 'VECTOR_BUFFERS' ? sizes.buffers : sizes.parameters;
    if ((vector === 'VECTOR_BUFFERS') !== (encoding === 'fp64')) throw new RangeError(`${vector} as ${encoding}`);
    const values = decode(encoding, payload.subarray(at, (at += Number(bytes))), dim);
    const first = !begun.has(vector) && (!held || kind === 'KIND_WEIGHTS');
    vectors[vector] = first ? values : vectors[vector].map((x, i) => x + values[i]);
    begun.add(vector);
  }
  const { VECTOR_PARAMETERS: parameters = new Float32Array(0), VECTOR_BUFFERS: buffers = new Float64Array(0) } =
    vectors;
  if (parameters.length !== sizes.parameters || buffers.length !== sizes.buffers)
    throw new RangeError('packets are missing');
  return { parameters, buffers };
}
