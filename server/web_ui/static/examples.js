// Examples of requests that gain: their text repeats. The first one is offered when the page opens.

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
    title: "Call a tool",
    about: "The tool's schema constrains the call and drafts parts of it. Send it again, as agents do.",
    mode: "chat",
    prompt: "Read the first line of README.md.",
    extra: { tools: [{ type: "function", function: READ }], tool_choice: "required", parallel_tool_calls: false },
  },
  {
    title: "Edit a file",
    about: "The answer is nearly the file, which is sent as the predicted output. Most of it is drafted.",
    mode: "chat",
    prompt: `Add a third coordinate, z. Answer with the whole file.\n\n${FILE}`,
    extra: { prediction: { type: "content", content: FILE } },
  },
  {
    title: "Write a similar SQL query",
    about: "The parts that the query shares with the two queries of the prompt are drafted.",
    mode: "chat",
    prompt: `${QUERIES}\nWrite the same query for returns.`,
  },
  {
    title: "Continue code",
    about: "Similar methods are drafted from the answer's own text.",
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
