"""Hooks of MkDocs: what the pages link to in the repository becomes a page of the site, so that no link leaves it.

Sources outside docs/ and examples are shown as code below `source/`, notebooks as pages. The pages themselves stay as
GitHub shows them: marks of tested code blocks and comments for generators are removed here.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".cc": "cpp",
    ".h": "cpp",
    ".inc": "cpp",
    ".conf": "nginx",
    ".service": "ini",
}
# Served as they are.
ASSETS = (".svg", ".png", ".json")


def github_anchor(heading: str, separator: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make anchors as GitHub makes them, for which the pages' links are written; add the papers to the results."""
    config["mdx_configs"]["toc"]["slugify"] = github_anchor
    results = next(section["Results"] for section in config["nav"] if "Results" in section)
    for page in sorted((DOCS / "papers").glob("*.md")):
        title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        results.append({title.partition(":")[0]: f"papers/{page.name}"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of sources and notebooks that pages link to, directly or through other pages."""
    texts = [(page.src_uri, page.content_string) for page in files if page.is_documentation_page()]
    for uri, text in texts:
        for target in targets(text, origin(uri)):
            new = page_of(target)
            is_new = new.endswith(".md") and files.get_file_from_path(new) is None
            # MkDocs names the pages with a broken link.
            if not is_new or not target.exists():
                continue
            content = shown(target)
            files.append(File.generated(config, new, content=content))
            if target.suffix in (".md", ".ipynb"):
                texts.append((new, content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return a page as MkDocs understands it, with its links within the site."""
    here = page.file.src_uri
    if "~~~~" in markdown:
        # A source: what looks like a link there is code.
        return markdown

    def inside(link: re.Match[str]) -> str:
        target = (origin(here) / link[1]).resolve()
        return posixpath.relpath(page_of(target), posixpath.dirname(here) or ".")

    if here.startswith("papers/"):
        page.meta["search"] = {"boost": 0.3}  # their many rows would come first
    text = re.sub(r"^<!--.*-->\n", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"^( *```\w+) \w+$", r"\1", text, flags=re.MULTILINE)
    return LINK.sub(inside, text)


def origin(uri: str) -> Path:
    """Return the folder of the repository in which a page's links begin."""
    is_source = uri.startswith("source/")
    return ((ROOT / uri.removeprefix("source/")) if is_source else (DOCS / uri)).parent


def targets(text: str, folder: Path) -> Iterator[Path]:
    """Yield what a page links to in the repository."""
    return ((folder / link).resolve() for link in LINK.findall(text))


def page_of(target: Path) -> str:
    """Return the path in the site of a file or folder of the repository."""
    if target.is_relative_to(DOCS) and target.suffix in (".md", ".ipynb", *ASSETS):
        return (
            target.relative_to(DOCS).with_suffix(target.suffix.replace(".ipynb", ".md")).as_posix()
        )
    name = target.relative_to(ROOT).as_posix()
    return f"source/{name}" if target.suffix == ".md" else f"source/{name}.md"


def shown(target: Path) -> str:
    """Return a page of Markdown that shows a file, or the files of a folder."""
    if target.suffix == ".md":
        return target.read_text("utf-8")
    if target.suffix == ".ipynb":
        return notebook_page(json.loads(target.read_text("utf-8")))
    title = target.relative_to(ROOT).as_posix()
    lines = ["---", "search: {exclude: true}", "---", f"# {title}", ""]
    for file in [target] if target.is_file() else sorted(filter(is_text, target.rglob("*"))):
        if target.is_dir():
            lines += [f"## {file.relative_to(target).as_posix()}", ""]
        text = file.read_text("utf-8").rstrip()
        lines += [f"~~~~{LANGUAGES.get(file.suffix, 'text')}", text, "~~~~", ""]
    return "\n".join(lines)


def is_text(path: Path) -> bool:
    """Whether a file of a folder is shown."""
    return path.suffix in (*LANGUAGES, ".env") and "__pycache__" not in path.parts


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a page with the cells of a notebook, and what they printed and drew."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            if "image/png" in shown:
                parts.append(f"![](data:image/png;base64,{shown['image/png'].strip()})")
                continue
            printed = "".join(output.get("text", shown.get("text/plain", ())))
            plain = re.sub(r"\x1b\[[\d;]*m", "", printed.rstrip())
            parts.append(f"```text\n{plain}\n```")
    return "\n\n".join(parts)
