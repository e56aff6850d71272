#!/usr/bin/env node
/** A client of fl-server, written only from protos/PROTOCOL.md and protos/FORMATS.md. See README.md. */

import fs from 'node:fs';
import { endianness } from 'node:os';
import { parseArgs } from 'node:util';

import { isFinal, reasonOf, say } from './calls.js';
import { Client } from './sessions.js';

const USAGE = `usage: node client.js --server HOST:PORT --id NAME --state DIR
                      [--ca FILE [--cert FILE --key FILE]] [--token-file FILE]
                      [--dump DIR] [--any-model]

  --server      fl-server's address for clients
  --id          the client's stable name, 1 to 128 of A-Z a-z 0-9 . _ -
  --state       folder of what it keeps over restarts; one for each client
  --ca          who signed the server's certificate: use TLS
  --cert --key  the client's own certificate, and its private key
  --token-file  a file with the client's token
  --dump        folder in which to write what each update says, as the server reads it: DIR/NAME.ROUND.json
  --any-model   take the parameters of any model as train.js takes those of its own: for tests

It ends with 0 when told to stop (SIGTERM, SIGINT), with 77 if the server will not have this client, with 78 if another
one has its name or the arguments are wrong, and with 1 on a fault.`;

const LOOPBACK = /^(localhost|127(\.\d+){3}|\[::1\]):\d+$/;

function options() {
  const names = ['server', 'id', 'state', 'ca', 'cert', 'key', 'token-file', 'dump'];
  const texts = Object.fromEntries(names.map((name) => [name, { type: 'string' }]));
  let given;
  try {
    given = parseArgs({
      options: { ...texts, 'any-model': { type: 'boolean' }, help: { type: 'boolean', short: 'h' } },
    }).values;
  } catch (error) {
    wrong(error.message);
  }
  if (given.help) {
    console.log(USAGE);
    process.exit(0);
  }
  for (const name of ['server', 'id', 'state']) if (!given[name]) wrong(`--${name} is missing`);
  if (!given.cert !== !given.key || (given.cert && !given.ca)) wrong('--cert and --key go together, and with --ca');
  const file = (name) => given[name] && fs.readFileSync(given[name]);
  const token = file('token-file')?.toString().trim();
  if (token && !given.ca && !LOOPBACK.test(given.server)) {
    wrong(`without --ca, the token would travel to ${given.server} in plaintext; give --ca`);
  }
  return { ...given, token, ca: file('ca'), cert: file('cert'), key: file('key') };
}

function wrong(text) {
  console.error(`${text}\n\n${USAGE}`);
  process.exit(78);
}

if (endianness() !== 'LE') throw new Error('this example needs a little-endian machine');
const client = new Client(options());
for (const signal of ['SIGTERM', 'SIGINT']) process.on(signal, () => client.stop());
try {
  await client.run();
  process.exit(0);
} catch (error) {
  say(`the end: ${error.message}`);
  process.exit(['id_in_use', 'superseded'].includes(reasonOf(error)) ? 78 : isFinal(error) ? 77 : 1);
}
