/**
 * Training of the only model that this client knows, `fedring.train.models:vector`, as the weights of a linear
 * regression. Each client makes its own samples. They all follow the same law, and together the clients find the weights.
 */

import { setImmediate as breathe } from 'node:timers/promises';

const SAMPLES = 16;
const HELD_OUT = 8;

/** Return whether this client has code for the job. */
export const knows = (job) => job.mode === 'federated' && job.model === 'fedring.train.models:vector';

/**
 * Train on the client's samples as the command says.
 *
 * @param {object} command A TrainCmd.
 * @param {import('./models.js').Values} model The model to start from. It is not changed.
 * @param {string} clientId
 * @param {(progress: number) => void} tell Called with the share that is done, 0 to 1.
 * @param {AbortSignal} signal Ends the training early, with an error.
 */
export async function train(command, model, clientId, tell, signal) {
  const weights = Float32Array.from(model.parameters);
  const random = randomNumbers(`${clientId} ${command.seed}`);
  let [steps, loss] = [0, 0];
  for (let epoch = 0; epoch < command.epochs; epoch++) {
    for (const sample of shuffled(SAMPLES, random)) {
      const { x, y } = sampleOf(clientId, sample, weights.length);
      const error = dot(weights, x) - y;
      for (let i = 0; i < x.length; i++) weights[i] -= command.lr * error * x[i];
      loss += error * error;
      if (++steps % 4 === 0) {
        tell(steps / (command.epochs * SAMPLES));
        await breathe(undefined, { signal }); // so that heartbeats continue
      }
    }
  }
  // This client's own model has no buffers. With --any-model, this gives the server something to add up.
  const buffers = model.buffers.map((count) => count + steps / 7);
  return { parameters: weights, buffers, samples: SAMPLES, metrics: { loss: loss / steps } };
}

/** Evaluate a model on the samples that the client does not train on. */
export function evaluate(model, clientId) {
  const report = { correct: 0, total: HELD_OUT, loss_sum: 0 };
  for (let sample = SAMPLES; sample < SAMPLES + HELD_OUT; sample++) {
    const { x, y } = sampleOf(clientId, sample, model.parameters.length);
    const error = dot(model.parameters, x) - y;
    report.correct += Number(Math.abs(error) < 0.1);
    report.loss_sum += error * error;
  }
  return report;
}

/** Return a sample: x of length 1, and y, which is the result of the weights 0.5, -0.5, 0.5, ... */
function sampleOf(clientId, number, size) {
  const random = randomNumbers(`${clientId} ${number}`);
  const x = new Float64Array(size);
  for (let i = 0; i < size; i++) x[i] = random() - 0.5;
  const length = Math.sqrt(dot(x, x)) || 1;
  let y = 0;
  for (let i = 0; i < size; i++) {
    x[i] /= length;
    y += i % 2 ? -0.5 * x[i] : 0.5 * x[i];
  }
  return { x, y };
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

function shuffled(count, random) {
  const order = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const other = Math.floor(random() * (i + 1));
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order;
}

/** Return a generator of numbers from 0 to 1 that depend only on the text (mulberry32). */
function randomNumbers(text) {
  let state = [...text].reduce((hash, letter) => (Math.imul(hash, 31) + letter.codePointAt(0)) | 0, 7);
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
