// The page at /docs: /openapi.json as tables, one for each endpoint and each object in request bodies.

const PLACE = "#/components/schemas/";

const find = (id) => document.getElementById(id);
const nameOf = (reference) => reference.slice(PLACE.length);

/** Create an element with children. Text is never parsed as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const code = (text) => element("code", {}, text);
const linkTo = (id, text) => element("a", { href: `#${id}` }, text);
const joined = (parts, between) => parts.flatMap((part, i) => (i ? [between, ...part] : part));

/** Return the type of a field as text and links, without null. */
function kindOf(schema) {
  if (schema.$ref) return [linkTo(nameOf(schema.$ref), nameOf(schema.$ref))];
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return joined(either.filter((one) => one.type !== "null").map(kindOf), " or ");
  if (schema.const !== undefined) return [code(JSON.stringify(schema.const))];
  if (schema.enum) return joined(schema.enum.map((value) => [code(JSON.stringify(value))]), " or ");
  if (schema.type === "array") return ["list", ...(schema.items && Object.keys(schema.items).length ? [" of ", ...kindOf(schema.items)] : [])];
  return [schema.type ?? "any"];
}

function boundsOf({ minimum, maximum, maxItems, maxLength }) {
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}`;
  if (minimum !== undefined) return `at least ${minimum}`;
  if (maximum !== undefined) return `at most ${maximum}`;
  if (maxItems !== undefined) return `at most ${maxItems}`;
  return maxLength === undefined ? "" : `at most ${maxLength} characters`;
}

function rowOf(name, schema, required) {
  const bounds = [schema, ...(schema.anyOf ?? [])].map(boundsOf).find((text) => text);
  const kind = [...kindOf(schema), ...(bounds ? [`, ${bounds}`] : [])];
  if (required) kind.push(", required");
  else if (schema.default !== undefined && schema.default !== null) kind.push(", default ", code(JSON.stringify(schema.default)));
  return element("tr", {}, element("td", {}, code(name)), element("td", {}, ...kind),
    element("td", { class: "soft" }, schema.description ?? ""));
}

function tableOf(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {});
  rows.sort(([one], [other]) => required.includes(other) - required.includes(one));
  return element("table", {}, ...rows.map(([name, field]) => rowOf(name, field, required.includes(name))));
}

function curlOf(path, body) {
  const url = new URL(path.slice(1), document.baseURI).href;
  return `curl ${url} -H 'content-type: application/json' \\\n  -d '${JSON.stringify(body)}'`;
}

function showEndpoint(path, method, operation, schemas, bodies) {
  const id = `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;
  const title = `${method.toUpperCase()} ${path}`;
  find("index").append(element("li", {}, linkTo(id, title)));
  const section = element("section", { id }, element("h2", {}, title));
  if (operation.description) section.append(element("p", { class: "soft" }, operation.description));
  const { schema: body, example } = operation.requestBody?.content["application/json"] ?? {};
  if (example) section.append(element("pre", {}, code(curlOf(path, example))));
  for (const one of body?.anyOf ?? (body ? [body] : [])) {
    bodies.add(nameOf(one.$ref));
    section.append(tableOf(schemas[nameOf(one.$ref)]));
  }
  find("endpoints").append(section);
}

function showSchema(name, schema) {
  find("endpoints").append(element("section", { id: name }, element("h2", {}, name), tableOf(schema)));
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const { info, paths, components } = await response.json();
  find("version").textContent = info.version;
  find("keys").hidden = !components.securitySchemes;
  const bodies = new Set();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      showEndpoint(path, method, operation, components.schemas, bodies);
    }
  }
  const others = Object.entries(components.schemas).filter(([name, schema]) => schema.properties && !bodies.has(name));
  for (const [name, schema] of others.sort()) showSchema(name, schema);
  find("state").remove();
  if (location.hash) find(location.hash.slice(1))?.scrollIntoView();
}

const base = new URL("v1", document.baseURI).href;
find("base").textContent = base;
show().catch((error) => find("state").textContent = `The description cannot be read: ${error.message}.`);
