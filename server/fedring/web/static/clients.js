// Where there are more clients than the stream tells, the server searches them, and gives them part by part.

import { at } from "./dom.js";
import { known, showClients } from "./tables.js";

const PAUSE = 250; // milliseconds after the last key, and
const AGE = 2000; // after which an answer is asked for again

let skip = 0;
let page = null; // the answer: clients, total, and the skip and the search that it answers
let asked = 0;
let timer = 0;

const search = () => at("client-search").value.trim();
const isCut = (state) => known(state.server) > (state.clients?.length ?? 0);

// Show the clients of the state, or those that the server finds.
export function showSome(state) {
  if (!isCut(state) || (!search() && !skip)) page = null;
  else if (Date.now() - asked > AGE) ask(state);
  showClients(page?.clients ?? state.clients, state.server, page, (to) => turn(state, to));
}

// What was typed has changed: a search begins with its first clients.
export function searchClients(state) {
  skip = 0;
  clearTimeout(timer);
  if (isCut(state) && search()) timer = setTimeout(() => ask(state), PAUSE);
  else showSome(state);
}

function turn(state, to) {
  skip = to;
  if (skip || search()) ask(state);
  else showSome(state);
}

async function ask(state) {
  asked = Date.now();
  const told = { search: search(), skip };
  try {
    const response = await fetch(`api/clients?${new URLSearchParams(told)}`);
    if (!response.ok || told.search !== search() || told.skip !== skip) return; // something else is wanted by now
    page = { ...(await response.json()), ...told };
    showClients(page.clients, state.server, page, (to) => turn(state, to));
  } catch {
    // The line that says whether the server is reached is the stream's.
  }
}
