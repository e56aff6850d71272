#!/bin/sh
# Give every service its certificate and the list of revoked ones, in a folder that no other service sees. Keep existing
# certificates, unless they are about to expire.
#
# certs.sh [FOLDER [SERVER...]]: without servers, there is one, which is called server
set -eu
cd "${1:-/certs}"
[ "$#" = 0 ] || shift
[ "$#" != 0 ] || set -- server

give() { # NAME FOLDER: put what NAME needs into FOLDER
    cp ca/ca.crt "$2/ca.crt"
    cp ca/ca.crl "$2/ca.crl.new"
    mv "$2/ca.crl.new" "$2/ca.crl" # a running daemon may read it at any moment
    cp "ca/$1.crt" "$2/tls.crt"
    cp "ca/$1.key" "$2/tls.key"
    chmod 600 "$2/tls.key"
}

if [ -e ca/ca.crt ]; then
    flctl certs renew ca # renews what ends within 30 days
else
    flctl certs init ca --host "$1"
fi
for server in "$@"; do
    [ "$server" = server ] || [ -e "ca/$server.crt" ] || flctl certs issue ca "$server" --role server --host "$server"
    give "$server" "$server"
done
for client in client-1 client-2; do
    [ -e "ca/$client.crt" ] || flctl certs issue ca "$client" --role client
    give "$client" "$client"
done
give operator operator
