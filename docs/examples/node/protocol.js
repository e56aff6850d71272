/** The messages and services of protos/fedring/v1. 64-bit integers are decimal text, so that none of them is rounded. */

import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../../protos', import.meta.url));

const definition = loader.loadSync('fedring/v1/federation.proto', {
  includeDirs: [PROTOS],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});

export const services = grpc.loadPackageDefinition(definition).fedring.v1;

/** @param {string} type @param {object} message @returns {Buffer} */
export const serialise = (type, message) => definition[`fedring.v1.${type}`].serialize(message);

/** @param {string} type @param {Uint8Array} bytes @returns {object} */
export const parse = (type, bytes) => definition[`fedring.v1.${type}`].deserialize(bytes);
