// OpenAI's client for Node against the server of FORETOKEN_URL: one JSON object on stdout with what each call gave.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.FORETOKEN_URL + "/v1", apiKey: process.env.FORETOKEN_KEY, maxRetries: 0 });
const model = process.env.FORETOKEN_MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const fields = { model, messages, temperature: 0, max_tokens: 24 };
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 } },
  required: ["city"],
  additionalProperties: false,
};

const told = {};

const { data, response } = await client.chat.completions.create(fields).withResponse();
told.whole = data.choices[0].message.content;
told.request_id = response.headers.get("x-request-id");
told.models = (await client.models.list()).data.map((card) => card.id);

told.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
  told.streamed += chunk.choices[0]?.delta?.content ?? "";
}

const helper = client.chat.completions.stream({ ...fields, stream_options: { include_usage: true } });
told.helper = await helper.finalContent();
told.usage = await helper.totalUsage();

const format = { type: "json_schema", json_schema: { name: "capital", schema, strict: true } };
const parsed = await client.chat.completions.parse({ ...fields, max_tokens: 100, response_format: format });
told.parsed = parsed.choices[0].message.parsed;

const tools = [{ type: "function", function: { name: "capital", parameters: schema } }];
const forced = { ...fields, max_tokens: 100, tools, tool_choice: "required", parallel_tool_calls: false };
const called = await client.chat.completions.create(forced);
told.call = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);

const answer = await client.responses.create({ model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24 });
told.response = answer.output_text;
const events = client.responses.stream({ model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 24 });
told.response_streamed = (await events.finalResponse()).output_text;

const vectors = await client.embeddings.create({ model, input: ["one", "two"] });
told.dimensions = vectors.data.map((vector) => vector.embedding.length);

try {
  await client.chat.completions.create({ ...fields, temperature: -1 });
} catch (error) {
  told.error = [error.constructor.name, error.status, error.param];
}

const stopped = await client.chat.completions.create({ ...fields, max_tokens: 1000, stream: true });
for await (const chunk of stopped) {
  told.stopped = chunk.object;
  stopped.controller.abort();
}

console.log(JSON.stringify(told));
