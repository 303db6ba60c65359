// The life of one prompt, from Node: looked up, allocated, committed, found again, freed.
//
//   prefixcache serve --listen unix:prefixcache.sock --storage none --num-blocks 100
//   npm install --prefix examples/node --no-package-lock --ignore-scripts
//   node examples/node/manage_blocks.js unix:prefixcache.sock
//
// For an engine with K/V memory of its own: it computes where NOTE says so. The exit code is 1 if
// the prompt is not found after it was committed.
import { randomBytes } from "node:crypto";
import { parseArgs, promisify } from "node:util";

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const PROTOS = new URL("../../protos", import.meta.url).pathname;
// Ids are 64 bit: more than a number holds exactly.
const OPTIONS = { includeDirs: [PROTOS], longs: String, defaults: true };
const OK = 1; // ResultCode RESULT_CODE_OK

/** A function for each RPC of the block manager, from a request to the promise of its reply. */
function connect(target) {
  const { v1 } = grpc.loadPackageDefinition(loadSync("prefixcache/v1/cache.proto", OPTIONS)).prefixcache;
  const stub = new v1.PrefixCacheService(target, grpc.credentials.createInsecure());
  const call = (name) => promisify(stub[name].bind(stub));
  return {
    serverInfo: call("getServerInfo"),
    lookup: call("lookup"),
    allocate: call("allocate"),
    commit: call("commit"),
    free: call("free"),
    close: () => stub.close(),
  };
}

/** Rows of a batch call succeed or fail one by one. */
function check({ resultCodes }) {
  if (resultCodes.some((code) => code !== OK)) {
    throw new Error(`refused, with result codes ${resultCodes}`);
  }
}

async function main(target, numTokens) {
  const cache = connect(target);
  const info = await cache.serverInfo({});
  console.log(`${info.numBlocks} blocks of ${info.blockSize} tokens`);
  // A sequence answers only whom it belongs to. It is freed when its owner has made no call for
  // long; a session (session.proto) would end with this process instead.
  const owner = randomBytes(16);
  const tokenIds = Array.from({ length: numTokens }, (_, i) => 1000 + i);

  const before = await cache.lookup({ tokenIds });
  console.log(`lookup: ${before.numCachedTokens} of ${numTokens} tokens are cached`);
  const { sequenceId, numCachedTokens, blockIds } = await cache.allocate({ owner, tokenIds });
  console.log(`allocate: ${blockIds.length} blocks, ${blockIds.join(" ")}`);
  // NOTE: here an engine computes K/V of tokens numCachedTokens and on. Token i goes into slot
  // blockIds[i / blockSize] * blockSize + i % blockSize, rounded down.
  check(
    await cache.commit({
      owner,
      sequenceIds: [sequenceId],
      startPositions: [numCachedTokens],
      numComputedTokens: [numTokens - numCachedTokens],
    }),
  );
  const after = await cache.lookup({ tokenIds });
  console.log(`commit: ${after.numCachedTokens} of ${numTokens} tokens are cached`);
  check(await cache.free({ owner, sequenceIds: [sequenceId] }));
  console.log("free: the blocks stay cached until their room is needed");
  cache.close();

  // At least one token is left to compute; a block that is not full is not cached.
  const numFullBlocks = Math.floor(numTokens / info.blockSize);
  const wanted = Math.min(numFullBlocks * info.blockSize, numTokens - 1);
  return after.numCachedTokens === wanted ? 0 : 1;
}

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { tokens: { type: "string", default: "50" } },
});
if (positionals.length !== 1) {
  console.error("usage: node manage_blocks.js [--tokens N] unix:/path|host:port");
  process.exit(2);
}
process.exitCode = await main(positionals[0], Number(values.tokens));
