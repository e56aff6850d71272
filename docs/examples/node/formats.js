/** The formats of vectors, as FORMATS.md describes them: only bytes to numbers and back. */

import { bytesOf } from './names.js';
import { content, frame } from './zstd.js';

const { fround, abs, ceil, max, min, sqrt } = Math;
const LARGEST = fround(3.4028234663852886e38);
const SMALLEST_NORMAL = 2 ** -126;
const MAX_CHUNK = 1 << 20;
const HEADER = 16;
const MAGICS = { fp32: 'F4', fp16: 'H2', bf16: 'B2', fp64: 'F8', int8: 'Q8', packed: 'PK', uniform: 'UQ' };
const WIDTHS = { fp32: 4, fp16: 2, bf16: 2, fp64: 8 };

/** A payload that its format does not allow. `reason` is the reason with which fl-server refuses it. */
export class Refused extends Error {
  constructor(reason, text) {
    super(`${reason}: ${text}`);
    this.reason = reason;
  }
}

/** Round to the nearest integer, ties to even. Magnitudes are below 2^51, so that the sum has no room for the fraction. */
const round = (x) => x + 1.5 * 2 ** 52 - 1.5 * 2 ** 52;

/**
 * @typedef {{name: string, chunk?: number, keep_ratio?: number, step?: number}} Encoding As in the TrainCmd; 0 = default.
 * @param {Encoding} encoding
 * @param {Float32Array | Float64Array} values All finite; as fp64 a Float64Array.
 * @returns {Buffer}
 */
export function encode(encoding, values) {
  if (!values.every(Number.isFinite)) throw new Refused('non_finite', 'a vector with NaN or infinity');
  const chunk = encoding.chunk || 8192;
  switch (encoding.name) {
    case 'fp32':
    case 'fp64':
      return Buffer.concat([header(encoding.name, 0, values.length), bytesOf(values)]);
    case 'fp16':
      return Buffer.concat([header('fp16', 0, values.length), bytesOf(Uint16Array.from(values, halfBits))]);
    case 'bf16':
      return Buffer.concat([header('bf16', 0, values.length), bytesOf(bfloatBits(values))]);
    case 'int8': {
      const { scales, levels } = quantise(values, chunk, 127, eighth);
      return Buffer.concat([header('int8', chunk, values.length), bytesOf(scales), bytesOf(Int8Array.from(levels))]);
    }
    case 'fp32_sparse':
    case 'sq8': {
      const kept = largest(values, encoding.keep_ratio || 0.1);
      const chosen = Float32Array.from(kept, (at) => values[at]);
      if (encoding.name === 'fp32_sparse') {
        return Buffer.concat([sparseHeader('S4', values.length, kept.length), bytesOf(kept), bytesOf(chosen)]);
      }
      const { scales, levels } = quantise(chosen, chunk, 127, eighth);
      const head = sparseHeader('SQ', values.length, kept.length, chunk);
      return Buffer.concat([head, bytesOf(kept), bytesOf(scales), bytesOf(Int8Array.from(levels))]);
    }
    case 'packed': {
      const kept = largest(values, encoding.keep_ratio || 0.1);
      let from = 0;
      return segmented('packed', chunk, values, (part, start) => {
        let to = from;
        while (to < kept.length && kept[to] < start + part.length) to++;
        const positions = kept.subarray(from, to).map((at) => at - start);
        from = to;
        return positions.length ? packedSegment(part, positions, chunk) : Buffer.alloc(0);
      });
    }
    case 'uniform':
      return segmented('uniform', chunk, values, (part) => uniformSegment(part, chunk, encoding.step || 1));
    default:
      throw new Refused('unknown_encoding', `${encoding.name} is no format`);
  }
}

/**
 * Read a packet. Trust no byte of it.
 *
 * @param {string} name The name of the format.
 * @param {Uint8Array} bytes
 * @param {number} dim The vector's length, from the schema.
 * @returns {Float32Array | Float64Array} A Float64Array for fp64.
 */
export function decode(name, bytes, dim) {
  const input = new Input(bytes);
  const out = name === 'fp64' ? new Float64Array(dim) : new Float32Array(dim);
  if (name === 'fp32_sparse' || name === 'sq8') readSparse(name, input, out);
  else if (MAGICS[name]) readWhole(name, input, out);
  else throw new Refused('unknown_encoding', `${name} is not a format`);
  if (!out.every(Number.isFinite)) throw new Refused('non_finite', 'a value that is NaN or infinite');
  return out;
}

function readWhole(name, input, out) {
  const chunk = input.header(MAGICS[name]);
  if (name in WIDTHS ? chunk !== 0 : chunk < 1 || chunk > MAX_CHUNK) throw new Refused('bad_header', `chunk ${chunk}`);
  input.length(Number(input.take(8).readBigUInt64LE()), out.length);
  if (name in WIDTHS) {
    const raw = input.rest(out.length * WIDTHS[name]);
    if (name === 'fp32' || name === 'fp64') bytesOf(out).set(raw);
    for (let i = 0; name === 'fp16' && i < out.length; i++) out[i] = halfValue(raw.readUInt16LE(2 * i));
    if (name === 'bf16')
      for (let i = 0; i < out.length; i++) bytesOf(out).set(raw.subarray(2 * i, 2 * i + 2), 4 * i + 2);
  } else if (name === 'int8') {
    const raw = input.rest(4 * ceil(out.length / chunk) + out.length);
    const body = new Input(raw);
    const scales = body.scales(ceil(out.length / chunk), LARGEST / 128);
    scale(out, new Int8Array(body.take(out.length)), scales, chunk);
  } else {
    const span = spanOf(chunk);
    const sizes = input.u32s(ceil(out.length / span));
    sizes.forEach((size, i) => {
      if (size > 8 * span + 1024) throw new Refused('bad_header', `a segment of ${size} bytes`);
      const segment = new Input(input.take(size));
      const part = out.subarray(i * span, (i + 1) * span);
      if (name === 'uniform') readUniform(segment, part, chunk);
      else if (size) readPacked(segment, part, chunk);
      segment.rest(0);
    });
    input.rest(0);
  }
}

function readSparse(name, input, out) {
  input.magic(name === 'sq8' ? 'SQ' : 'S4');
  const [dim, count] = input.u32s(2);
  input.length(dim, out.length);
  if (count > dim) throw new Refused('bad_header', `${count} entries of ${dim}`);
  const chunk = name === 'sq8' ? input.u32s(1)[0] : 1;
  if (chunk < 1 || chunk > MAX_CHUNK) throw new Refused('bad_header', `chunk ${chunk}`);
  const runs = ceil(count / chunk);
  const body = new Input(input.rest(name === 'sq8' ? 5 * count + 4 * runs : 8 * count));
  const indices = body.u32s(count);
  indices.forEach((at, i) => {
    if (at >= dim || (i && at <= indices[i - 1])) throw new Refused('bad_indices', `${at} at place ${i}`);
  });
  let values = new Float32Array(count);
  if (name === 'sq8') {
    const scales = body.scales(runs, LARGEST / 128);
    scale(values, new Int8Array(body.take(count)), scales, chunk);
  } else {
    bytesOf(values).set(body.take(4 * count));
  }
  indices.forEach((at, i) => (out[at] = values[i]));
}

/** A reader of a payload. It refuses to read beyond the end. */
class Input {
  constructor(bytes) {
    this.bytes = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(size) {
    const left = this.bytes.length - this.at;
    if (size > left) throw new Refused('truncated', `${left} bytes, where ${size} belong`);
    return this.bytes.subarray(this.at, (this.at += size));
  }

  /** Return the remaining bytes, which must have this size. */
  rest(size) {
    const out = this.take(size);
    if (this.at < this.bytes.length) throw new Refused('wrong_size', `${this.bytes.length - this.at} bytes too many`);
    return out;
  }

  magic(expected) {
    const head = this.take(4).toString('latin1');
    if (head !== `${expected}\0\x01`) throw new Refused('bad_header', `not the header of ${expected}, version 1`);
  }

  header(expected) {
    this.magic(expected);
    return this.u32s(1)[0];
  }

  length(dim, expected) {
    if (dim !== expected) throw new Refused('wrong_length', `${dim} values, where ${expected} belong`);
  }

  u32s(count) {
    const raw = this.take(4 * count);
    return Uint32Array.from({ length: count }, (_, i) => raw.readUInt32LE(4 * i));
  }

  scales(count, most) {
    const out = new Float32Array(count);
    bytesOf(out).set(this.take(4 * count));
    if (!out.every((x) => x >= 0 && x <= most)) throw new Refused('bad_scale', 'a scale out of bounds');
    return out;
  }

  stream(size) {
    const bytes = this.take(this.u32s(1)[0]);
    if (size === 0 && bytes.length === 0) return Buffer.alloc(0);
    try {
      return content(bytes, size);
    } catch (error) {
      throw new Refused(error.reason, error.message);
    }
  }
}

function header(name, chunk, dim) {
  const out = Buffer.alloc(HEADER);
  out.write(MAGICS[name], 'latin1');
  out[3] = 1;
  out.writeUInt32LE(chunk, 4);
  out.writeBigUInt64LE(BigInt(dim), 8);
  return out;
}

function sparseHeader(magic, ...numbers) {
  return Buffer.concat([Buffer.from(`${magic}\0\x01`, 'latin1'), bytesOf(Uint32Array.from(numbers))]);
}

// --- numbers of 16 bits

const CELL = new Float32Array(1);
const BITS = new Uint32Array(CELL.buffer);

/** Return the f16 nearest to an f32, ties to even. A value beyond the range becomes the largest one. */
function halfBits(value) {
  CELL[0] = value;
  const sign = (BITS[0] >>> 16) & 0x8000;
  const magnitude = abs(value);
  if (magnitude < 2 ** -14) return sign | round(magnitude * 2 ** 24); // subnormal: a multiple of 2^-24
  const bits = BITS[0] & 0x7fffffff;
  const rounded = (bits + 0xfff + ((bits >>> 13) & 1)) >>> 13;
  return sign | min(rounded - (112 << 10), 0x7bff);
}

function halfValue(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 0x3ff;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

/** Return the bf16 nearest to each f32, ties to even. A value beyond the range becomes the largest one. */
function bfloatBits(values) {
  return Uint16Array.from(values, (value) => {
    CELL[0] = value;
    const magnitude = BITS[0] & 0x7fffffff;
    const rounded = (magnitude + 0x7fff + ((magnitude >>> 16) & 1)) >>> 16;
    return ((BITS[0] >>> 16) & 0x8000) | min(rounded, 0x7f7f);
  });
}

// --- scales and levels

/** Return the scale of a run of int8, sq8 and packed, before it is limited. */
const eighth = (run) => fround(largestOf(run) / 127);

function largestOf(run) {
  let most = 0;
  for (const x of run) most = max(most, abs(x));
  return most;
}

/** Divide values into runs, each with a scale, and round each to a level of at most `top`. */
function quantise(values, chunk, top, scaleOf) {
  const most = LARGEST / (top === 127 ? 128 : 2 ** 17);
  const scales = new Float32Array(ceil(values.length / chunk));
  const levels = new Int32Array(values.length);
  for (let run = 0; run < scales.length; run++) {
    const end = min(values.length, (run + 1) * chunk);
    const raw = scaleOf(values.subarray(run * chunk, end));
    if (raw < SMALLEST_NORMAL) continue;
    const scale = (scales[run] = min(raw, most));
    for (let i = run * chunk; i < end; i++) levels[i] = max(-top, min(top, round(fround(values[i] / scale))));
  }
  return { scales, levels };
}

/** Compute the values of levels, with one multiplication in f32 each. */
function scale(out, levels, scales, chunk) {
  for (let i = 0; i < out.length; i++) out[i] = levels[i] * scales[Math.floor(i / chunk)];
}

/** Return the positions of the entries that are kept, in rising order. */
function largest(values, ratio) {
  const count = min(values.length, max(1, ceil(ratio * values.length)));
  const sizes = Float32Array.from(values, abs).sort();
  const least = sizes[values.length - count];
  let equals = count - (values.length - sizes.findLastIndex((size) => size <= least) - 1);
  const kept = [];
  values.forEach((x, at) => {
    const size = abs(x);
    if (size > least || (size === least && equals-- > 0)) if (size > 0) kept.push(at);
  });
  return Uint32Array.from(kept);
}

// --- segments and streams

const spanOf = (chunk) => Math.floor(MAX_CHUNK / chunk) * chunk;

function segmented(name, chunk, values, write) {
  const span = spanOf(chunk);
  const segments = [];
  for (let at = 0; at < values.length; at += span) segments.push(write(values.subarray(at, at + span), at));
  const sizes = Uint32Array.from(segments, (segment) => segment.length);
  return Buffer.concat([header(name, chunk, values.length), bytesOf(sizes), ...segments]);
}

function stream(bytes) {
  const body = bytes.length ? frame(bytes) : bytes;
  return Buffer.concat([bytesOf(Uint32Array.of(body.length)), body]);
}

/** Pack `count` fields of `width` bits (1 or 2), the first into the lowest bits. */
function pack(count, width, field) {
  const out = Buffer.alloc(ceil((count * width) / 8));
  for (let i = 0; i < count; i++) out[(i * width) >> 3] |= field(i) << ((i * width) & 7);
  return out;
}

const unpack = (bytes, width, i) => (bytes[(i * width) >> 3] >> ((i * width) & 7)) & (2 ** width - 1);

function packedSegment(part, positions, chunk) {
  const distances = positions.map((at, i) => at - (i ? positions[i - 1] : -1)).sort();
  const median = distances[positions.length >> 1];
  const low = max(0, min(12, 32 - Math.clz32(median) - 4));
  const values = [];
  const gaps = [];
  let before = -1;
  for (const at of positions) {
    for (; at - before - 1 >= 256 << low; before += 256 << low) {
      values.push(0);
      gaps.push((256 << low) - 1);
    }
    values.push(part[at]);
    gaps.push(at - before - 1);
    before = at;
  }
  const { scales, levels } = quantise(Float32Array.from(values), chunk, 127, eighth);
  return Buffer.concat([
    bytesOf(Uint32Array.of(gaps.length, low)),
    bytesOf(scales),
    stream(bytesOf(Int8Array.from(levels))),
    stream(Uint8Array.from(gaps, (gap) => gap >> low)),
    ...Array.from({ length: low }, (_, bit) => pack(gaps.length, 1, (i) => (gaps[i] >> bit) & 1)),
  ]);
}

function readPacked(input, out, chunk) {
  const [count, low] = input.u32s(2);
  if (count < 1 || count > out.length || low > 12) throw new Refused('bad_header', `${count} entries, ${low} low bits`);
  const scales = input.scales(ceil(count / chunk), LARGEST / 128);
  const values = new Float32Array(count);
  scale(values, new Int8Array(input.stream(count)), scales, chunk);
  const high = input.stream(count);
  const fields = Array.from({ length: low }, () => input.take(ceil(count / 8)));
  let at = -1;
  for (let i = 0; i < count; i++) {
    at += 1 + (high[i] << low) + fields.reduce((sum, field, bit) => sum + (unpack(field, 1, i) << bit), 0);
    if (at >= out.length) throw new Refused('bad_indices', `an entry at ${at} of ${out.length}`);
    out[at] = values[i];
  }
}

function uniformSegment(part, chunk, step) {
  const { scales, levels } = quantise(part, chunk, 65535, (run) => {
    const squares = run.reduce((sum, x) => sum + x * x, 0);
    return max(fround(step * sqrt(squares / run.length)), fround(largestOf(run) / 65535));
  });
  const nonzero = levels.filter((level) => level !== 0);
  const wide = nonzero.map(abs).filter((size) => size > 3);
  return Buffer.concat([
    bytesOf(scales),
    stream(pack(levels.length, 1, (i) => Number(levels[i] !== 0))),
    stream(pack(nonzero.length, 1, (i) => Number(nonzero[i] < 0))),
    stream(pack(nonzero.length, 2, (i) => min(abs(nonzero[i]) - 1, 3))),
    stream(Uint8Array.from([...wide.map((size) => (size - 4) & 255), ...wide.map((size) => (size - 4) >> 8)])),
  ]);
}

function readUniform(input, out, chunk) {
  const scales = input.scales(ceil(out.length / chunk), LARGEST / 2 ** 17);
  const flags = input.stream(ceil(out.length / 8));
  const places = [];
  for (let i = 0; i < out.length; i++) if (unpack(flags, 1, i)) places.push(i);
  const signs = input.stream(ceil(places.length / 8));
  const sizes = input.stream(ceil(places.length / 4));
  const levels = new Float64Array(out.length);
  const wide = [];
  places.forEach((at, i) => {
    levels[at] = unpack(sizes, 2, i) + 1;
    if (levels[at] === 4) wide.push(at);
  });
  const rest = input.stream(2 * wide.length);
  wide.forEach((at, i) => (levels[at] += rest[i] + 256 * rest[wide.length + i]));
  places.forEach((at, i) => {
    if (unpack(signs, 1, i)) levels[at] = -levels[at];
  });
  scale(out, levels, scales, chunk);
}
