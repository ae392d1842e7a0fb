// Loads a trace into Perfetto's trace processor and prints the rows of queries, as JSON.
//
//     node query_trace.mjs <folder with trace_processor.wasm> <trace> <query>...
//
// The trace processor is built for web workers, so that Node has to look like one.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);

globalThis.self = globalThis;
globalThis.location = { href: pathToFileURL(folder).href + "/" };
globalThis.WorkerGlobalScope = class {};
globalThis.XMLHttpRequest = class {
  open(_method, name) {
    this.response = readFileSync(join(folder, name)).buffer;
  }
  send() {}
};

// Only the module for 32-bit memory is there; the bundle tries a tiny one to find out about 64 bits.
const Module = WebAssembly.Module;
WebAssembly.Module = class extends Module {
  constructor(bytes) {
    if (bytes.length < 100) throw new Error("32 bits are enough");
    super(bytes);
  }
};

// The decoder of results is older than the trace processor, and warns of a field that it does not need.
console.warn = () => {};

const { EngineBase } = await import(pathToFileURL(join(folder, "engine.mjs")).href);

class Engine extends EngineBase {
  mode = "WASM";
  id = "test";

  constructor(port) {
    super();
    this.port = port;
    port.onmessage = ({ data }) => this.onRpcResponseBytes(data);
  }

  rpcSendRequestBytes(bytes) {
    this.port.postMessage(bytes);
  }
}

runInThisContext(readFileSync(join(folder, "engine_bundle.node.js"), "utf8"));
WebAssembly.Module = Module;
const { port1, port2 } = new MessageChannel();
globalThis.self.onmessage({ data: port1 });
const engine = new Engine(port2);
await engine.parse(readFileSync(trace));
await engine.notifyEof();

const answers = [];
for (const query of queries) {
  const result = await engine.query(query);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => row.get(name)));
  }
  answers.push(rows);
}
console.log(JSON.stringify(answers, (_, cell) => (typeof cell === "bigint" ? Number(cell) : cell)));
process.exit(0);
