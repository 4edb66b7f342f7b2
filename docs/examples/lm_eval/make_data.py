"""Writes the two JSONL files that the tasks beside it read, from the manual pages that ship with Python.

Only the half of the pages that `kitty profile` does not measure on is used.

    python docs/examples/lm_eval/make_data.py [FOLDER]      # build/lm_eval if left out, where the tasks look for them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_DOCS = 20
PASSAGE, REPEATED, TARGET = 260, 40, 6
"""Words of a passage, of its beginning that the prompt repeats, and of the answer: what follows that beginning."""
LONG = 700
"""Words of a document whose perplexity is measured."""


def pages(num_words: int) -> list[list[str]]:
    """The first `num_words` words of up to `NUM_DOCS` manual pages that have as many."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    texts = [topics[name].split() for name in names[len(names) // 2 :]]
    return [words[:num_words] for words in texts if len(words) >= num_words][:NUM_DOCS]


def copy_docs() -> list[dict[str, str]]:
    """A passage and the beginning of its repetition; the answer is the next words."""
    found = []
    for words in pages(PASSAGE):
        passage, beginning = " ".join(words), " ".join(words[:REPEATED])
        target = " ".join(words[REPEATED : REPEATED + TARGET])
        found.append({"prompt": f"{passage}\n\n{beginning}", "target": target})
    return found


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/lm_eval")
    folder.mkdir(parents=True, exist_ok=True)
    long_docs = [{"text": " ".join(words)} for words in pages(LONG)]
    for name, docs in (("manual_copy", copy_docs()), ("manual_perplexity", long_docs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))


if __name__ == "__main__":
    main()
