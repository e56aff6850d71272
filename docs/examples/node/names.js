/** How updates, payloads and models are named (FORMATS.md, "Names"). */

import { createHash } from 'node:crypto';

import { blake3 } from '@noble/hashes/blake3.js';

/** @param {...Uint8Array} parts @returns {string} The digest of the concatenated parts. */
export function digest(...parts) {
  const hash = blake3.create();
  for (const part of parts) hash.update(part);
  return `blake3-${Buffer.from(hash.digest()).toString('hex')}`;
}

/** @param {Uint8Array} bytes @returns {Buffer} The hash of a schema, 32 bytes. */
export const sha256 = (bytes) => createHash('sha256').update(bytes).digest();

/**
 * @param {Float32Array} parameters
 * @param {Float64Array} buffers
 * @param {string} like A name to compare with. Protocol 1 named models by SHA-256, and these models keep their names.
 */
export function modelDigest(parameters, buffers, like = 'blake3-') {
  const parts = [bytesOf(parameters), bytesOf(buffers)];
  return like.startsWith('blake3-') ? digest(...parts) : sha256(Buffer.concat(parts)).toString('hex');
}

/** @param {Uint8Array} header A serialised UpdateHeader. @param {string} payloadDigest */
export const updateName = (header, payloadDigest) => digest(header, Buffer.from(payloadDigest, 'ascii'));

/** Return the memory of typed numbers as bytes. They are little endian, because client.js checks the machine. */
export const bytesOf = (values) => new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
