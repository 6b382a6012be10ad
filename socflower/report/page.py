"""The page of a report: style sheet, HTML elements and escaping, independent of results.

Text is added to a page only through `text`, which escapes it; every other function takes ready HTML.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

# One column of cards. Plots keep a white background in dark mode, since their lines are dark.
_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1b1f24; --faint: #59636e;
  --line: #d5dae0; --good: #00684a; --bad: #a83200; --good-bg: #e0f3ec; --bad-bg: #fdeae0; --stripe: #f8f9fb;
  --link: #0060a8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1e2226; --ink: #e8eaed; --faint: #a5adb6;
  --line: #3b4249; --good: #62d6ab; --bad: #ff9d6b; --good-bg: #12372b; --bad-bg: #46230f; --stripe: #23282d;
  --link: #7cc0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h1 + section { margin-top: 1.2rem; }
h2 { font-size: 1.2rem; margin: 0 0 .7rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; }
a { color: var(--link); }
.question { font-size: 1.1rem; color: var(--faint); margin: 0 0 1.2rem; max-width: 75ch; white-space: pre-line;
  overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 18px; }
.note { color: var(--faint); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--faint); font-size: .9rem; padding-bottom: .4rem; }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; font-weight: 600; line-height: 1.25; }
tbody th { font-weight: 600; overflow-wrap: break-word; min-width: 7rem; max-width: 18rem; }
tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; }
td.number { white-space: nowrap; }
td small { display: block; color: var(--faint); }
td.wrap { overflow-wrap: break-word; } td code { overflow-wrap: anywhere; }
.badge { display: inline-block; border-radius: 99px; padding: 0 .6rem; font-weight: 600; white-space: nowrap; }
.holds { color: var(--good); background: var(--good-bg); }
.fails { color: var(--bad); background: var(--bad-bg); }
.unknown { color: var(--faint); background: var(--stripe); }
.verdict { border-radius: 8px; padding: .5rem .8rem; font-weight: 600; margin: 0 0 .8rem; }
figure { margin: 0; background: #fff; color: #1b1f24; border-radius: 8px; padding: 12px; overflow-x: auto; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
@media (max-width: 760px) { figure > svg, table { min-width: 640px; } }
figure + figure, figure + .scroll, figure + details { margin-top: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.3rem; list-style: none; margin: 0 0 8px; padding: 0;
  font-size: .92rem; }
.legend li { display: flex; align-items: center; gap: .45rem; overflow-wrap: anywhere; min-width: 0; }
.legend svg { margin: 0; flex: none; }
details { margin-top: .6rem; }
summary { cursor: pointer; font-weight: 600; }
pre { font-size: .85rem; line-height: 1.45; overflow-x: auto; background: var(--stripe); border-radius: 8px;
  padding: 12px; margin: .6rem 0 0; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .9em; }
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --faint: #444; --line: #bbb; --stripe: #fff; --good: #00543c;
    --bad: #8c2a00; --good-bg: #fff; --bad-bg: #fff; --link: #000; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  section { border: 0; padding: 0; } figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  table { font-size: 8pt; } th, td { padding: .2rem .25rem; } td.number { white-space: normal; }
  tbody th { min-width: 0; } .badge { border: 1px solid; }
  .scroll, figure, pre { overflow: visible; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
}
"""


def text(value: object) -> str:
    """Return a value as HTML text, also safe inside a quoted attribute."""
    return html.escape(printable(value))


def printable(value: object) -> str:
    """Return a value as text without lone surrogates and control characters."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(char if char.isprintable() or char in " \n\t" else "\ufffd" for char in plain)


def badge(holds: bool | None) -> str:
    """Return the badge of a claim, None for an unchecked one; it has sign and word for colour-blind readers."""
    if holds is None:
        return '<span class="badge unknown">? not checked</span>'
    return f'<span class="badge {"holds" if holds else "fails"}">{"✓ holds" if holds else "✗ fails"}</span>'


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """Return a table whose first column holds the row headings; columns in `numeric` are right-aligned."""
    right = set(numeric)
    kind = ['class="number"' if index in right else 'class="wrap"' for index in range(len(head))]
    lines = ['<div class="scroll" tabindex="0"><table>', f"<caption>{caption}</caption>" if caption else "",
             "<thead><tr>", *(f'<th scope="col" {kind[index]}>{cell}</th>' for index, cell in enumerate(head)),
             "</tr></thead><tbody>"]
    for first, *rest in rows:
        cells = (f"<td {kind[index]}>{cell}</td>" for index, cell in enumerate(rest, start=1))
        lines.append(f'<tr><th scope="row" {kind[0]}>{first}</th>{"".join(cells)}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(line for line in lines if line)


def section(anchor: str, heading: str, *content: str) -> str:
    """Return a card with a heading."""
    body = "\n".join(part for part in content if part)
    return f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{heading}</h2>\n{body}\n</section>'


def figure(svg: str, legend: str = "") -> str:
    """Return a picture on a white background, below its legend."""
    return f"<figure>\n{legend}{svg}\n</figure>"


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    """Return content that is collapsed by default."""
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>\n{content}\n</details>"


def listing(value: Any) -> str:
    """Return a nested value as indented JSON; NaN and infinity become text."""
    return f"<pre><code>{text(json.dumps(_as_json(value), indent=2, ensure_ascii=False))}</code></pre>"


def page(title: str, body: str) -> str:
    """Return a complete document; `title` is plain text, `body` is HTML."""
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            # Makes browsers enforce what the tests check: nothing is loaded, nothing is executed.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
            "</main>\n</body>\n</html>\n")


def _as_json(value: Any) -> Any:
    """Return a value that JSON can represent; other types become text."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
