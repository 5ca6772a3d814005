// Prompts that make repetition visible, also on the small model that comes with the package.

export const EXAMPLES = [
  {
    title: "A class that rhymes",
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
  {
    title: "Ask it twice",
    about: "The first answer is learned; ask again and the ring drafts nearly all of it.",
    mode: "completion",
    prompt: `class Stack:
    def push(self, item):
        self.items.append(item)

    def pop(self):
`,
  },
  {
    title: "A short question",
    about: "Chat: what other answers said helps this one.",
    mode: "chat",
    prompt: "Return True if the path is a directory.",
  },
];
