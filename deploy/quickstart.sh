#!/usr/bin/env bash
# Show a secure federation on this machine, from nothing: certificates, a token, mutual TLS between all programs, and one
# federated and one data-parallel job on handwritten digits. All files are below DIR, which must not exist. No daemon
# keeps running.
#
#   deploy/quickstart.sh [DIR]        default: ./secure-demo
set -euo pipefail

dir=${1:-secure-demo}
if [ -e "$dir" ]; then
  echo "$dir exists already; remove it or name another folder" >&2
  exit 1
fi
mkdir -p "$dir/logs"
dir=$(cd "$dir" && pwd)
pki=$dir/pki
daemons=()

stop() {
  if [ "$1" != 0 ]; then tail -n 5 "$dir"/logs/*.log >&2; fi
  for pid in "${daemons[@]}"; do kill "$pid" 2> /dev/null || true; done
  wait
}
trap 'stop $?' EXIT

step() { printf '\n==> %s\n' "$*"; }

step "create an authority, and a certificate for each program"
flctl certs init "$pki"
for name in ann bob; do flctl certs issue "$pki" "$name"; done
flctl certs show "$pki"

step "start a server that accepts only certificates of this authority, on free ports of this machine"
mkfifo "$dir/ready"
fl-server listen=127.0.0.1:0 control_listen=127.0.0.1:0 state_dir="$dir/server" tokens=true \
  tls.cert="$pki/server.crt" tls.key="$pki/server.key" tls.ca="$pki/ca.crt" \
  > "$dir/ready" 2> "$dir/logs/server.log" &
daemons+=($!)
read -r addresses < "$dir/ready" || { cat "$dir/logs/server.log" >&2; exit 1; }
rm "$dir/ready"
address() { python3 -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$addresses" "$1"; }
listen=$(address listen)
export FLCTL_SERVER FLCTL_TLS_CA=$pki/ca.crt FLCTL_TLS_CERT=$pki/operator.crt FLCTL_TLS_KEY=$pki/operator.key
FLCTL_SERVER=$(address control)
echo "clients at $listen, flctl at $FLCTL_SERVER"

step "start two clients, each with its own certificate; ann also shows a token"
(umask 077 && flctl token create --name ann --days 1 > "$dir/ann.token")
part=0
for name in ann bob; do
  token=()
  if [ "$name" = ann ]; then token=(token_file="$dir/ann.token"); fi
  fl-client server="$listen" client_id="$name" state_dir="$dir/$name" partition_index="$part" partition_count=2 \
    clients_on_host=2 tls.cert="$pki/$name.crt" tls.key="$pki/$name.key" tls.ca="$pki/ca.crt" "${token[@]}" \
    2> "$dir/logs/$name.log" &
  daemons+=($!)
  part=$((part + 1))
done
flctl token list

cat > "$dir/federated.toml" << 'JOB'
name = "federated"
rounds = 3
epochs = 5
batch_size = 32
lr = 0.1
momentum = 0.0
min_clients = 2
JOB
cat > "$dir/data-parallel.toml" << 'JOB'
name = "data parallel"
mode = "data_parallel"
rounds = 1
epochs = 5
batch_size = 32
min_clients = 2
JOB

step "run a federated job: each client trains alone and sends its update"
flctl run "$dir/federated.toml" | tee "$dir/logs/federated"
step "run a data-parallel job: both clients train together and send their gradients to each other"
flctl run "$dir/data-parallel.toml" | tee "$dir/logs/data-parallel"
flctl models export newest --out "$dir/model.safetensors"

step "callers that are refused"
refused() {
  if "$@" > "$dir/logs/refused" 2>&1; then
    echo "this should have been refused: $*" >&2
    exit 1
  fi
  head -n 1 "$dir/logs/refused"
}
refused flctl stop --tls-cert "$pki/ann.crt" --tls-key "$pki/ann.key"
refused env --unset=FLCTL_TLS_CERT --unset=FLCTL_TLS_KEY flctl status
flctl token revoke "$(cut -d _ -f 2 "$dir/ann.token")"
flctl status

step "summary"
echo "federated:     $(tail -n 1 "$dir/logs/federated")"
echo "data parallel: $(tail -n 1 "$dir/logs/data-parallel")"
echo "model:         $dir/model.safetensors"
echo "audit log:     $dir/server/audit.jsonl, $(wc -l < "$dir/server/audit.jsonl") lines"
echo "certificates:  $pki; docs/security.md says how to do the same on several machines"
