"""Write docs/huggingface-families.md from the sweep: `python -m docs.write_families`.

The sweep is `python -m tests.support.families`; it keeps what it finds in build/families.json.
"""

import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.families import FILE, Found, verdict
from tests.support.tiny_models import KINDS, families

PAGE = Path(__file__).with_name("huggingface-families.md")
VERDICTS = {
    "equal": "equal",
    "both": "equal in some cells, refused in the others",
    "refused": "refused",
    "untried": "not tried",
    "fault": "FAULT",
}
TEXT = """# Hugging Face: class by class

Which classes of transformers {version} work with `attn_implementation="ring"`, and why the others
are refused.

Each class is tested tiny, with random weights, in float64 (PyTorch {torch}): plain, left padded
and packed batches, with labels and without, in rings of one and of three ranks: twelve cells.
There are two outcomes. The cell is *equal* to one process with transformers' own eager attention:
outputs, loss and all gradients, to 1e-6 (for packed documents, the one process gets each document
separately). Or it is *refused* by our `ValueError`, the same on all ranks.

    python -m tests.support.families     about ten minutes; `--kinds`, `--only`, `--part 1/4`
    python -m docs.write_families        writes this page from the results

{counts}
Models that pool are *equal* if they return values of tokens, or of the last token, which
is fetched over the ring. Compute a loss of whole sequences yourself. A class is *not tried* if it
needs a package that is not installed, or cannot compute with text alone.

## Why they are refused

The first reason of each class; dots replace names and numbers.

{reasons}
## All classes

{lists}"""


def page(found: dict[str, Found]) -> str:
    """Return the page."""
    of = {kind: [f.name for f in families() if f.kind == kind] for kind in KINDS}
    missing = [name for names in of.values() for name in names if name not in found]
    if missing:
        raise SystemExit(f"the sweep has not seen {len(missing)} classes, such as {missing[0]}")
    versions = {"version": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    return TEXT.format(
        counts=_counts(of, found), reasons=_reasons(found), lists=_lists(of, found), **versions
    )


def _counts(of: dict[str, list[str]], found: dict[str, Found]) -> str:
    rows = [("", "classes", *VERDICTS.values()), ("---",) * (2 + len(VERDICTS))]
    total: Counter[str] = Counter()
    for kind, names in of.items():
        count = Counter(verdict(found[name]) for name in names)
        total += count
        rows.append((kind, str(len(names)), *(str(count[v]) for v in VERDICTS)))
    rows.append(("all", str(sum(total.values())), *(str(total[v]) for v in VERDICTS)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _reasons(found: dict[str, Found], most: int = 20) -> str:
    count: Counter[str] = Counter()
    for cells in found.values():
        texts = [text for text in cells.values() if text.startswith("refused: ")]
        if texts:
            count[_short(texts[0])] += 1
    rows = ["| classes | refused, because |\n|---|---|\n"]
    rows += [f"| {n} | {text} |\n" for text, n in count.most_common(most)]
    if rest := sum(n for _, n in count.most_common()[most:]):
        rows.append(f"| {rest} | others |\n")
    return "".join(rows)


def _short(text: str) -> str:
    """Return a refusal without what is of one class alone, up to its advice.

    >>> _short("refused: a model: BertModel returns pooler_output [2, 32], which should be; pool")
    '... returns ... [...], which should be'
    """
    text = text.removeprefix("refused: ").split(";")[0].split(" (on rank")[0]
    text = re.sub(r"^(a model[^:]*|ring_forward|shard_batch): ", "", text)
    text = re.sub(r"returns \S+ \[", "returns ... [", re.sub(r"\[[^\]]*\]", "[...]", text))
    text = re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*\b|\b\d+\b", "...", text)
    return " ".join(text.replace("|", "/").split()[:24])


def _lists(of: dict[str, list[str]], found: dict[str, Found]) -> str:
    parts = []
    for kind, names in of.items():
        parts.append(f"### {kind.capitalize()}\n")
        for each, title in VERDICTS.items():
            if chosen := [name for name in names if verdict(found[name]) == each]:
                lines = textwrap.fill(" ".join(chosen), 100, break_long_words=False)
                parts.append(f"{title.capitalize()}:\n\n```\n{lines}\n```\n")
    return "\n".join(parts)


def main(given: list[str]) -> Any:
    """Write the page; an argument is another file of the sweep's."""
    file = Path(given[0]) if given else FILE
    PAGE.write_text(page(json.loads(file.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
