// What the @anthropic-ai/sdk package of npm sends and reads, against a running Baton: node anthropic_client.mjs URL FOLDER
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, folder] = process.argv.slice(2);
const { default: Anthropic } = createRequire(`${folder}/`)("@anthropic-ai/sdk");
const client = new Anthropic({ apiKey: "none", baseURL: url, maxRetries: 0, timeout: 60_000 });
const tools = [{ name: "Bash", input_schema: { type: "object", properties: { command: { type: "string" } } } }];
const messages = [{ role: "user", content: "Run it: [[call]]" }];
const asked = { model: "claude-sonnet-4", max_tokens: 200, system: "Be brief.", tools, messages };
const withoutIds = (content) => content.map(({ id, ...block }) => block);

const checks = {
  async models() {
    const ids = [];
    for await (const each of client.models.list()) ids.push(each.id);
    assert.deepEqual(ids, ["agent"]);
    assert.equal((await client.models.retrieve("agent")).type, "model");
  },
  async message() {
    const { data: message, response } = await client.messages.create(asked).withResponse();
    assert.deepEqual(message.content.map((block) => block.type), ["thinking", "tool_use"]);
    assert.equal(message.stop_reason, "tool_use");
    assert.equal(message._request_id, response.headers.get("request-id"));
    const counted = await client.messages.countTokens({ model: "agent", system: "Be brief.", tools, messages });
    const { input_tokens, cache_read_input_tokens } = message.usage;
    assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens);
  },
  async stream() {
    const whole = await client.messages.create(asked);
    const stream = client.messages.stream(asked);
    let thinking = "", json = "";
    stream.on("thinking", (piece) => (thinking += piece));
    stream.on("inputJson", (piece) => (json += piece));
    const final = await stream.finalMessage();
    assert.deepEqual(withoutIds(final.content), withoutIds(whole.content));
    assert.equal(thinking, final.content[0].thinking);
    assert.deepEqual(JSON.parse(json), final.content[1].input);
  },
  async tools() {
    const first = await client.messages.create(asked);
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "here: [[finished]]" }] };
    const history = [...messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    const last = await client.messages.create({ ...asked, messages: history });
    assert.equal(last.stop_reason, "end_turn");
    assert.match(last.content[0].text, /finished/);
    const forced = { ...asked, tool_choice: { type: "tool", name: "Bash" }, max_tokens: 40 };
    assert.equal((await client.messages.create(forced)).content[0].name, "Bash");
  },
  async errors() {
    const refused = [
      [{ temperature: 9 }, Anthropic.BadRequestError, "invalid_request_error"],
      [{ model: "other" }, Anthropic.NotFoundError, "not_found_error"],
    ];
    for (const [fields, kind, type] of refused) {
      await assert.rejects(client.messages.create({ ...asked, ...fields }), (error) => {
        assert.ok(error instanceof kind);
        assert.equal(error.error.error.type, type);
        return Boolean(error.requestID);
      });
    }
  },
  async leaving() {
    const stream = client.messages.stream(asked);
    for await (const event of stream) {
      if (event.type === "content_block_delta") break;
    }
  },
};
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log("ok", name);
}
