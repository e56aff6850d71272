/** Streams of a payload: zstandard frames (RFC 8878) that state the size of their content. */

import zlib from 'node:zlib';

import { decompress as plainDecompress } from 'fzstd';

const MAGIC = 0xfd2fb528;
const BLOCK = 128 << 10;

/** Return a frame with this content. Node before 22.15 has no zstandard, so raw blocks are used. They are also valid. */
export function frame(content) {
  return zlib.zstdCompressSync ? zlib.zstdCompressSync(content) : rawFrame(content);
}

/** Return a frame that holds its content uncompressed: one segment with a size of 4 bytes, and raw blocks. */
export function rawFrame(content) {
  const blocks = Math.max(1, Math.ceil(content.length / BLOCK));
  const out = Buffer.alloc(9 + 3 * blocks + content.length);
  out.writeUInt32LE(MAGIC, 0);
  out.writeUInt8(0xa0, 4);
  out.writeUInt32LE(content.length, 5);
  let at = 9;
  for (let block = 0; block < blocks; block++) {
    const bytes = content.subarray(block * BLOCK, (block + 1) * BLOCK);
    out.writeUIntLE((bytes.length << 3) | Number(block === blocks - 1), at, 3);
    out.set(bytes, at + 3);
    at += 3 + bytes.length;
  }
  return out;
}

/** Return the content of a frame, which must have this size. @throws {RangeError} `reason`: "bomb" or "bad_compression". */
export function content(bytes, size) {
  const stated = statedSize(bytes);
  if (stated !== BigInt(size)) {
    const reason = stated !== undefined && stated > BigInt(size) ? 'bomb' : 'bad_compression';
    throw Object.assign(new RangeError(`the frame has ${stated ?? 'unknown'} bytes instead of ${size}`), { reason });
  }
  try {
    const out = zlib.zstdDecompressSync
      ? zlib.zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, size) })
      : plainDecompress(bytes);
    if (out.length === size) return out;
  } catch {
    // A frame that cannot be decompressed is refused below.
  }
  throw Object.assign(new RangeError('the frame cannot be decompressed'), { reason: 'bad_compression' });
}

/** Return the content size that the header of a frame states, or undefined. */
function statedSize(bytes) {
  const frame = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (frame.length < 6 || frame.readUInt32LE(0) !== MAGIC) return undefined;
  const flags = frame[4];
  const single = (flags >> 5) & 1;
  const at = 5 + Number(!single) + [0, 1, 2, 4][flags & 3];
  const length = [single, 2, 4, 8][flags >> 6];
  if (length === 0 || frame.length < at + length) return undefined;
  if (length === 8) return frame.readBigUInt64LE(at);
  return BigInt(frame.readUIntLE(at, length) + (length === 2 ? 256 : 0));
}
