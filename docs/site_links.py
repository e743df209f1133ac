"""Prepare pages for the site: the README is its first, and links out of docs/ lead to the code.

Pictures lead to themselves, to be seen large on a phone. `mkdocs.yml` names this file as a hook. On
GitHub the same links lead to the same files.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File  # nobody but the site needs it

    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files outside of docs/ lead to the repository, where there is one."""
    markdown = re.sub(r"^(!\[[^\]]*\]\(([^)]+\.svg)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)
    folder = "" if page.file.src_uri == "index.md" else join("docs", dirname(page.file.src_uri))
    return re.sub(
        r"\[([^\]]*)\]\(([^)#:]+)\)",
        lambda found: _outside(found, folder, config["repo_url"]),
        markdown,
    )


def _outside(found: re.Match[str], folder: str, repository: str | None) -> str:
    """Return a link as it is, or to the repository; without one its words as code."""
    words, target = found.groups()
    path = normpath(join(folder, target))
    known = path.startswith("docs/") and not path.endswith(".py")
    if known or (not folder and not (ROOT / path).exists()):  # the README's own, in docs/
        return found.group()
    if not (ROOT / path).exists():
        raise ValueError(f"{folder or 'README.md'}: {target} leads nowhere")
    return f"[{words}]({repository.rstrip('/')}/blob/main/{path})" if repository else f"`{path}`"
