"""A report's building blocks, each as Markdown and as HTML; one self-contained page of them."""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sdsie_sglang.eval.token_gears import Cycle

CSS = """
:root { color-scheme: light; --ink: #1c1f24; --soft: #5b6470; --line: #dfe3e8; --accent: #0072B2; --warn: #fff4e5; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; color: var(--ink); background: #fff;
       font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p, li { max-width: 46rem; }
.wide { overflow-x: auto; margin: .6rem 0; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .65rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; background: #f7f8fa; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
th:first-child { background: #f7f8fa; }
table.text td { text-align: left; white-space: normal; min-width: 9rem; overflow-wrap: normal; }
table.text th { text-align: left; }
tr:last-child td { border-bottom: 0; }
figure { margin: 1rem 0; }
figure .wide { border: 0; }
figure img { display: block; width: 100%; max-width: 38rem; min-width: 20rem; height: auto; }
figcaption, .note { color: var(--soft); font-size: .9rem; max-width: 46rem; }
.flags { background: var(--warn); border-left: 4px solid #e69f00; border-radius: 4px; padding: .6rem 1rem;
         margin: 1rem 0; }
.flags ul { margin: .3rem 0; padding-left: 1.1rem; }
code, pre { font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; background: #f3f4f6; border-radius: 4px; }
code { padding: .1rem .3rem; }
pre { padding: .7rem; overflow-x: auto; white-space: pre-wrap; }
.answer { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .8rem; line-height: 1.9; }
.answer span { border-radius: 3px; padding: .12rem 0; border-bottom: 3px solid transparent; }
.answer .drafted { background: #d6e9f5; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 40rem) { body { font-size: 15px; padding-top: 1rem; } h1 { font-size: 1.4rem; } }
"""
ENTROPY_FULL_BITS = 4.0
"""Entropy at which a cycle's underline is fully dark."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text; `note` is set smaller."""

    text: str
    note: bool = False


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: bool = False


@dataclass(frozen=True)
class Flags:
    """Warnings; none is said too."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Picture:
    """A figure as a data URI; left out of Markdown."""

    uri: str
    caption: str


@dataclass(frozen=True)
class Answer:
    """An answer's text by cycle: shaded if drafted, underlined the darker the higher the entropy."""

    pieces: Sequence[tuple[str, Cycle | None]]


Block = Heading | Text | Table | Flags | Code | Picture | Answer


def markdown(blocks: Sequence[Block]) -> str:
    """Without pictures and answers."""
    return "\n\n".join(text for block in blocks if (text := _markdown(block))) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Table(head, rows):
            lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
            return "\n".join("| " + " | ".join(line) + " |" for line in lines)
        case Flags(lines):
            return "\n".join(["Flags:", "", *(f"- {line}" for line in lines)]) if lines else "No flag was raised."
        case Code(text):
            return f"```\n{text}\n```"
        case _:
            return ""


def page(title: str, blocks: Sequence[Block]) -> str:
    """One HTML file that needs nothing else."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_escape(text)}</h{level}>"
        case Text(text, note):
            return f'<p class="note">{_escape(text)}</p>' if note else f"<p>{_escape(text)}</p>"
        case Table(head, rows, prose):
            heads = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
            lines = "".join("<tr>" + "".join(f"<td>{_escape(c)}</td>" for c in row) + "</tr>" for row in rows)
            kind = ' class="text"' if prose else ""
            return f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
        case Flags(lines):
            if not lines:
                return "<p>No flag was raised.</p>"
            items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
            return f'<div class="flags"><strong>Flags</strong><ul>{items}</ul></div>'
        case Code(text):
            return f"<pre>{_escape(text)}</pre>"
        case Picture(uri, caption):
            words = _escape(caption)
            image = f'<div class="wide"><img src="{uri}" alt="{words}"></div>'
            return f"<figure>{image}<figcaption>{words}</figcaption></figure>"
        case Answer(pieces):
            return f'<div class="answer">{"".join(_piece(*piece) for piece in pieces)}</div>'


def _escape(text: str) -> str:
    """For text and attributes; a number is not parted from its percent sign."""
    return html.escape(re.sub(r"(?<=\d) %", "\u00a0%", text), quote=True)


def _piece(text: str, cycle: Cycle | None) -> str:
    words = html.escape(text)
    if cycle is None:
        return words
    dark = 0.0 if math.isnan(cycle.entropy_bits) else min(cycle.entropy_bits / ENTROPY_FULL_BITS, 1.0)
    kind = ' class="drafted"' if cycle.gear else ""
    title = f"gear {cycle.gear}, {cycle.entropy_bits:.2f} bits"
    return f'<span{kind} title="{title}" style="border-bottom-color: rgba(213,94,0,{dark:.2f})">{words}</span>'
