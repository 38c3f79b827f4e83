"""What makes a site of our texts: those beside the code are pages, too.

MkDocs reads docs/ alone; README.md, CHANGELOG.md, CONTRIBUTING.md and the READMEs of deploy/ stand
where a reader of the repository looks for them.  Each becomes a page of the same path, README.md
the first one, and links between all of them are rewritten.  A link to a file that is no page (a
manifest, a config) becomes its path in the repository.

Lines of a narrow column end where a reader expects it: long names in code after `_`, `.` or `/`,
options nowhere.  Joined Chinese lines get no space between them.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ["README.md", "README_zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(?<!</span>)<code>([^<]+)</code>")  # in a line; a block's begins with a span
WORD = re.compile(r"[^\s&;]+")
INSIDE = re.compile(r"(?<=\w)(?:[_/]|\.(?!(?:py|json|jsonl|yml|yaml|md|safetensors)\b))(?=\w)")
CHINESE_LINES = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])\n *(?=[\u3000-\u9fff\uff00-\uffef])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the texts beside the code."""
    texts = [*BESIDE, *(str(each.relative_to(ROOT)) for each in ROOT.glob("deploy/*/README.md"))]
    for text in texts:
        path = "index.md" if text == "README.md" else text
        content = (ROOT / text).read_text(encoding="utf-8")
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at pages, and names files that are none."""
    source = _in_repository(page.file.src_uri)

    def pointed(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        uri = "index.md" if path == "README.md" else path.removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return text if text == path else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri))}{anchor})"

    return LINK.sub(pointed, CHINESE_LINES.sub("", markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Says where code in a line may be broken."""

    def breakable(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith("-") or re.fullmatch(r"[\d,-]+", word):  # --selected_gpus 0-7
            return f'<span class="option">{word}</span>'
        return INSIDE.sub(r"\g<0><wbr>", word) if len(word) > 12 else word

    return CODE.sub(lambda code: f"<code>{WORD.sub(breakable, code[1])}</code>", html)


def _in_repository(uri: str) -> str:
    """Where the text of a page stands: "docs/data.md"."""
    if uri == "index.md":
        return "README.md"
    return uri if uri in BESIDE or uri.startswith("deploy/") else f"docs/{uri}"
