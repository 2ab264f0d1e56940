#!/bin/sh
# Writes secrets/ once, readable by one group; .env passes the group to Compose and the containers.
set -eu
umask 027
cd "$(dirname "$0")"
mkdir secrets
for name in router-secret api-key worker-key kv-store-secret redis-password grafana-password; do
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "secrets/$name"
done
echo "requirepass $(cat secrets/redis-password)" > secrets/redis.conf
chmod 440 secrets/*
echo "SECRETS_GID=$(id -g)" > .env
