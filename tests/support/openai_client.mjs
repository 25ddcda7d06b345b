// What the openai package of npm sends and reads, against a running Baton: node openai_client.mjs URL FOLDER
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, folder] = process.argv.slice(2);
const { default: OpenAI, toFile } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ apiKey: "none", baseURL: `${url}/v1`, maxRetries: 0, timeout: 60_000 });
const model = "builtin";
const prompt = "def read_lines(path):";
const messages = [{ role: "user", content: "Write a function." }];
const schema = {
  type: "object",
  properties: { name: { enum: ["a", "b"] }, count: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["name", "count"],
  additionalProperties: false,
};
const checks = {
  async models() {
    const ids = [];
    for await (const each of client.models.list()) ids.push(each.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
    await assert.rejects(client.models.retrieve("other"), (error) => error instanceof OpenAI.NotFoundError);
  },
  async completion() {
    const asked = { model, prompt, max_tokens: 24, temperature: 0 };
    const whole = await client.completions.create(asked);
    let text = "", usage = null;
    for await (const part of await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
      text += part.choices[0]?.text ?? "";
      usage = part.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].text);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    const scored = await client.completions.create({ ...asked, n: 2, logprobs: 2, stop: ["\n\n"], seed: 3, echo: true });
    assert.equal(scored.choices.length, 2);
    assert.ok(scored.choices[0].logprobs.tokens.length > 0);
  },
  async chat() {
    const asked = { model, messages, max_completion_tokens: 24, temperature: 0, logprobs: true, top_logprobs: 2 };
    const { data: whole, response } = await client.chat.completions.create(asked).withResponse();
    assert.ok(response.headers.get("x-request-id"));
    const stream = client.chat.completions.stream(asked);
    let pieces = "";
    stream.on("content", (piece) => (pieces += piece));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.equal(pieces, whole.choices[0].message.content);
    assert.equal(whole.choices[0].logprobs.content.length, whole.usage.completion_tokens);
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "count", parameters: schema, strict: true } }];
    const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
    const whole = await client.chat.completions.create({ ...asked, seed: 5 });
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(whole.choices[0].finish_reason, "tool_calls");
    assert.ok(schema.properties.name.enum.includes(JSON.parse(call.function.arguments).name));
    const final = await client.chat.completions.stream({ ...asked, seed: 5 }).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    const history = [...messages, whole.choices[0].message, { role: "tool", tool_call_id: call.id, content: "7" }];
    const uncalled = { model, tools, tool_choice: "none", max_tokens: 8 };  // the tools are not described to the model
    const before = await client.chat.completions.create({ ...uncalled, messages });
    const after = await client.chat.completions.create({ ...uncalled, messages: history });
    assert.ok(after.usage.prompt_tokens > before.usage.prompt_tokens);
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "count", schema, strict: true } };
    const parsed = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 400, temperature: 0 });
    assert.ok(Number.isInteger(JSON.parse(parsed.choices[0].message.content).count));
  },
  async responses() {
    const asked = { model, input: "Write a function.", max_output_tokens: 24, temperature: 0 };
    const whole = await client.responses.create(asked);
    assert.ok(whole.output_text.length > 0);
    const kinds = [];
    let text = "";
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.equal(kinds[0], "response.created");
    assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
  },
  async batches() {
    const line = { custom_id: "one", method: "POST", url: "/v1/completions", body: { model, prompt, max_tokens: 4 } };
    const file = await client.files.create({ file: await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl"), purpose: "batch" });
    let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h" });
    for (let turn = 0; turn < 300 && batch.status !== "completed"; turn++) {
      await new Promise((resolve) => setTimeout(resolve, 100));
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    const rows = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
    assert.deepEqual(rows.map((row) => [row.custom_id, row.response.status_code]), [["one", 200]]);
    assert.equal((await client.files.delete(file.id)).deleted, true);
  },
  async embeddings() {
    const made = await client.embeddings.create({ model, input: ["x", "y"] });
    assert.equal(made.data.length, 2);
    assert.ok(made.data.every((each) => Math.abs(Math.hypot(...each.embedding) - 1) < 1e-5));
  },
  async errors() {
    const wrong = client.chat.completions.create({ model, messages, temperature: 3 });
    await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    const unknown = client.completions.create({ model: "none", prompt: "x" });
    await assert.rejects(unknown, (error) => error instanceof OpenAI.NotFoundError && error.param === "model");
  },
  async leaving() {
    const stream = await client.completions.create({ model, prompt, max_tokens: 2000, stream: true });
    let events = 0;
    for await (const part of stream) if (part && ++events === 3) break; // leaves: the package aborts the connection
    assert.equal(events, 3);
  },
};
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
