// What people ask a model for: text that repeats is what gains.

const FILE = `class Point:
    """A point on a plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        """Return the sum of both points."""
        return Point(self.x + other.x, self.y + other.y)
`;
const QUERIES = `SELECT region, SUM(amount) AS total FROM orders
WHERE placed >= '2026-01-01' GROUP BY region ORDER BY total DESC;
SELECT region, SUM(amount) AS total FROM refunds
WHERE placed >= '2026-01-01' GROUP BY region ORDER BY total DESC;
`;
const READ = {
  name: "read_file",
  description: "Read a file.",
  parameters: {
    type: "object",
    properties: { path: { enum: ["README.md", "setup.py"] }, first_line: { enum: [1, 100] } },
    required: ["path", "first_line"],
  },
};

export const EXAMPLES = [
  {
    title: "Edit this file",
    about: "The answer is the file but for a few words: it is sent as the expected output, and most of it is drafted.",
    mode: "chat",
    prompt: `Add a third coordinate, z. Answer with the whole file.\n\n${FILE}`,
    extra: { prediction: { type: "content", content: FILE } },
  },
  {
    title: "SQL like the last one",
    about: "One more query of a kind: what it shares with the others is drafted.",
    mode: "chat",
    prompt: `${QUERIES}\nWrite the same query for returns.`,
  },
  {
    title: "Call this tool",
    about: "The call is held to the tool's schema, and drafts with it. Ask it again, as agents do.",
    mode: "chat",
    prompt: "Read the first line of README.md.",
    extra: { tools: [{ type: "function", function: READ }], tool_choice: "required", parallel_tool_calls: false },
  },
  {
    title: "Go on with this code",
    about: "Methods alike are drafted from the answer's own text.",
    mode: "completion",
    prompt: `class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def __`,
  },
];
