#!/usr/bin/env bash
# The life of one prompt, by hand: looked up, allocated, committed, found again, freed.
#
#   prefixcache serve --listen unix:prefixcache.sock --storage none --num-blocks 100
#   examples/curl.sh prefixcache.sock
#
# Needs `buf` (`make venv` puts it into .venv/bin) on PATH. The daemon describes its API itself, by
# gRPC's reflection. Bytes are base64 in JSON, and 64-bit numbers are texts.
set -euo pipefail
socket=${1:?"usage: $0 SOCKET"}

call() { # RPC, request: prints the reply and keeps it
    echo "> $1 $2"
    reply=$(buf curl --protocol grpc --unix-socket "$socket" --data "$2" \
        "http://localhost/prefixcache.v1.$1")
    echo "$reply"
}

field() { # name: its value in the reply, without quotes; 0 where it was left out
    grep -o "\"$1\":[^,}]*" <<< "$reply" | cut -d : -f 2 | tr -d '" ' || echo 0
}

# A sequence answers only whom it belongs to: 16 random bytes, or a session.
owner=$(head -c 16 /dev/urandom | base64)
tokens=$(seq -s , 1000 1039)

call PrefixCacheService/GetServerInfo '{}'
call PrefixCacheService/Lookup "{\"tokenIds\": [$tokens]}"
call PrefixCacheService/Allocate "{\"owner\": \"$owner\", \"tokenIds\": [$tokens]}"
sequence=$(field sequenceId)
cached=$(field numCachedTokens)

# An engine computes the rest here, and says so.
call PrefixCacheService/Commit "{\"owner\": \"$owner\", \"sequenceIds\": [\"$sequence\"],
    \"startPositions\": [$cached], \"numComputedTokens\": [$((40 - cached))]}"
call PrefixCacheService/Lookup "{\"tokenIds\": [$tokens]}"
call PrefixCacheService/Free "{\"owner\": \"$owner\", \"sequenceIds\": [\"$sequence\"]}"
call AdminService/GetStats '{}'
