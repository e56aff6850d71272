#!/bin/sh
# Print new passwords for compose.ha.yml, as its --env-file: ha-secrets.sh > ha.env
set -eu
umask 077
secret() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}
echo "PGPASSWORD=$(secret)"
echo "AWS_SECRET_ACCESS_KEY=$(secret)"
