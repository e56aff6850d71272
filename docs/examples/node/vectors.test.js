/** Tests of all examples of protos/vectors.json, on which every implementation must agree. Run them with `npm test`. */

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';

import { decode, encode } from './formats.js';
import { addUp, readSchema } from './models.js';
import { bytesOf, digest, modelDigest, sha256, updateName } from './names.js';
import { parse, serialise } from './protocol.js';
import { content, rawFrame } from './zstd.js';

const examples = JSON.parse(readFileSync(new URL('../../../protos/vectors.json', import.meta.url), 'utf8'));

const hex = (bytes) => Buffer.from(bytes).toString('hex');
const unhex = (text) => Buffer.from(text, 'hex');

/** Return a vector of the file. It is a list, or a size and the entries other than 0. */
function vector(kind, written) {
  if (Array.isArray(written)) return kind.from(written);
  const out = new kind(written.size);
  for (const [at, value] of written.entries) out[at] = value;
  return out;
}

const kindOf = (encoding) => (encoding === 'fp64' ? Float64Array : Float32Array);
const same = (got, wanted) => assert.equal(digest(bytesOf(got)), digest(bytesOf(wanted)));

/** Return the packets of an example, as a header lists them, and the payload. */
function payloadOf({ packets }) {
  const listed = packets.map(({ vector, kind, encoding, encoded }) => ({
    vector: `VECTOR_${vector.toUpperCase()}`,
    kind: `KIND_${kind.toUpperCase()}`,
    encoding,
    bytes: encoded.length / 2,
  }));
  return [listed, unhex(packets.map(({ encoded }) => encoded).join(''))];
}

for (const { shows, size, name } of examples.names) {
  test(`name: ${shows}`, () => assert.equal(digest(Uint8Array.from({ length: size }, (_, i) => i % 251)), name));
}

for (const { json, hash, parameters, buffers } of examples.schemas) {
  test(`schema: ${json}`, () => {
    assert.equal(hex(sha256(Buffer.from(json))), hash);
    const schema = readSchema(json);
    assert.deepEqual([schema.parameters, schema.buffers], [parameters, buffers]);
  });
}

for (const { shows, json } of examples.refused_schemas) {
  test(`refused schema: ${shows}`, () => assert.throws(() => readSchema(json)));
}

for (const { parameters, buffers, digest: wanted, protocol_1_digest: old } of examples.models) {
  test(`model: ${wanted}`, () => {
    const values = [Float32Array.from(parameters), Float64Array.from(buffers)];
    assert.equal(modelDigest(...values), wanted);
    assert.equal(modelDigest(...values, old), old);
  });
}

for (const { shows, header, header_says: says, payload, payload_digest: named, name } of examples.updates) {
  test(`update: ${shows}`, () => {
    assert.equal(digest(unhex(payload)), named);
    assert.equal(updateName(unhex(header), named), name);
    const read = parse('UpdateHeader', unhex(header));
    assert.deepEqual(
      [
        read.run_id,
        read.epoch,
        read.round,
        read.client_id,
        read.base_digest,
        hex(read.schema_hash),
        read.train_seconds,
      ],
      [says.run_id, String(says.epoch), String(says.round), says.client_id, says.base_digest, says.schema_hash, 1.5],
    );
    assert.deepEqual(parse('UpdateHeader', serialise('UpdateHeader', read)), read);
  });
}

for (const { shows, encoding, values, exact, encoded, decoded } of examples.encodings) {
  test(`encoding: ${shows}`, () => {
    const kind = kindOf(encoding.name);
    const wanted = vector(kind, decoded);
    same(decode(encoding.name, unhex(encoded), wanted.length), wanted);
    const written = encode(encoding, vector(kind, values));
    if (exact) assert.equal(hex(written), encoded);
    same(decode(encoding.name, written, wanted.length), wanted);
  });
}

for (const { shows, encoding, size, encoded, reason } of examples.refused_payloads) {
  test(`refused payload: ${encoding}: ${shows}`, () =>
    assert.throws(() => decode(encoding, unhex(encoded), size), { reason }));
}

for (const example of examples.downloads) {
  test(`download: ${example.shows}`, () => {
    const { parameters, buffers, digest: wanted } = example.result;
    const held = example.held && {
      parameters: Float32Array.from(example.held.parameters),
      buffers: Float64Array.from(example.held.buffers),
    };
    const sum = addUp(
      ...payloadOf(example),
      { parameters: parameters.length, buffers: buffers.length },
      held ?? undefined,
    );
    assert.equal(modelDigest(sum.parameters, sum.buffers), wanted);
  });
}

for (const { shows, schema: json, base, updates, result } of examples.aggregations) {
  test(`aggregation: ${shows}`, () => {
    const schema = readSchema(json);
    const { tensors } = schema;
    const size = (role) => base[role].length;
    const wholes = tensors
      .filter(({ role }) => role === 'buffer')
      .flatMap(({ shape, dtype }) => Array(shape.reduce((a, b) => a * b, 1)).fill(/^(int|uint|bool)/.test(dtype)));
    const mean = (role) => {
      const sum = new Float64Array(size(role));
      let [all, weights] = [0, 0];
      for (const { num_samples: n, packets } of updates.toSorted((a, b) =>
        Buffer.compare(...[a, b].map(({ client_id: id }) => Buffer.from(id))),
      )) {
        const mine = packets.filter(({ vector: name }) => name === role);
        for (const { encoding, encoded } of mine) {
          decode(encoding, unhex(encoded), size(role)).forEach((x, i) => (sum[i] += x * n));
        }
        all += mine.length ? n : 0;
        weights += mine[0]?.kind === 'weights' ? n : 0;
      }
      return sum.map((x, i) => (weights ? x - base[role][i] * weights : x) / all);
    };
    const parameters = Float32Array.from(mean('parameters'), (x, i) => base.parameters[i] + x);
    const buffers = mean('buffers').map((x, i) => base.buffers[i] + x);
    buffers.forEach((x, i) => {
      if (wholes[i]) buffers[i] = x + 1.5 * 2 ** 52 - 1.5 * 2 ** 52;
    });
    assert.equal(hex(bytesOf(parameters)), result.parameters_bits);
    assert.equal(hex(bytesOf(buffers)), result.buffers_bits);
    assert.equal(modelDigest(parameters, buffers), result.digest);
  });
}

for (const size of [1, 255, 256, 65_792, 128 << 10, (128 << 10) + 1, 1 << 20]) {
  test(`a frame of raw blocks with ${size} bytes is read again`, () => {
    const bytes = Buffer.alloc(size, 'fedring');
    assert.ok(bytes.equals(content(rawFrame(bytes), size)));
    assert.throws(() => content(rawFrame(bytes), size + 1), { reason: 'bad_compression' });
    assert.throws(() => content(rawFrame(bytes), size - 1), { reason: 'bomb' });
  });
}
