/** Streams of a payload: frames of zstandard (RFC 8878) that say how long their content is. */

import zlib from 'node:zlib';

import { decompress as plainDecompress } from 'fzstd';

const MAGIC = 0xfd2fb528;
const BLOCK = 128 << 10;

/** A frame with this content. Before version 22.15 Node cannot compress so; blocks of raw bytes are as valid. */
export function frame(content) {
  return zlib.zstdCompressSync ? zlib.zstdCompressSync(content) : rawFrame(content);
}

/** A frame that holds its content as it is: one segment, with its size in 4 bytes, and raw blocks. */
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

/** The content of a frame, which must be of this size. @throws {RangeError} Of `reason` "bomb" or "bad_compression". */
export function content(bytes, size) {
  const stated = statedSize(bytes);
  if (stated !== BigInt(size)) {
    const reason = stated !== undefined && stated > BigInt(size) ? 'bomb' : 'bad_compression';
    throw Object.assign(new RangeError(`a frame of ${stated ?? 'unknown'} bytes, where ${size} belong`), { reason });
  }
  try {
    const out = zlib.zstdDecompressSync
      ? zlib.zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, size) })
      : plainDecompress(bytes);
    if (out.length === size) return out;
  } catch {
    // falls through: what cannot be decompressed is refused alike
  }
  throw Object.assign(new RangeError('a frame that cannot be decompressed'), { reason: 'bad_compression' });
}

/** The size of its content that a frame's header states, or undefined. */
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
